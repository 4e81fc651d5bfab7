"""Tests of attached runs that may compress activations: after trials, within the budget, and not where it harms."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_live import RESTLESS, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

import autotune
from autotune import AttachError, Settings
from autotune.choices import Precision, Storage
from autotune.live.lessons import Lessons
from autotune.mechanics.memory_meter import MemoryMeter, resident_tensors

WIDTH, BLOCKS = 64, 12
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.live.attach.useful_precisions", lambda _: (Precision.FP32,))


class Block(nn.Module):
    """A block with a residual path; if it is wild, one of many saved numbers is much larger than the others."""

    def __init__(self, *, wild: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.wild = wild

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        if self.wild:
            mask = torch.zeros_like(hidden)
            mask[..., ::32] = 1e5
            hidden = torch.where(mask > 0, mask, hidden)
            # The large numbers do not matter for the result, only for how the others are rounded.
            weight = torch.where(torch.arange(4 * WIDTH) % 32 == 0, 0.0, self.down.weight)
            return x + F.linear(hidden, weight, self.down.bias)
        return x + self.down(hidden)


class Network(nn.Module):
    """Blocks in a row; those of some numbers are wild, after a number of steps."""

    def __init__(self, wild: tuple[int, ...] = (), *, after: int = 0, checkpointed: int = -1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)
        self._wild, self._after, self._checkpointed, self.steps = wild, after, checkpointed, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            block.wild = number in self._wild and self.steps >= self._after
            x = checkpoint(block, x, use_reentrant=False) if number == self._checkpointed else block(x)
        return self.head(x)


class Compresses:
    """A policy that compresses every unit that may be."""

    name = "compresses"

    def __init__(self, k: int) -> None:
        self._k = k

    def decide(self, observation: Any, plan: autotune.Plan) -> autotune.Plan:
        space = observation.space
        for storage in filter(lambda one: one.approximates, space.storages):
            names = [name for name in space.recomputable if storage in space.storages_of(name)]
            plan = plan.changed(storage={**plan.storage, **dict.fromkeys(names, storage)})
        return plan.changed(accumulation_steps=self._k)


def needed(network: Network, plan: autotune.Plan) -> int:
    """Return the peak of a step under a plan in bytes."""
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    autotune.apply(network, plan)
    for _ in range(2):
        meter, batch = MemoryMeter(CPU), torch.randn(64, 4, WIDTH)
        with meter.metering(resident_tensors(network, optimizer, [batch])):
            network(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert meter.peak_bytes is not None
    return meter.peak_bytes


def budget_of(share: float) -> int:
    """Return a budget between what recomputing everything and what saving everything needs."""
    units = [f"blocks.{number}" for number in range(BLOCKS)]
    low, high = (
        needed(Network(), autotune.Plan(storage=dict.fromkeys(units, storage)))
        for storage in (Storage.RECOMPUTE, Storage.SAVE)
    )
    return int(low + share * (high - low))


def trained(
    network: Network,
    *,
    steps: int,
    share: float = 0.7,
    storages: tuple[str, ...] = ("compress8",),
    choices: tuple[int, ...] = (1,),
    spoilt: Callable[[int], object] = lambda _: False,
    look: Callable[[Any, int], None] = lambda *_: None,
) -> Any:
    """Train attached, and return the tuner and the plan of each step; no metered step is over its budget."""
    seeded()
    buffers = sum(buffer.nbytes for buffer in network.buffers())
    budget = budget_of(share) + buffers
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    tuner = autotune.attach(
        network,
        optimizer,
        Compresses(choices[-1]),
        mode="tolerant",
        memory_budget_bytes=budget,
        limits=RESTLESS,
        runs_dir=None,
        settings=Settings(storages=storages, accumulation_choices=choices),
    )
    plans = []
    for number in range(steps):
        network.steps = number
        batch, meter = torch.randn(64, 4, WIDTH), MemoryMeter(CPU)
        for micro in tuner.micro_batches(batch):
            look(tuner, number)
            # Metering is slow.
            metered = not (tuner.learning or tuner.probing or number % 4)
            with meter.metering(resident_tensors(network, optimizer, [micro])) if metered else contextlib.nullcontext():
                tuner.backward(network(micro).square().mean() * (math.nan if spoilt(number) else 1.0))
        tuner.step()
        plans.append(tuner.plan)
        if number and tuner.attached and meter.peak_bytes is not None:
            assert meter.peak_bytes <= budget
    return tuner, plans


def compressed(plan: autotune.Plan) -> set[str]:
    return {name for name, storage in plan.storage.items() if storage.approximates}


@pytest.mark.parametrize("storage", ["compress8", "compress4"])
def test_units_are_compressed_where_that_fits_the_budget(storage: str) -> None:
    tuner, plans = trained(Network(), steps=40, storages=(storage,))
    assert tuner.attached
    assert any(map(compressed, plans)), tuner.locks
    assert not tuner.status["over_budget_steps"]


def test_units_that_compression_spoils_keep_exact_storages() -> None:
    tuner, plans = trained(Network(wild=(7, 10)), steps=40)
    assert tuner.attached
    assert not any({"blocks.7", "blocks.10"} & compressed(plan) for plan in plans)
    assert "blocks.10" in tuner.locks["compress8"]


def test_a_unit_that_compression_spoils_later_is_locked_then_and_it_alone() -> None:
    tuner, plans = trained(Network(wild=(10,), after=25), steps=120)
    assert tuner.attached
    assert any("blocks.10" in compressed(plan) for plan in plans)
    assert re.match("in blocks.10: it changes the gradient", tuner.locks["compress8"])
    assert compressed(plans[-1])
    assert "blocks.10" not in compressed(plans[-1])


def test_batches_that_are_not_finite_lock_nothing() -> None:
    tuner, plans = trained(Network(), steps=100, spoilt=lambda number: 25 < number < 80)
    assert tuner.attached
    assert "compress8" not in tuner.locks
    assert compressed(plans[-1])


def test_where_copies_of_what_the_model_writes_to_have_no_room_nothing_is_tried() -> None:
    network, tried = Network(), []
    network.register_buffer("seen", torch.zeros(2**22))
    network.register_forward_pre_hook(lambda module, _: (module.seen.add_(1.0), None)[1])
    trained(network, steps=40, look=lambda tuner, _: tried.append(tuner.probing))
    assert not any(tried)


def test_blocks_under_checkpoints_of_the_loop_do_not_lock_the_others() -> None:
    network = Network(checkpointed=11)
    tuner, plans = trained(network, steps=40, share=1.2)
    assert "compress8" not in tuner.locks
    assert compressed(plans[-1])


def test_cuts_are_judged_by_exact_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def lean(lessons: Lessons, _: Any) -> autotune.Plan:
        return lessons._allowed.plan(2, Precision.INHERIT, lean=True)

    monkeypatch.setattr(Lessons, "_likeliest_lean", lean)
    tuner, plans = trained(Network(), steps=80, storages=("compress4",), choices=(1, 2))
    assert "accumulation_steps" not in tuner.locks
    assert sum(bool(compressed(plan)) and plan.accumulation_steps == 2 for plan in plans) > 15


def test_a_tuner_that_is_detached_in_a_trial_pass_leaves_the_model_as_it_was() -> None:
    network = Network()

    def look(tuner: Any, number: int) -> None:
        if tuner.probing and number > 3:
            tuner.detach()

    tuner, _ = trained(network, steps=30, look=look)
    assert not tuner.attached
    assert all("forward" not in block.__dict__ for block in network.blocks)


@pytest.mark.parametrize("mode", ["exact", "rounding"])
def test_approximate_storages_need_mode_tolerant(mode: str) -> None:
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    with pytest.raises(AttachError, match=rf"'compress8'.*mode is {mode} \(allowed: mode='tolerant'"):
        autotune.attach(network, optimizer, mode=mode, runs_dir=None, settings=Settings(storages=("compress8",)))
