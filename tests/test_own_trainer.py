"""Jobs from a Trainer: they train as the Trainer does, bit for bit, and leave it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_jobs import differences
from test_own_loop import trained

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from autotune import Job, JobError, Plan, TorchEngine  # noqa: E402


class Recording(Trainer):
    """A Trainer that reads its data in order and keeps each batch's loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(*args, **kwargs)
        self.losses.append(float((found[0] if isinstance(found, tuple) else found).detach()))
        return found


def gpt() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=31, n_positions=16, n_embd=16, n_layer=3, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=31,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
            num_labels=3,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
        )
    )


def texts(count: int = 20) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(31, (12,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row.where(torch.arange(12) < 12 - i % 5, -100)} for i, row in enumerate(rows)]


def classes(count: int = 20) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row["input_ids"], "labels": torch.tensor(i % 3)} for i, row in enumerate(texts(count))]


def trainer(
    folder: Path, model: Any = None, kind: Any = Recording, data: Any = None, eval_data: Any = None, **changes: Any
) -> Any:
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
        **changes,
    }
    arguments = TrainingArguments(**settings)
    return kind(model or gpt(), arguments, train_dataset=texts() if data is None else data, eval_dataset=eval_data)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_a_trainers_job_trains_as_the_trainer_does(tmp_path: Path, schedule: str):
    own = trainer(tmp_path, lr_scheduler_type=schedule, max_grad_norm=0.5)
    job = Job.from_trainer(own)
    assert (job.name, job.batch_size, job.max_steps, job.clip_norm) == ("gpt2lmheadmodel", 4, 5, 0.5)
    assert (own.optimizer, own.lr_scheduler) == (None, None)
    engine = TorchEngine(job, device="cpu")
    found = trained(engine, 5)
    own.losses.clear()
    own.train()
    assert found == own.losses
    assert differences(dict(engine.model.named_parameters()), dict(own.model.named_parameters())) == []


def test_a_model_that_computes_its_mean_itself_trains_as_the_trainer_does(tmp_path: Path):
    own = trainer(tmp_path, bert(), data=classes())
    job = Job.from_trainer(own)
    engine = TorchEngine(job, device="cpu")
    found = trained(engine, 5)
    own.losses.clear()
    own.train()
    assert found == own.losses
    assert job.count is not None
    assert job.count(next(iter(job.batches(0)))) == 4


def test_accumulated_batches_are_one_batch_that_k_cuts_again(tmp_path: Path):
    own = trainer(tmp_path, gradient_accumulation_steps=2)
    job = Job.from_trainer(own)
    batches = list(job.batches(0))
    assert (job.batch_size, job.max_steps) == (8, 3)
    assert [batch["input_ids"].shape[0] for batch in batches] == [8, 8, 4]
    assert job.count is not None
    assert job.count(batches[0]) == own.get_batch_samples(iter(own.get_train_dataloader()), 2, torch.device("cpu"))[1]
    engine = TorchEngine(job, device="cpu")
    whole, cut = (engine.gradient(Plan(accumulation_steps=k)) for k in (1, 2))
    for one, two in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, two)


def test_each_seed_shuffles_a_trainers_data_in_its_own_way(tmp_path: Path):
    job = Job.from_trainer(trainer(tmp_path, kind=Trainer))
    first, again, other = (torch.cat([batch["input_ids"] for batch in job.batches(seed)]) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_trainers_own_data_for_evaluation_gives_the_metric(tmp_path: Path):
    own = trainer(tmp_path)
    own.eval_dataset = texts(6)
    job = Job.from_trainer(own, max_steps=3, target=3.0)
    assert (job.max_steps, job.target) == (3, 3.0)
    metric = TorchEngine(job, device="cpu").evaluate()
    assert metric == pytest.approx(own.evaluate()["eval_loss"], rel=0.05)


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": OwnStep}, "OwnStep has a training_step of its own"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "ReduceLROnPlateau needs a metric"),
        ({"optim": "lomo"}, "the Trainer cannot make its optimizer or scheduler .ImportError: .*lomo"),
        ({"torch_compile": True, "torch_compile_backend": "eager"}, "torch_compile is set"),
    ],
)
def test_a_trainer_that_a_job_cannot_repeat_is_refused(tmp_path: Path, change: dict[str, Any], message: str):
    if "lr_scheduler_type" in change:
        change = {**change, "eval_strategy": "steps", "eval_steps": 5, "eval_data": texts(4)}
    own = trainer(tmp_path, **change)
    with pytest.raises(JobError, match=message):
        Job.from_trainer(own)


def test_what_is_no_trainer_or_is_sharded_is_refused(tmp_path: Path):
    with pytest.raises(JobError, match=r"trainer is an int \(allowed: a transformers.Trainer\)"):
        Job.from_trainer(3)
    own = trainer(tmp_path)
    own.args.deepspeed = {"zero_optimization": {"stage": 2}}
    with pytest.raises(JobError, match="trains by DeepSpeed"):
        Job.from_trainer(own)
    own.args.deepspeed, own.train_dataset = None, None
    with pytest.raises(JobError, match="no train_dataset"):
        Job.from_trainer(own)
