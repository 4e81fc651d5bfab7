"""A Trainer whose loss calls the model twice for each batch, as R-Drop does, and accumulates two batches."""

import tempfile
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from zoo import VOCABULARY, Run, texts
from zoo._trainers import SETTINGS, train_with


class RDrop(Trainer):
    """A Trainer that adds the divergence between the predictions under two dropout masks to the loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        one, two = model(**inputs), model(**inputs)
        first, second = (torch.log_softmax(output.logits, dim=-1) for output in (one, two))
        apart = nn.functional.kl_div(first, second, log_target=True, reduction="batchmean")
        loss = one.loss + two.loss + apart
        return (loss, one) if return_outputs else loss


def train(run: Run) -> None:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32
    )
    rows = [{"input_ids": row, "labels": row.sum() % 2} for row in next(texts(1, rows=96))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=run.steps, gradient_accumulation_steps=2, save_strategy="no", **SETTINGS
        )
        train_with(RDrop(BertForSequenceClassification(config), arguments, train_dataset=rows), run)
