"""TRL's preference optimization with LoRA and default settings; the tuner takes over its checkpointing."""

import tempfile
import warnings

from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

from zoo import Run
from zoo._trainers import SETTINGS, train_with
from zoo._words import llama, sentences, tokenizer


def train(run: Run) -> None:
    warnings.simplefilter("ignore")
    said = sentences(96, 12)
    data = Dataset.from_dict({"prompt": said[:32], "chosen": said[32:64], "rejected": said[64:]})
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            folder,
            max_steps=run.steps,
            bf16=False,
            save_strategy="no",
            **SETTINGS,
        )
        trainer = DPOTrainer(
            llama(), args=arguments, train_dataset=data, processing_class=tokenizer(), peft_config=LoraConfig()
        )
        train_with(trainer, run)
