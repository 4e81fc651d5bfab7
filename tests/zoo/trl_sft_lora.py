"""TRL's fine-tuning with LoRA and default settings; the tuner takes over its checkpointing."""

import tempfile
import warnings

from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from zoo import Run
from zoo._trainers import SETTINGS, train_with
from zoo._words import llama, sentences, tokenizer


def train(run: Run) -> None:
    warnings.simplefilter("ignore")
    data = Dataset.from_dict({"text": sentences(48, 20)})
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            max_steps=run.steps,
            bf16=False,
            save_strategy="no",
            **SETTINGS,
        )
        trainer = SFTTrainer(
            llama(), arguments, train_dataset=data, processing_class=tokenizer(), peft_config=LoraConfig()
        )
        train_with(trainer, run)
