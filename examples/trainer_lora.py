"""Tune a Trainer that fine-tunes a LoRA adapter, then train it with the tuner attached.

python examples/trainer_lora.py
"""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import autotune
from autotune.live.integrations.transformers import AutotuneCallback


def make_trainer(folder: str) -> Trainer:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=6, n_head=4))
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    starts = torch.arange(128)[:, None]
    rows = [{"input_ids": row, "labels": row} for row in (starts + torch.arange(64)) % 64]
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=16, num_train_epochs=4, report_to=[], use_cpu=True, save_strategy="no"
    )
    return Trainer(adapted, arguments, train_dataset=rows)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Before the run: a plan to launch with.
        job = autotune.Job.from_trainer(make_trainer(folder))
        found = autotune.tune(job, method="exact", memory_budget="70%")
        print(autotune.Plan.load(found["run"]))

        # While it runs: the same Trainer, and one callback. The training stays the same to the last bit.
        trainer = make_trainer(folder)
        callback = AutotuneCallback("exact", memory_budget_bytes=found["measured"]["memory_budget_bytes"])
        trainer.add_callback(callback)
        print(f"loss {trainer.train().training_loss:.3f}")


if __name__ == "__main__":
    main()
