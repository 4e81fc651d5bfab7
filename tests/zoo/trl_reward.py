"""TRL trains a reward model on pairs of answers that go through the model in one call."""

import tempfile
import warnings

from datasets import Dataset
from transformers import LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer

from zoo import Run
from zoo._trainers import SETTINGS, train_with
from zoo._words import llama_config, sentences, tokenizer


def train(run: Run) -> None:
    warnings.simplefilter("ignore")
    said = sentences(64, 12)
    data = Dataset.from_dict({"chosen": said[:32], "rejected": said[32:]})
    config = llama_config()
    config.num_labels = 1
    with tempfile.TemporaryDirectory() as folder:
        arguments = RewardConfig(
            folder,
            max_steps=run.steps,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            **SETTINGS,
        )
        model = LlamaForSequenceClassification(config)
        train_with(RewardTrainer(model, arguments, train_dataset=data, processing_class=tokenizer()), run)
