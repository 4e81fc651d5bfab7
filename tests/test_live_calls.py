"""Tests that the budget holds in loops that call the model more often in some steps than in others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_live import RESTLESS
from test_live_coupled import Block
from torch import nn

import autotune
from autotune.live.step_uses import Tracing
from autotune.mechanics.controls import Switcher
from autotune.mechanics.memory_meter import MemoryMeter, resident_tensors
from autotune.plan import Plan
from autotune.profiling.unit_calls import UnitCalls

CPU, WIDTH = torch.device("cpu"), 32
Calls = Callable[[int], int]
Also = Callable[[nn.Module, torch.Tensor, int], torch.Tensor | float]


class Run:
    """A run whose steps call the model as often as a function tells.

    Attributes:
        budget: the memory budget in bytes, a share of what a step with one call needs.
        peaks: the peak of each attached step in bytes.
        locks: the locks in the end.
        is_profiled: whether there was a profile in the end.
        calls: calls of a unit in that profile.
    """

    def __init__(self, calls: Calls, share: float, steps: int, also: Also | None = None, **attach: Any) -> None:
        self._calls, self._also = calls, also
        generator = torch.Generator().manual_seed(1)
        self._batches = [torch.randn(16, 32, WIDTH, generator=generator) for _ in range(steps)]
        self.peaks: list[int] = []
        self.budget = int(share * max(self._unattached()))
        model, optimizer = _new()
        with autotune.attach(
            model, optimizer, memory_budget_bytes=self.budget, limits=RESTLESS, runs_dir=None, **attach
        ) as tuner:
            for number, batch in enumerate(self._batches):
                self._step(tuner, model, optimizer, number, batch)
            self.locks = dict(tuner.locks)
            profiler: Any = tuner._controller.run.profiler  # type: ignore[union-attr]
            self.is_profiled, self.calls = profiler.complete, profiler.knowledge.calls_of("0")

    def over(self) -> list[int]:
        """Return the numbers of the steps over the budget."""
        return [number for number, peak in enumerate(self.peaks) if peak > self.budget]

    def _unattached(self) -> list[int]:
        model, optimizer = _new()
        peaks = []
        for batch in self._batches[:3]:
            meter = MemoryMeter(CPU)
            with meter.metering(resident_tensors(model, optimizer, [batch])):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(meter.peak_bytes or 0)
        return peaks

    def _step(self, tuner: Any, model: nn.Module, optimizer: Any, number: int, batch: torch.Tensor) -> None:
        meter = MemoryMeter(CPU)
        with contextlib.ExitStack() as stack:
            for micro in tuner.micro_batches(batch):
                # A traced step measures itself.
                if not stack._exit_callbacks and not isinstance(tuner._controller.run.profiler._use, Tracing):
                    stack.enter_context(meter.metering(resident_tensors(model, optimizer, [batch])))
                loss = model(micro).square().mean()
                for again in range(1, self._calls(number)):
                    loss = loss + 0.1 * model(micro * (1 + again / 10)).square().mean()
                if self._also is not None:
                    loss = loss + self._also(model, micro, number)
                tuner.backward(loss)
            tuner.step()
            optimizer.zero_grad()
        self.peaks.append(meter.peak_bytes or tuner.status["measured_peak_bytes"] or 0)


def _new() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WIDTH) for _ in range(4)))
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


@pytest.mark.parametrize("every", [3, 10, *(pytest.param(gap, marks=pytest.mark.slow) for gap in (25, 90))])
@pytest.mark.parametrize("mode", ["exact", pytest.param("rounding", marks=pytest.mark.slow)])
def test_steps_with_a_second_call_fit_once_one_was_seen(every: int, mode: str) -> None:
    run = Run(lambda number: 1 + (number % every == every - 1), 0.8, 4 * every + 40, mode=mode)
    assert "profile" not in run.locks
    assert run.is_profiled
    assert run.over() in ([], [every - 1])


def larger_batch(model: nn.Module, rows: torch.Tensor, number: int) -> torch.Tensor | float:
    """Return the loss of a batch three times as large in every tenth step."""
    return 0.1 * model(rows.repeat(3, 1, 1)).square().mean() if number % 10 == 9 else 0.0


def penalty(model: nn.Module, rows: torch.Tensor, number: int) -> torch.Tensor | float:
    """Return a penalty on the gradient with respect to the input in every tenth step."""
    if number % 10 < 9:
        return 0.0
    rows = rows.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
    return 0.1 * gradient.square().mean()


def last_units(model: nn.Module, rows: torch.Tensor, number: int) -> torch.Tensor | float:
    """Return a loss of the last two units alone, on a larger batch, in every tenth step."""
    if number % 10 < 9:
        return 0.0
    for unit in list(model.children())[2:]:
        rows = unit(rows.repeat(3, 1, 1))
    return 0.1 * rows.square().mean()


@pytest.mark.parametrize(("also", "share"), [(larger_batch, 2.2), (penalty, 2.1), (last_units, 3.0)])
def test_further_calls_that_need_more_than_usual_ones_are_measured(also: Also, share: float) -> None:
    """Each tenth step once exceeded the budget by a half or by a third."""
    run = Run(lambda _: 1, share, 60, also, mode="exact")
    assert run.is_profiled
    assert run.over() == [9]


def two_kinds(model: nn.Module, rows: torch.Tensor, number: int) -> torch.Tensor | float:
    """Return the loss of a quarter of the batch in every fourth step, and of three batches in every twentieth."""
    if number % 4 < 3:
        return 0.0
    further = rows.repeat(3, 1, 1) if number % 20 == 19 else rows[:4]
    return 0.1 * model(further).square().mean()


def test_larger_ones_among_further_calls_are_measured_too() -> None:
    """Each twentieth step once exceeded the budget, because a smaller one had been measured."""
    run = Run(lambda _: 1, 2.2, 100, two_kinds, mode="exact")
    assert run.is_profiled
    assert set(run.over()) <= {3, 19}


def test_calls_that_become_usual_for_a_while_do_not_end_the_run() -> None:
    """The times of steps with other calls once made the profile fail, so that the budget was held no more."""
    run = Run(lambda number: 3 if 20 <= number < 38 else 1, 1.2, 80, mode="exact")
    assert "profile" not in run.locks
    assert run.is_profiled
    assert len(run.peaks) == 80
    assert run.over() in ([], [20])


def test_usual_calls_that_change_are_learnt_again() -> None:
    run = Run(lambda number: 1 + (number >= 40), 1.1, 120, mode="exact")
    assert "profile" not in run.locks
    assert run.over() in ([], [40])
    assert (run.is_profiled, run.calls) == (True, 2)


@pytest.mark.parametrize("last", [0, 2, *(pytest.param(last, marks=pytest.mark.slow) for last in (1, 5))])
def test_first_steps_with_more_calls_do_not_end_learning(last: int) -> None:
    run = Run(lambda number: 1 + (number <= last), 0.8, 60, mode="exact")
    assert "profile" not in run.locks
    assert not run.over()
    assert (run.is_profiled, run.calls) == (True, 1)


def test_number_of_calls_may_vary_at_random() -> None:
    draw = torch.Generator().manual_seed(5)
    calls = torch.randint(1, 4, (100,), generator=draw).tolist()
    run = Run(calls.__getitem__, 1.0, 100, mode="exact")
    assert "profile" not in run.locks
    assert run.is_profiled
    # At most one step over for each number of calls that is seen for the first time.
    assert len(run.over()) <= 2
    assert not [number for number in run.over() if number > 20]


def test_without_a_budget_no_step_is_run_lean_to_measure_further_calls() -> None:
    model, optimizer = _new()
    recomputed = 0
    settings: dict[str, Any] = {"limits": RESTLESS, "runs_dir": None}
    asked: list[int | None] = [10**9]
    with autotune.attach(model, optimizer, mode="exact", memory_budget_bytes=lambda: asked[0], **settings) as tuner:
        for number in range(60):
            if number == 34:
                asked[0] = None
            for rows in tuner.micro_batches(torch.randn(4, 8, WIDTH)):
                loss = model(rows).square().mean()
                tuner.backward(loss + model(2 * rows).square().mean() if number == 33 else loss)
            tuner.step()
            optimizer.zero_grad()
            recomputed += len(tuner.plan.recomputed) if number >= 34 else 0
    assert recomputed == 0


def test_burst_of_calls_is_forgotten_though_fewer_ones_go_on() -> None:
    calls = UnitCalls(Switcher(nn.Sequential(nn.Linear(1, 1)), ["0"]))
    for step in range(3000):
        calls.note(step, 10 if step == 20 else 1 + (step % 10 == 9))
        assert calls.usual == 1
        if step in (20, 900):
            assert calls.extra == 10
    assert calls.extra == 2


def test_more_calls_that_have_become_usual_do_not_count_as_more() -> None:
    calls = UnitCalls(Switcher(nn.Sequential(nn.Linear(1, 1)), ["0"]))
    for step in range(40):
        calls.note(step, 1 if step < 20 else 2, 2.1)
    assert calls.extra == 1.0


def test_steps_with_more_calls_that_come_rarely_are_expected_after_the_second() -> None:
    calls = UnitCalls(Switcher(nn.Sequential(nn.Linear(1, 1)), ["0"]))
    for step in range(4000):
        if step % 1100 == 1099:
            assert calls.extra == (2 if step > 2200 else 1)
        calls.note(step, 1 + (step % 1100 == 1099))


def test_one_short_batch_does_not_make_further_calls_count_for_more() -> None:
    """A step with a further call after a short batch once counted as 42 times as many, for a thousand steps."""
    model = nn.Sequential(nn.Linear(4, 4))
    switcher = Switcher(model, ["0"])
    calls = UnitCalls(switcher)
    calls.count(["0"])
    calls.compare({"0": 1})
    switcher.apply(Plan())
    for step, (rows, times) in enumerate([(64, 1), (3, 1), (64, 2)]):
        calls.begin_step()
        calls.begin_pass()
        for _ in range(times):
            model(torch.randn(rows, 4))
        calls.note(step, calls.end_step())
    assert calls.extra == 2


def test_steps_of_fewer_micro_batches_than_was_told_are_named() -> None:
    model, optimizer = _new()
    tuner = autotune.attach(
        model, optimizer, accumulation_steps=2, memory_budget_bytes=10**7, limits=RESTLESS, runs_dir=None
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(24):
        for batch in tuner.micro_batches(torch.randn(16, 32, WIDTH, generator=generator)):
            tuner.backward(model(batch).square().mean())
        tuner.step()
    assert tuner.locks["profile"] == (
        "no step of the run could be traced yet: each had one micro-batch, of 2 that a step accumulates"
    )
    tuner.detach()
