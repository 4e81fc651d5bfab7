"""Tests of loops whose steps take turns between tasks, each with units of its own beside common ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_live import RESTLESS
from test_zoo import assert_same, kept_where_locked, trained
from torch import nn
from zoo import WIDTH, Block, Run, points

import autotune
from autotune.mechanics.memory_meter import MemoryMeter, resident_tensors
from autotune.plan import Storage
from autotune.profiling.turns import Calls, common_order, joined, places_in

STEPS, TRUNK = 40, 3


class MultiTask(nn.Module):
    """A common trunk, and for each task blocks of its own before or after it."""

    def __init__(self, blocks: tuple[int, ...], *, first: bool = False) -> None:
        super().__init__()
        self.trunk, self.first = nn.ModuleList(Block() for _ in range(TRUNK)), first
        for task, count in enumerate(blocks):
            self.add_module(f"task{task}", nn.ModuleList(Block() for _ in range(count)))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        own, common = self.get_submodule(f"task{task}"), self.trunk
        for blocks in (own, common) if self.first else (common, own):
            for block in blocks:
                x = block(x)
            if self.first and task:
                # This branch hands the trunk more than the other.
                x = torch.cat([x, x], 1) if blocks is own else x
        return x


class FlatHeads(nn.Module):
    """A common trunk, and tasks of which each has one block of a common list."""

    def __init__(self, *, wide: int) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(Block() for _ in range(TRUNK))
        self.heads = nn.ModuleList(Narrow(WIDTH, 16 if task == wide else 1) for task in range(5))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        for block in self.trunk:
            x = block(x)
        return torch.as_tensor(self.heads[task](x))


class Narrow(nn.Module):
    """A residual block of some width."""

    def __init__(self, width: int, factor: int = 2) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Loop:
    """A loop whose steps each train one task.

    Args:
        new: makes the model.
        task_of: the task of each step.
        optimizer: class of the optimizer; one with a state notices each parameter's first gradient.
    """

    def __init__(
        self,
        new: Callable[[], nn.Module],
        task_of: Callable[[int], int],
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        self.new, self.task_of, self.optimizer = new, task_of, optimizer

    def train(self, run: Run) -> None:
        """Train."""
        model = self.new()
        optimizer = self.optimizer(model.parameters(), 1e-3)
        tuner = run.attach(model, optimizer)
        for number, batch in enumerate(points(run.steps, 8 * 16)):
            for micro in tuner.micro_batches(batch.view(8, 16, WIDTH)):
                loss = model(micro, self.task_of(number)).square().mean()
                tuner.backward(loss)
            tuner.step()
            run.log(loss)
        run.keep(model, optimizer)


DRAWN = torch.randint(3, (STEPS,), generator=torch.Generator().manual_seed(2)).tolist()
LOOPS = {
    "heads": (Loop(lambda: MultiTask((2, 1)), lambda step: step % 2), 2),
    "branches": (Loop(lambda: MultiTask((2, 1), first=True), lambda step: step % 2), 2),
    "drawn": (Loop(lambda: MultiTask((2, 1, 3)), DRAWN.__getitem__), 3),
    "late": (Loop(lambda: MultiTask((2, 1, 3)), lambda step: step % 2 if step < 20 or step % 3 else 2), 3),
    # Neither head is the first, the middle or the last of its list.
    "flat": (Loop(lambda: FlatHeads(wide=3), lambda step: 3 if step == 2 or (step > 24 and step % 2) else 1), 2),
    "without": (Loop(lambda: MultiTask((2, 0)), lambda step: int(step % 5 == 4)), 2),
}


@functools.cache
def bounds_of(name: str) -> tuple[Run, int, int]:
    """Return a loop's run without a tuner, and the largest peaks of its leanest plans and of saving everything."""
    loop, _ = LOOPS[name]
    lean = trained(loop, Run({"limits": RESTLESS, "policy": "exact", "memory_budget_bytes": 1}, steps=STEPS))
    plans = kept_where_locked(lean)
    full = plans[0].changed(storage=dict.fromkeys(plans[0].storage, Storage.SAVE))
    lowest, highest = (max(trained(loop, Run(plans=own, steps=STEPS)).peaks) for own in (plans, [full]))
    return trained(loop, Run(steps=STEPS)), lowest, highest


@pytest.mark.parametrize("share", [0.5, 8.0])
@pytest.mark.parametrize(
    "name",
    [name if name in ("heads", "flat") else pytest.param(name, marks=pytest.mark.slow) for name in LOOPS],
)
def test_steps_of_each_task_stay_within_the_budget_once_it_was_seen(name: str, share: float) -> None:
    """Everything was once recomputed for good, whatever the budget."""
    loop, tasks = LOOPS[name]
    alone, lowest, highest = bounds_of(name)
    budget = int(lowest + share * (highest - lowest))
    attaching: dict[str, Any] = {"limits": RESTLESS, "policy": "exact", "memory_budget_bytes": budget}
    run = trained(loop, Run(attaching, steps=STEPS))
    assert_same(alone, run)
    assert "profile" not in run.locks
    first = {loop.task_of(step): step for step in reversed(range(STEPS))}
    assert len(first) == tasks
    peaks = trained(loop, Run(plans=kept_where_locked(run), steps=STEPS)).peaks
    assert {step for step, peak in enumerate(peaks) if peak > budget} <= set(first.values())
    if share > 1:
        assert not [plan.recomputed for plan in run.used[-4:] if plan.recomputed]


def test_heads_take_turns_in_a_loop_that_stays_as_it_is() -> None:
    def losses(budget: int | None) -> tuple[list[float], list[int], Any]:
        torch.manual_seed(0)
        model = MultiTask((2, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        tuner = None if budget is None else autotune.checkpoint(model, budget, optimizer=optimizer)
        found, peaks = [], []
        for number, batch in enumerate(points(STEPS, 8 * 16)):
            meter = MemoryMeter(torch.device("cpu"))
            x = batch.view(8, 16, WIDTH)
            if number < 2 and tuner is None:
                with meter.metering(resident_tensors(model, optimizer, [x])):
                    loss = model(x, number % 2).square().mean()
                    loss.backward()
            else:
                loss = model(x, number % 2).square().mean()
                loss.backward()
            peaks.append(meter.peak_bytes or 0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found, peaks, tuner

    expected, peaks, _ = losses(None)
    found, _, tuner = losses(8 * max(peaks))
    assert found == expected
    assert "profile" not in tuner.locks
    assert tuner.plan.recomputed == ()
    tuner.detach()


@pytest.mark.parametrize(
    ("task_of", "steps", "lean"),
    [
        # A task of the first steps alone is not awaited for long, nor one that was traced, nor for ever.
        (lambda step: int(step > 2), 60, 40),
        (lambda step: int(step >= 30), 60, 8),
        pytest.param(lambda step: int(step >= 300) if step < 600 else step % 2, 660, 310, marks=pytest.mark.slow),
    ],
)
def test_tasks_that_end_leave_others_as_fast_as_the_budget_allows(
    task_of: Callable[[int], int], steps: int, lean: int
) -> None:
    loop = Loop(lambda: MultiTask((2, 1)), task_of, torch.optim.SGD)
    attaching = {"limits": RESTLESS, "policy": "exact", "memory_budget_bytes": 10**10}
    run = trained(loop, Run(attaching, steps=steps))
    assert sum(bool(plan.recomputed) for plan in run.used) <= lean
    assert not run.used[-1].recomputed


@pytest.mark.slow
def test_task_with_more_calls_that_begins_late_is_in_the_profile_then() -> None:
    """It counted twice for good: in the profile, and as a step with more calls than usual."""

    class Twice(MultiTask):
        def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
            if task == 2:
                for block in self.trunk:
                    x = block(x)
            return super().forward(x, task)

    task_of = lambda step: step % 3 if step >= 30 else step % 2  # noqa: E731
    loop = Loop(lambda: Twice((2, 2, 2)), task_of, torch.optim.SGD)
    attaching = {"limits": RESTLESS, "policy": "exact"}
    lean = trained(loop, Run({**attaching, "memory_budget_bytes": 1}, steps=100))
    full = lean.used[-1].changed(storage=dict.fromkeys(lean.used[-1].storage, Storage.SAVE))
    budget = 2 * max(trained(loop, Run(plans=[full], steps=100)).peaks)
    run = trained(loop, Run({**attaching, "memory_budget_bytes": budget}, steps=100))
    assert "profile" not in run.locks
    assert not any(plan.recomputed for plan in run.used[-8:])


class Turned(nn.Module):
    """Blocks that are called in two orders."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        for block in reversed(self.blocks) if task else self.blocks:
            x = block(x)
        return x


def test_units_in_two_orders_are_recomputed_for_good() -> None:
    loop = Loop(Turned, lambda step: step % 2)
    run = trained(loop, Run({"limits": RESTLESS, "policy": "exact", "memory_budget_bytes": 10**12}, steps=16))
    assert "the units are called differently from step to step" in run.locks["profile"]
    assert len(run.used[-1].recomputed) == 3


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("tab", "tcd", "tabcd"),
        ("atu", "btu", "abtu"),
        ("tab", "t", "tab"),
        ("taub", "tuc", "taubc"),
        ("tt", "tat", "tat"),
        ("ta", "at", None),
        ("ab", "cd", None),
    ],
)
def test_calls_of_two_tasks_are_joined_in_one_order(one: str, other: str, expected: str | None) -> None:
    found = joined(tuple(one), tuple(other))
    assert found == (None if expected is None else tuple(expected))
    for calls in (one, other) if found else ():
        own: Calls = tuple(calls)
        assert [found[place // 2] for place in places_in(found, own)[1::2]] == list(own)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        # Chance leaves out units: the first two kinds alone do not tell the order.
        (("02", "01", "12"), "012"),
        (("0134", "0234", "0124"), "01234"),
        (("tab", "tcd", "tef"), "tabcdef"),
        (("tt", "tat"), "tat"),
        (("ab", "cd"), None),
        (("012", "021"), None),
        (("01", "12", "20"), None),
    ],
)
def test_calls_of_all_kinds_have_one_order(kinds: tuple[str, ...], expected: str | None) -> None:
    found = common_order([tuple(one) for one in kinds])
    assert found == (None if expected is None else tuple(expected))


class Head(nn.Module):
    """A task of blocks of its own width."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.into, self.blocks = nn.Linear(WIDTH, width), nn.ModuleList(Narrow(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return x


class Wide(nn.Module):
    """A trunk of narrow blocks, and tasks with blocks of other widths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.ModuleList(Narrow(WIDTH) for _ in range(TRUNK))
        self.tasks = nn.ModuleDict({"0": Head(WIDTH // 2, 1), "1": Head(3 * WIDTH, 2), "2": Head(2 * WIDTH, 3)})

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        for block in self.trunk:
            x = block(x)
        return self.tasks[str(task)](x)


def test_tasks_whose_blocks_are_handed_more_than_others_are_kept_within_an_ample_budget() -> None:
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batches = list(points(50, 128))
    peaks = []
    for number, batch in enumerate(batches[:4]):
        meter = MemoryMeter(torch.device("cpu"))
        with meter.metering(resident_tensors(model, optimizer, [batch])):
            model(batch, number % 2).square().mean().backward()
        peaks.append(meter.peak_bytes)
        optimizer.step()
        optimizer.zero_grad()
    tuner = autotune.checkpoint(model, int(1.5 * max(peaks)), optimizer=optimizer)
    recomputed = []
    for number, batch in enumerate(batches):
        loss = model(batch, number % 2).square().mean()
        recomputed.append(len(tuner.plan.recomputed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "profile" not in tuner.locks
    assert tuner.recomputable
    tuner.detach()
    assert recomputed[-10:] == [0] * 10
