"""The Trainer evaluates, saves checkpoints and keeps the best one while it trains."""

import tempfile

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from zoo import VOCABULARY, Run, texts
from zoo._trainers import SETTINGS, train_with


def train(run: Run) -> None:
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=4, n_head=2)
    rows = [{"input_ids": row, "labels": row} for row in next(texts(1, rows=64))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=run.steps,
            eval_strategy="steps",
            eval_steps=5,
            save_strategy="steps",
            save_steps=5,
            save_total_limit=2,
            load_best_model_at_end=True,
            **SETTINGS,
        )
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows[8:], eval_dataset=rows[:8])
        train_with(trainer, run)
