"""A Trainer whose loss embeds questions and answers by two calls of the model; answers vary in length."""

import random
import tempfile
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

from zoo import VOCABULARY, Run, texts
from zoo._trainers import SETTINGS, train_with


class InBatchNegatives(Trainer):
    """A Trainer whose loss tells each question's answer from the others of the batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        asked, answered = (model(inputs[name]).last_hidden_state.mean(dim=1) for name in ("questions", "answers"))
        scores = nn.functional.normalize(asked, dim=-1) @ nn.functional.normalize(answered, dim=-1).mT
        loss = nn.functional.cross_entropy(20 * scores, torch.arange(len(scores)))
        return (loss, {"scores": scores}) if return_outputs else loss


def train(run: Run) -> None:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32
    )
    lengths = random.Random(0)
    rows = list(next(texts(1, rows=96)))

    def collate(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        whole = torch.stack(batch)
        return {"questions": whole[:, :4], "answers": whole.repeat(1, 8)[:, : lengths.choice((8, 24, 56, 80))]}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=run.steps, save_strategy="no", remove_unused_columns=False, **SETTINGS
        )
        model = BertModel(config, add_pooling_layer=False)
        train_with(InBatchNegatives(model, arguments, train_dataset=rows, data_collator=collate), run)
