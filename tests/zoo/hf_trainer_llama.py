"""The Trainer with the package's callback: a Llama, a schedule, and two batches to an update."""

import tempfile

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from zoo import VOCABULARY, Run, texts
from zoo._trainers import SETTINGS, train_with


def train(run: Run) -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
    rows = [{"input_ids": row, "labels": row} for row in next(texts(1, rows=96))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=run.steps,
            gradient_accumulation_steps=2,
            lr_scheduler_type="cosine",
            warmup_steps=4,
            save_strategy="no",
            **SETTINGS,
        )
        train_with(Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows), run)
