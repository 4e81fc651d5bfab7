"""Tests of memory that depends on more than bytes: shapes, trained parameters and calls per step."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import TinyGPT
from test_live import RESTLESS, gpt_loss, seeded
from torch import nn

import autotune
from autotune.live.step_uses import Tracing
from autotune.mechanics import controls, randomness
from autotune.mechanics.memory_meter import MemoryMeter, resident_tensors
from autotune.plan import Plan, Storage
from autotune.profiling.step_signature import Signature, Trained

CPU = torch.device("cpu")
TOKENS = 1024


class Attention(nn.Module):
    """Attention that keeps its weights, which grow with the square of the length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.drop = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = self.drop(torch.softmax(q @ k.mT, dim=-1))
        return x + self.out(weights @ v)


class Eager(TinyGPT):
    """A model of blocks with explicit attention."""

    def __init__(self) -> None:
        super().__init__(width=16, blocks=6)
        self.blocks = nn.ModuleList(Attention(16) for _ in range(6))


def equal_bytes(lengths: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 11, (TOKENS // length, length), generator=generator) for length in lengths]


Prepare = Callable[[nn.Module, int], None]
Loss = Callable[[nn.Module, torch.Tensor, int], torch.Tensor]


class Alone:
    """A loop without a tuner, under given plans, that meters each step."""

    def __init__(self, loss: Loss, prepare: Prepare) -> None:
        with randomness.isolated():
            seeded()
            self.model = Eager()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
            self.random = randomness.capture()
        self._loss, self._prepare = loss, prepare

    def peak_bytes(self, plan: Plan, batch: torch.Tensor, number: int) -> int:
        self._prepare(self.model, number)
        controls.apply(self.model, plan)
        meter = MemoryMeter(CPU)
        with randomness.isolated():
            randomness.restore(self.random)
            with meter.metering(resident_tensors(self.model, self.optimizer, [batch])):
                self._loss(self.model, batch, number).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.random = randomness.capture()
        assert meter.peak_bytes is not None
        return meter.peak_bytes


def plain_loss(model: nn.Module, batch: torch.Tensor, _: int) -> torch.Tensor:
    return gpt_loss(model, batch)


def shares_of_budget(
    batches: Sequence[torch.Tensor],
    budget: int,
    *,
    loss: Loss = plain_loss,
    prepare: Prepare = lambda model, number: None,
) -> tuple[list[float], list[Plan], dict[str, Any]]:
    """Return each step's true peak relative to the budget, and its plan."""
    alone = Alone(loss, prepare)
    seeded()
    model = Eager()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    shares, plans = [], []
    with autotune.attach(
        model, optimizer, "exact", memory_budget_bytes=budget, limits=RESTLESS, runs_dir=None
    ) as tuner:
        for number, batch in enumerate(batches):
            prepare(model, number)
            for micro in tuner.micro_batches(batch):
                plans.append(tuner.plan)
                tuner.backward(loss(model, micro, number))
            tuner.step()
            shares.append(alone.peak_bytes(plans[-1], batch, number) / budget)
        status = {**tuner.status, "locks": tuner.locks}
    for one, two in zip(alone.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, two)
    return shares, plans, status


def peaks_of(batch: torch.Tensor) -> tuple[int, int]:
    """Return the smallest and the largest peak of a step."""
    alone = Alone(plain_loss, lambda model, number: None)
    names = [f"blocks.{number}" for number in range(6)]
    found = []
    for storage in (Storage.RECOMPUTE, Storage.SAVE):
        plan = Plan(storage=dict.fromkeys(names, storage))
        found.append([alone.peak_bytes(plan, batch, 0) for _ in range(2)][-1])
    return found[0], found[1]


def saves(plan: Plan) -> bool:
    return any(plan.storage_of(f"blocks.{number}") is Storage.SAVE for number in range(6))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["random", "short first"])
def test_batches_of_equal_bytes_but_different_shapes_stay_within_the_budget(order: str) -> None:
    lengths = [32, 64, 128, 256] * 12
    random.Random(5).shuffle(lengths)
    if order == "short first":
        lengths = sorted(lengths[:12]) + lengths[12:]
    batches = equal_bytes(lengths)
    low, high = peaks_of(max(batches, key=lambda batch: batch.shape[1]))
    shares, plans, status = shares_of_budget(batches, int(low + 0.3 * (high - low)))
    assert max(shares) <= 1.0, (shares, status)
    # The budget is used.
    assert any(saves(plan) for plan in plans[-12:])
    assert not status["over_budget_steps"]


@pytest.mark.slow
def test_batches_of_equal_bytes_stay_within_the_budget_after_first_sight_where_k_is_free() -> None:
    lengths = [32, 64, 128, 256]
    batches = equal_bytes([length for length in lengths for _ in range(4)] + lengths * 3)
    low, high = peaks_of(batches[15])
    budget = int(low + 0.3 * (high - low))
    seeded()
    model = Eager()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    over, seen, ks = [], set[int](), set[int]()
    with autotune.attach(
        model, optimizer, "exact", mode="rounding", memory_budget_bytes=budget, limits=RESTLESS, runs_dir=None
    ) as tuner:
        controller: Any = tuner._controller
        for number, batch in enumerate(batches):
            meter = MemoryMeter(CPU)
            with contextlib.ExitStack() as stack:
                for part, micro in enumerate(tuner.micro_batches(batch)):
                    if not part and not isinstance(controller.run.profiler._use, Tracing):
                        stack.enter_context(meter.metering(resident_tensors(model, optimizer, [batch])))
                    tuner.backward(gpt_loss(model, micro))
                ks.add(tuner.plan.accumulation_steps)
                tuner.step()
                optimizer.zero_grad()
            peak = meter.peak_bytes or tuner.status["measured_peak_bytes"] or 0
            if peak > budget and batch.shape[1] in seen:
                over.append((number, peak / budget))
            seen.add(batch.shape[1])
        assert tuner.attached
        assert "accumulation_steps" not in tuner.locks
    assert not over
    assert len(ks) > 1


def test_layers_unfrozen_later_stay_within_the_budget() -> None:
    def prepare(model: nn.Module, number: int) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(number >= 24 or not name.startswith(("blocks.0", "blocks.1", "blocks.2", "emb")))

    batches = equal_bytes([64] * 48)
    low, high = peaks_of(batches[0])
    shares, plans, _ = shares_of_budget(batches, int(low + 0.4 * (high - low)), prepare=prepare)
    assert max(shares) <= 1.0, shares
    assert any(saves(plan) for plan in plans[-8:])


def test_batch_signature_predicts_another_only_if_proportional() -> None:
    known = Signature(((8, 64),), (10, 10))
    assert known.tells_of(Signature(((8, 64),), (10, 10)))
    assert known.tells_of(Signature(((4, 64),), (10, 10)))
    assert known.tells_of(Signature(((16, 128),), (10, 10)))
    assert not known.tells_of(Signature(((4, 128),), (10, 10)))
    assert not known.tells_of(Signature(((16, 32),), (10, 10)))
    assert not known.tells_of(Signature(((8, 64),), (12, 10)))
    assert not known.tells_of(Signature(((8, 64), (8,)), (10, 10)))


def test_text_that_grows_beside_a_large_image_is_news_and_a_shorter_one_is_not() -> None:
    short, long = (Signature(((8, 3, 64, 64), (8, length)), (10, 10)) for length in (16, 96))
    assert not short.tells_of(long)
    assert long.tells_of(short)
    assert not long.scales_to(short)
    # All tensors grow together, or a small one stays.
    assert short.scales_to(Signature(((16, 3, 64, 64), (16, 16)), (10, 10)))
    labelled = Signature(((8, 64), (8,)), (10, 10))
    assert labelled.scales_to(Signature(((8, 256), (8,)), (10, 10)))
    assert Signature(((8, 256), (8,)), (10, 10)).scales_to(labelled)


class Pictured(nn.Module):
    """A large image goes through a cheap stem, and a text through the units that need the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 16, stride=16)
        self.text = TinyGPT(width=32, blocks=4, dropout=0.0)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen = self.stem(batch["image"]).mean()
        found: torch.Tensor = self.text(batch["text"])
        return found + seen


@pytest.mark.parametrize("mode", ["exact", "rounding"])
def test_long_texts_beside_large_images_fit_from_their_first_step_on(mode: str) -> None:
    lengths = [16] * 24 + [96] * 4 + [16] * 4 + [96] * 4
    generator = torch.Generator().manual_seed(1)
    batches = [
        {"image": torch.randn(8, 3, 64, 64), "text": torch.randint(0, 11, (8, length), generator=generator)}
        for length in lengths
    ]

    def step(trained: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(trained(batch)[:, :-1].flatten(0, 1), batch["text"][:, 1:].flatten())

    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        trained = Pictured()
        return trained, torch.optim.SGD(trained.parameters(), 1e-3)

    trained, optimizer = new()
    meter = MemoryMeter(torch.device("cpu"))
    with meter.metering(resident_tensors(trained, optimizer, [batches[-1]])):
        step(trained, batches[-1]).backward()
    budget, peaks = (meter.peak_bytes or 0) * 6 // 10, []
    trained, optimizer = new()
    with autotune.attach(trained, optimizer, mode=mode, memory_budget_bytes=budget, runs_dir=None) as tuner:
        controller: Any = tuner._controller
        for batch in batches:
            meter = MemoryMeter(torch.device("cpu"))
            with contextlib.ExitStack() as stack:
                for number, micro in enumerate(tuner.micro_batches(batch)):
                    if not number and not isinstance(controller.run.profiler._use, Tracing):
                        stack.enter_context(meter.metering(resident_tensors(trained, optimizer, [batch])))
                    tuner.backward(step(trained, micro))
                tuner.step()
                optimizer.zero_grad()
            peaks.append(meter.peak_bytes or tuner.status["measured_peak_bytes"])
    # By the bytes of the batch, which the image dominates, all long texts ran at twice the budget.
    assert max(peaks) <= budget


def test_changes_of_trained_parameters_and_of_modes_are_seen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)))
    trained, seen = Trained(model), set[int]()

    def is_new(steps: int = 1) -> bool:
        """Return whether the state is another than all before, after steps with as many parameters."""
        found = [trained.present(sum(1 for _ in model.parameters())) for _ in range(steps)][-1]
        new = found not in seen
        seen.add(found)
        return new

    assert is_new()
    model[0].weight.requires_grad_(False)
    assert is_new()
    assert not is_new(20)
    model[0].weight.requires_grad_(True)
    model[0].bias.requires_grad_(False)
    # As many are trained as before, but others.
    assert is_new()
    model[0].bias = nn.Parameter(torch.zeros(2))
    assert not is_new(20)
    model[1].eval()
    assert is_new()
    model[1].train()
    assert not is_new()
    model[1][0].register_module("beside", nn.Linear(2, 2))
    assert is_new()
