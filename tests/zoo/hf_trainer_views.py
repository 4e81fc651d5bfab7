"""A Trainer whose loss calls the model once to three times for a batch, each time with a longer copy of it."""

import tempfile
from typing import Any

from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from zoo import VOCABULARY, Run, texts
from zoo._trainers import SETTINGS, train_with


class Views(Trainer):
    """A Trainer whose number of calls is that of a schedule, which nothing that the first call is handed tells."""

    calls = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        self.calls += 1
        lengths = (1, 3, 2)[: 1 + self.calls % 3]
        texts, labels = inputs["input_ids"], inputs["labels"]
        views = [model(input_ids=texts.repeat(1, length)).logits for length in lengths]
        loss = sum(nn.functional.cross_entropy(view, labels) for view in views)
        return (loss, {"logits": views[0]}) if return_outputs else loss


def train(run: Run) -> None:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32
    )
    rows = [{"input_ids": row, "labels": int(row[0]) % 2} for row in next(texts(1, rows=96))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, max_steps=run.steps, save_strategy="no", **SETTINGS)
        train_with(Views(BertForSequenceClassification(config), arguments, train_dataset=rows), run)
