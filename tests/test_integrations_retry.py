"""Tests of a TunedTrainer that runs out of memory: it splits its batches and learns as if split from the start."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from test_live import RESTLESS, seeded
from torch import nn

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from test_integrations_transformers import llama, padded, texts  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

from autotune.live.integrations.transformers import TunedTrainer  # noqa: E402
from autotune.mechanics import cutting  # noqa: E402

STEPS = 7


@pytest.fixture
def fake(accelerator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Make Trainers use the fake accelerator, which they do not know."""
    device = torch.device("fake")
    monkeypatch.setattr(TrainingArguments, "device", property(lambda own: own._setup_devices and device))
    monkeypatch.setattr(accelerate.Accelerator, "device", property(lambda _: device))
    return accelerator


class Noisy(nn.Module):
    """A language model with dropout and a buffer to which each training pass adds: the same in pieces as whole."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3))
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.head = nn.Linear(16, 17)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embedding(input_ids) * attention_mask[..., None]
        for block in self.blocks:
            x = x + block(x)
        if self.training:
            with torch.no_grad():
                self.seen.add_(x.sum((0, 1)))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        logits = self.head(x)
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        # Each sample has the same weight, whatever its length.
        return {"loss": (losses.sum(1) / attention_mask.sum(1)).mean(), "logits": logits}


class Limited(Noisy):
    """A model that runs out of memory with more samples than a limit, in some forward passes or in all."""

    def __init__(self, limit: int, *, norm: bool = False) -> None:
        super().__init__(norm=norm)
        self.limit = limit

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        outputs = super().forward(input_ids, attention_mask, labels)
        if self.training and len(input_ids) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return outputs


class Cut(Trainer):
    """A trainer that splits the batch of each step into a given number of pieces."""

    def __init__(self, *args: Any, ks: Callable[[int], int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ks = ks

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        pieces = cutting.split(inputs, self.ks(self.state.global_step))
        whole, losses = cutting.num_samples(inputs), []
        for piece in pieces:
            if not isinstance(self.model, Noisy):
                losses.append(super().training_step(model, piece, num_items_in_batch))
                continue
            former, share = self.current_gradient_accumulation_steps, cutting.num_samples(piece) / whole
            self.current_gradient_accumulation_steps = 1.0 / share  # type: ignore[assignment]
            losses.append(super().training_step(model, piece, num_items_in_batch))
            self.current_gradient_accumulation_steps = former
        return torch.stack(losses).sum()


class Troubled(TunedTrainer):
    """A trainer that runs out of memory at one allocation of some steps; it counts allocations and records k."""

    fake: ModuleType
    failing: dict[int, int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts: list[int] = []
        self.ks: list[int] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        before = self.fake.calls["allocations"]
        self.fake.fail_at(self.failing.get(self.state.global_step, 0))
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self.fake.fail_at(0)
            self.counts.append(self.fake.calls["allocations"] - before)
            assert self.tuner is not None
            self.ks.append(self.tuner.plan.accumulation_steps)


def troubled(fake: ModuleType, failing: dict[int, int] | None = None) -> type[Troubled]:
    return type("Failing", (Troubled,), {"fake": fake, "failing": failing or {}})


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        **changes,
    }
    return TrainingArguments(**settings)


def trained(
    folder: Path,
    model: Callable[[], nn.Module] = Noisy,
    *,
    callbacks: list[Any] | None = None,
    ks: Callable[[int], int] | None = None,
    tuning: dict[str, Any] | None = None,
    kind: type[TunedTrainer] = TunedTrainer,
    **changes: Any,
) -> Any:
    seeded()
    common: dict[str, Any] = {
        "train_dataset": texts(64),
        "data_collator": padded,
        "callbacks": callbacks or [],
    }
    if ks is not None:
        trainer: Any = Cut(model(), arguments(folder, **changes), ks=ks, **common)
    else:
        options = {"mode": "rounding", "policy": "exact", "memory_budget_bytes": 10**9, "limits": RESTLESS}
        options = {**options, "runs_dir": folder, **(tuning or {})}
        trainer = kind(model(), arguments(folder, **changes), tuning=options, **common)
    trainer.left = None
    try:
        trainer.train()
    except Exception as error:
        trainer.left = error
    return trainer


def assert_same(one: Any, two: Any) -> None:
    names = ("loss", "grad_norm", "learning_rate", "epoch")
    rows = [[[row.get(name) for name in names] for row in run.state.log_history[:-1]] for run in (one, two)]
    assert rows[0] == rows[1]
    states = [run.model.state_dict() for run in (one, two)]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    optimizers = [run.optimizer.state_dict()["state"] for run in (one, two)]
    for key, entry in optimizers[0].items():
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizers[1][key][name])), (key, name)


def random_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), torch.get_device_module("fake").get_rng_state()]


def events(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    (log,) = folder.glob("*-attach-*/decisions.jsonl")
    rows = map(json.loads, log.read_text().splitlines())
    return (event for event in rows if event["event"] == kind)


@pytest.mark.parametrize(
    ("model", "step", "places"),
    [(Noisy, 1, 3), *(pytest.param(*case, 7, marks=pytest.mark.slow) for case in product((Noisy, llama), (0, 2, 5)))],
)
def test_retried_step_equals_a_step_split_from_its_beginning_whichever_allocation_fails(
    model: Any, step: int, places: int, fake: ModuleType, tmp_path: Path
) -> None:
    whole = trained(tmp_path / "whole", model, kind=troubled(fake))
    retried = 0
    for place in range(places):
        number = 1 + (whole.counts[step] - 1) * place // (places - 1)
        folder = tmp_path / str(place)
        tuned = trained(folder, model, kind=troubled(fake, {step: number}))
        if whole.ks[step] == 8 and tuned.left is not None:
            # In a traced step, no larger k is left.
            assert isinstance(tuned.left, torch.OutOfMemoryError)
            continue
        assert tuned.left is None
        states = random_states()
        # Outside the step's own passes, for example while the tuner probes units, there is nothing to repeat.
        for event in events(folder, "out of memory"):
            assert (event["step"], event["smallest_k"]) == (step, 2 * whole.ks[step])
            assert "out of memory" in tuned.tuner.locks[f"accumulation_steps < {event['smallest_k']}"]
            assert min(tuned.ks[step:]) >= event["smallest_k"]
            retried += 1
        assert_same(trained(folder, model, ks=tuned.ks.__getitem__), tuned)
        assert all(map(torch.equal, states, random_states()))
    assert retried >= max(places // 4, 1) or whole.ks[step] == 8


def test_batch_is_split_until_it_fits_and_stays_split_without_the_tuner(tmp_path: Path) -> None:
    class Leaves(TunedTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.state.global_step == 4:
                assert self.tuner is not None
                self.tuner.detach("its loop wants to")
            return super().training_step(*args, **kwargs)

    tuned = trained(tmp_path, lambda: Limited(2), kind=Leaves)
    assert tuned.left is None
    assert tuned.state.global_step == STEPS
    found = list(events(tmp_path, "out of memory"))
    assert [(event["step"], event["smallest_k"]) for event in found] == [(0, 2), (0, 4)]
    assert tuned.tuner.status["decided"].accumulation_steps >= 4
    assert tuned.tuner.detached_because == "its loop wants to"
    assert tuned.tuner.plan.accumulation_steps == 4


@pytest.mark.parametrize(
    ("tuning", "limit", "said"),
    [
        ({}, 0, r"^CUDA out of memory\. Tried to allocate 2\.00 GiB\.$"),
        ({"mode": "exact"}, 4, r"^CUDA out of memory\. Tried to allocate 2\.00 GiB\.$"),
        ({"stage": "observe"}, 4, r"^CUDA out of memory\. Tried to allocate 2\.00 GiB\.$"),
    ],
    ids=["the largest k does not suffice", "mode exact", "observed"],
)
def test_out_of_memory_that_no_larger_k_avoids_propagates(
    tuning: dict[str, Any], limit: int, said: str, tmp_path: Path
) -> None:
    tuned = trained(tmp_path, lambda: Limited(limit), tuning=tuning)
    assert isinstance(tuned.left, torch.OutOfMemoryError)
    assert re.match(said, str(tuned.left))
    assert tuned.state.global_step == 0


def test_batch_that_must_not_be_split_is_trained_whole(tmp_path: Path) -> None:
    tuned = trained(tmp_path, lambda: Limited(4, norm=True))
    assert isinstance(tuned.left, torch.OutOfMemoryError)
    assert "The batch may not be cut: cut in two, " in str(tuned.left)
    assert tuned.state.global_step == 1


def test_out_of_memory_in_an_update_propagates(tmp_path: Path) -> None:
    class Full(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    seeded()
    model = Noisy()
    tuning = {"mode": "rounding", "limits": RESTLESS, "runs_dir": tmp_path}
    trainer = TunedTrainer(
        model,
        arguments(tmp_path),
        train_dataset=texts(64),
        data_collator=padded,
        tuning=tuning,
        optimizers=(Full(model.parameters()), None),
    )
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        trainer.train()
    assert not list(events(tmp_path, "out of memory"))


def test_batch_modified_in_place_is_not_repeated(tmp_path: Path) -> None:
    class Writes(TunedTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs["labels"].masked_fill_(torch.rand(inputs["labels"].shape) < 0.1, -100)
            return super().compute_loss(model, inputs, *args, **kwargs)

    tuned = trained(tmp_path, lambda: Limited(4), kind=Writes)
    assert isinstance(tuned.left, torch.OutOfMemoryError)


def test_smaller_batches_are_the_last_resort_of_a_trainer_that_searches_batch_sizes(tmp_path: Path) -> None:
    # If k may not be raised, the Trainer starts over with smaller batches, which changes what is learned.
    model = Limited(4)
    sizes: list[int] = []

    class Finds(TunedTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            sizes.append(len(inputs["input_ids"]))
            return super().training_step(model, inputs, *args, **kwargs)

    def run(tuning: dict[str, Any]) -> list[int]:
        sizes.clear()
        tuned = trained(
            tmp_path, lambda: model, kind=Finds, tuning={"runs_dir": None, **tuning}, auto_find_batch_size=True
        )
        assert tuned.left is None
        assert tuned.state.global_step == STEPS
        return sorted(set(sizes))

    assert run({}) == [8]
    assert run({"mode": "exact"})[0] <= 4


RANKS = [
    pytest.param("1,3,4,forward", 3, 2, id="forward"),
    pytest.param("0,3,4,backward", 3, 2, id="backward"),
    pytest.param("1,0,2,backward", 0, 4, id="the first step, twice"),
]


def of_ranks(folder: Path, way: str, failing: str) -> list[dict[str, Any]]:
    run_on_ranks("retry_rank.py", folder, way, failing)
    return [json.loads((folder / f"{way}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(("failing", "step", "k"), RANKS)
def test_all_ranks_split_further_if_one_runs_out_of_memory(failing: str, step: int, k: int, tmp_path: Path) -> None:
    plain, tuned = of_ranks(tmp_path, "plain", "0,99,0,forward"), of_ranks(tmp_path, "tuned", failing)
    for rank in tuned:
        assert rank["error"] is None
        assert rank["why"] == "the training ended"
        assert f"accumulation_steps < {k}" in rank["locks"]
        assert min(rank["ks"][step:]) >= k
    assert tuned[0]["weights"] == tuned[1]["weights"]
    assert tuned[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-4)
    assert tuned[0]["parameters"] == pytest.approx(plain[0]["parameters"], rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_all_ranks_stop_if_the_largest_k_is_not_enough(where: str, tmp_path: Path) -> None:
    ranks = of_ranks(tmp_path, "ends", f"1,3,0,{where}")
    assert ranks[1]["error"] == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert ranks[0]["error"] == "another rank ran out of memory. The batch can be cut no further"
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert len(ranks[0]["ks"]) == len(ranks[1]["ks"]) == 4
