"""Tests of budgets where a loop comes to need more memory than the bytes of its batches tell."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
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
from autotune.profiling import held_bytes
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
    lean = trained(loop, Run({"limits": RESTLESS, "policy": "exact", "memory_budget_bytes": 1}, steps=AT)).used[-1]
    full = lean.changed(storage=dict.fromkeys(lean.storage, Storage.SAVE))
    # All steps after the change are alike.
    leanest, fullest = (trained(loop, Run(plans=[plan], steps=AT + 3)).peaks for plan in (lean, full))
    # All before the change may be kept, but not all after it.
    budget = max(int(1.02 * max(leanest)), int(1.02 * max(fullest[:AT])))
    assert max(fullest) > budget
    assert set(over(loop, budget)) <= ({AT} if name != "dropout" else set())


def test_longer_batches_do_not_count_as_shorter_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a second length was traced, memory may grow quadratically: one that grows linearly seemed too small."""
    noted = []
    note = Growth.note

    def noting(self: Growth, plan: Plan, size: int, seen: Attribution, kind: Hashable) -> None:
        noted.append(size)
        note(self, plan, size, seen, kind)

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


class Grown(Loop):
    """Units see batches of one size; what happens before each step is given by a subclass."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(5)), nn.Linear(WIDTH, 1))

    def before(self, model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Change something before a step."""

    def loss(self, model: Any, rows: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(model(rows).square().mean())

    def train(self, run: Run) -> None:
        model = self.model()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        tuner = run.attach(model, optimizer)
        for step, batch in enumerate(points(run.steps, rows=64)):
            self.before(model, optimizer, step)
            for rows in tuner.micro_batches(self.given(batch, step)):
                loss = self.loss(model, rows)
                tuner.backward(loss)
            tuner.step()
            run.log(loss)
        run.keep(model, optimizer)

    def given(self, batch: torch.Tensor, step: int) -> Any:
        return batch


class Refined(Grown):
    """A grid of parameters is replaced by a finer one, with its optimizer state."""

    def model(self) -> nn.Module:
        model = super().model()
        model.grid = nn.Parameter(torch.randn(8, WIDTH))
        return model

    def before(self, model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step in (AT, AT + 8):
            former = model.grid
            model.grid = nn.Parameter(former.detach().repeat_interleave(6, 0))
            state = optimizer.state.pop(former)
            optimizer.state[model.grid] = {
                key: one.repeat_interleave(6, 0) if one.dim() else one for key, one in state.items()
            }
            group = optimizer.param_groups[0]["params"]
            group[[one is former for one in group].index(True)] = model.grid

    def loss(self, model: Any, rows: torch.Tensor) -> torch.Tensor:
        return super().loss(model, rows + model.grid.mean(0))


class Collects(Grown):
    """A buffer collects, and the optimizer begins to keep slow weights."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("bank", torch.zeros(1, WIDTH))
        return model

    def before(self, model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step >= AT - 4:
            model.bank = torch.cat([model.bank, torch.ones(32, WIDTH)])
        if step == AT + 8:
            for one in model.parameters():
                optimizer.state[one]["slow"] = one.detach().clone()


class Attends(Block):
    """A block that attends to a bank of its own."""

    bank: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + 0.1 * torch.softmax(x @ self.bank.T, -1) @ self.bank


class Banks(Grown):
    """Buffers grow to which units attend, so that what they compute grows as well."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(Attends() for _ in range(4)), nn.Linear(WIDTH, 1))

    def before(self, model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step in (AT, AT + 8):
            for block in model[:4]:
                block.bank = torch.cat([block.bank, torch.randn(48, WIDTH)])


class History(Grown):
    """The optimizer begins to keep a history in lists."""

    def before(self, model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step >= AT:
            for one in model.parameters():
                found = optimizer.state[one].setdefault("history", {}).setdefault("gradients", [])
                found[:] = [*found, one.detach().clone()][-4:]


class Cut(Grown):
    """Batches that are long are cut by the loop."""

    def given(self, batch: torch.Tensor, step: int) -> Any:
        return batch[: (4, 64, 16, 48, 8, 12, 64, 16, 40)[step % 9]]

    def loss(self, model: Any, rows: torch.Tensor) -> torch.Tensor:
        return super().loss(model, rows[:16])


def test_what_is_handed_does_not_shrink_with_the_batch_and_all_is_saved_in_an_ample_budget() -> None:
    run = trained(Cut(), Run({"limits": RESTLESS, "policy": "exact", "memory_budget_bytes": 10**9}, steps=STEPS))
    assert sum(bool(plan.recomputed) for plan in run.used[-20:]) == 0


class Middle(Grown):
    """Middle layers see a part of the rows that grows (random layerwise token dropping)."""

    def before(self, model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        self.seen = 8 if step < AT else 64

    def loss(self, model: Any, rows: torch.Tensor) -> torch.Tensor:
        first, *middle, last, head = model[:1], *model[2:5], model[5], model[6]
        rows = model[1](first(rows))
        for block in middle:
            rows = torch.cat([block(rows[: self.seen]), rows[self.seen :]])
        return torch.as_tensor(head(last(rows)).square().mean())


class Indexed(Grown):
    """A batch is an index of data of several sizes."""

    def given(self, batch: torch.Tensor, step: int) -> Any:
        self.data = batch[: (16, 64, 32, 48)[step % 4]]
        return step % 4

    def loss(self, model: Any, rows: Any) -> torch.Tensor:
        return super().loss(model, self.data)


class Carries(Grown):
    """Units are handed a memory that the loop carries, which grows and is then full."""

    memory: torch.Tensor

    def model(self) -> nn.Module:
        self.memory = torch.zeros(0, WIDTH)
        return nn.Sequential(*(Remembers() for _ in range(5)), nn.Linear(WIDTH, 1))

    def loss(self, model: Any, rows: torch.Tensor) -> torch.Tensor:
        memory, self.memory = self.memory, torch.cat([self.memory, rows.detach()[:16]])[-160:]
        for block in model[:5]:
            rows = block(rows, memory)
        return torch.as_tensor(model[5](rows).square().mean())


class Remembers(Block):
    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        whole = super().forward(x if memory is None else torch.cat([memory, x]))
        return whole[-len(x) :]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("loop", "surprises"),
    [
        (Refined(), ()),
        (Banks(), ()),
        (History(), ()),
        (Collects(), ()),
        (Middle(), (AT,)),
        (Indexed(), ()),
        (Carries(), range(11)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_grows_between_steps_is_noticed_before_the_next_one(
    loop: Grown, surprises: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, what is held would not be counted before each step.
    monkeypatch.setattr(held_bytes, "_SECONDS", 1.0)
    lean = trained(loop, Run({"limits": RESTLESS, "policy": "exact", "memory_budget_bytes": 1}, steps=STEPS)).used[-1]
    full = lean.changed(storage=dict.fromkeys(lean.storage, Storage.SAVE))
    low, high = (max(trained(loop, Run(plans=[plan], steps=STEPS)).peaks) for plan in (lean, full))
    for share in (0.1, 0.8):
        assert set(over(loop, int(1.02 * low + share * (high - 1.02 * low)))) <= set(surprises)
