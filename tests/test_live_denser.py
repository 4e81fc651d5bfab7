"""Tests of budgets where a loop comes to need more memory than the bytes of its batches tell."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_live import RESTLESS, Wanders
from test_zoo import kept_where_locked, trained
from torch import nn
from zoo import WIDTH, Run, points

from autotune import Settings
from autotune.plan import Plan, Storage
from autotune.profiling.attribution import Attribution
from autotune.profiling.memory_scaling import Growth

ONE_K = Settings(accumulation_choices=(1,))
AT, STEPS = 24, 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(F.gelu(self.drop(self.wide(x)))))


@dataclass(frozen=True)
class Loop:
    """A loop that changes at one step.

    Attributes:
        enter: changes the model at that step.
        grown: changes the rows, given whether the step has come.
        autocast: whether the steps before it compute in bfloat16.
    """

    enter: Callable[[nn.Module], object] = lambda model: None
    grown: Callable[[torch.Tensor, bool], torch.Tensor] = lambda rows, late: rows
    autocast: bool = False

    def train(self, run: Run) -> None:
        model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 1)).eval()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        tuner = run.attach(model, optimizer)
        for step, batch in enumerate(points(run.steps, rows=256)):
            if step == AT:
                self.enter(model)
            for rows in tuner.micro_batches(batch):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast and step < AT):
                    given = self.grown(rows, step >= AT).to(model[-1].weight.dtype)
                    loss = model(given).float().square().mean()
                tuner.backward(loss)
            tuner.step()
            run.log(loss)
        run.keep(model, optimizer)


LOOPS = {
    "dropout": Loop(enter=lambda model: model.train()),
    "double": Loop(enter=lambda model: model.double()),
    "rows": Loop(grown=lambda rows, late: torch.cat([rows, rows.flip(1)]) if late else rows),
    "autocast": Loop(autocast=True),
}


def over(loop: Loop, budget: int, steps: int = STEPS) -> list[int]:
    """Return the steps of an attached run that exceed a budget, metered without a tuner under the same plans."""
    attaching: dict[str, Any] = {"limits": RESTLESS, "policy": "exact", "memory_budget_bytes": budget}
    attached = trained(loop, Run(attaching, steps=steps))
    metered = trained(loop, Run(plans=kept_where_locked(attached), steps=steps))
    return [step for step, peak in enumerate(metered.peaks) if peak > budget]


@pytest.mark.parametrize("name", LOOPS)
def test_at_most_the_first_step_of_another_kind_exceeds_the_budget(name: str) -> None:
    """Batches have the same shapes throughout; tens of steps were once up to twice over."""
    loop = LOOPS[name]
    lean = trained(loop, Run({"limits": RESTLESS, "policy": "exact", "memory_budget_bytes": 1}, steps=STEPS)).used[-1]
    full = lean.changed(storage=dict.fromkeys(lean.storage, Storage.SAVE))
    leanest, fullest = (trained(loop, Run(plans=[plan], steps=STEPS)).peaks for plan in (lean, full))
    # All before the change may be kept, but not all after it.
    budget = max(int(1.02 * max(leanest)), int(1.02 * max(fullest[:AT])))
    assert max(fullest) > budget
    assert set(over(loop, budget)) <= ({AT} if name != "dropout" else set())


def test_longer_batches_do_not_count_as_shorter_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a second length was traced, memory may grow quadratically: one that grows linearly seemed too small."""
    noted = []
    note = Growth.note

    def noting(self: Growth, plan: Plan, size: int, seen: Attribution) -> None:
        noted.append(size)
        note(self, plan, size, seen)

    monkeypatch.setattr(Growth, "note", noting)
    rows = [32, 48, 64, 40, 56, 96, 24, 32]

    class Longer(Loop):
        def train(self, run: Run) -> None:
            model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 1))
            optimizer = torch.optim.SGD(model.parameters(), 1e-2)
            tuner = run.attach(model, optimizer)
            for step, batch in enumerate(points(run.steps, rows=96)):
                for part in tuner.micro_batches(batch[: rows[step % len(rows)]]):
                    loss = model(part).square().mean()
                    tuner.backward(loss)
                tuner.step()
                run.log(loss)
            run.keep(model, optimizer)

    attaching = {"limits": RESTLESS, "policy": Wanders(), "settings": ONE_K, "memory_budget_bytes": 10**12}
    trained(Longer(), Run(attaching, steps=STEPS))
    assert len(set(noted)) >= 3
    assert set(noted) <= {count * WIDTH * 4 for count in rows}


def test_low_budgets_hold_where_every_second_step_calls_the_model_twice() -> None:
    """What the last unit keeps costs nothing in steps with one call, so that it was saved in the others, too."""

    class Twice(Loop):
        def train(self, run: Run) -> None:
            model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 1))
            optimizer = torch.optim.SGD(model.parameters(), 1e-2)
            tuner = run.attach(model, optimizer)
            for step, batch in enumerate(points(run.steps, rows=256)):
                for rows in tuner.micro_batches(batch):
                    loss = model(rows).square().mean()
                    loss = loss + model(rows.flip(0)).square().mean() if step % 2 else loss
                    tuner.backward(loss)
                tuner.step()
                run.log(loss)
            run.keep(model, optimizer)

    loop, steps = Twice(), 42
    lean = trained(loop, Run({"limits": RESTLESS, "policy": "exact", "memory_budget_bytes": 1}, steps=8)).used[-1]
    full = lean.changed(storage=dict.fromkeys(lean.storage, Storage.SAVE))
    low, high = (max(trained(loop, Run(plans=[plan], steps=4)).peaks) for plan in (lean, full))

    def budget(step: int) -> int:
        return int(1.02 * low if step % 7 == 0 else 1.05 * high)

    attached = trained(loop, Run({"limits": RESTLESS, "policy": "exact"}, steps=steps, budget=budget))
    peaks = trained(loop, Run(plans=kept_where_locked(attached), steps=steps)).peaks
    assert [step for step, peak in enumerate(peaks) if peak > budget(step)] == []


def test_sizes_that_the_loop_draws_itself_exceed_the_budget_once_each() -> None:
    """Multi-scale training: the loop resizes its batches, whose own shape is always the same."""
    repeats = itertools.cycle([2] * 5 + [1] * 5 + [4] * 5 + [3] * 5)
    sizes = [next(repeats) for _ in range(60)]

    class MultiScale(Loop):
        def train(self, run: Run) -> None:
            model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 1)).eval()
            optimizer = torch.optim.SGD(model.parameters(), 1e-2)
            tuner = run.attach(model, optimizer)
            for size, batch in zip(sizes, points(run.steps, rows=64), strict=True):
                for rows in tuner.micro_batches(batch):
                    loss = model(rows.repeat(size, 1)).square().mean()
                    tuner.backward(loss)
                tuner.step()
                run.log(loss)
            run.keep(model, optimizer)

    loop = MultiScale()
    lean = trained(loop, Run({"limits": RESTLESS, "policy": "exact", "memory_budget_bytes": 1}, steps=60)).used[-1]
    leanest = max(trained(loop, Run(plans=[lean], steps=60)).peaks)
    found = over(loop, int(1.4 * leanest), steps=60)
    assert set(found) <= {sizes.index(size) for size in (2, 4)}
