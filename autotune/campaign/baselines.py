"""Measure what every search is held against: the baseline, and the leanest plan where a budget may be too small."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from autotune.budget import MemoryBudget, format_bytes
from autotune.engines.engine import Engine
from autotune.engines.tuning_windows import WINDOW_STEPS
from autotune.errors import BudgetError, JobError
from autotune.measurement import Measurement

# Share of the baseline's peak below which a planner's budget is held against the leanest plan before any profile.
_DOUBTFUL = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """What was measured before any search: the baseline, and for a search the leanest plan.

    Attributes:
        baseline: the baseline's window, held to no budget.
        leanest: the leanest plan's window; ``None`` where it was not needed.
        memory_budget_bytes: the budget in bytes; ``None`` for no budget.
        steps: real steps that this took.
        seconds: seconds that this took.
    """

    baseline: Measurement
    leanest: Measurement | None
    memory_budget_bytes: int | None
    steps: int
    seconds: float


def measure_references(
    engine: Engine,
    budget: MemoryBudget | None,
    *,
    with_leanest: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> References:
    """Measure the baseline and the leanest plan, and check that a budget can be met.

    Args:
        engine: where they are measured.
        budget: the memory budget; ``None`` for none.
        with_leanest: whether the leanest plan is measured in any case, and a budget below what it needs refused; for a
            planner, which knows what fits, only a budget that hardly anything can fit is held against it.
        clock: as for :func:`autotune.campaign.plan_search.tune`.

    Raises:
        JobError: if the baseline cannot run.
        BudgetError: if the leanest plan needs more than the budget; the message says how much.
    """
    began = clock()
    engine.memory_budget_bytes = None
    engine.apply(engine.space.baseline())
    # The engine's first step cannot be metered, so that two are not timed.
    baseline = engine.run(WINDOW_STEPS + 1)
    if baseline.failure is not None:
        raise JobError(f"the baseline ends with {baseline.failure}: {baseline.failure_detail}", where="job")
    if baseline.peak_bytes is None:
        raise JobError("the device does not say how much memory a step takes", where="job", allowed="autotune doctor")
    size = None if budget is None else budget.resolve(baseline.peak_bytes, baseline.fragments_bytes)
    leanest = None
    if with_leanest or (size is not None and size < _DOUBTFUL * baseline.peak_bytes):
        engine.apply(engine.space.leanest())
        leanest = engine.run(WINDOW_STEPS)
        # A plan may be leaner than the leanest by name, but not by half.
        _require_room(size, baseline.peak_bytes, leanest, 1.0 if with_leanest else 0.5)
    return References(
        baseline=baseline,
        leanest=leanest,
        memory_budget_bytes=size,
        steps=baseline.steps + (0 if leanest is None else leanest.steps),
        seconds=clock() - began,
    )


def _require_room(budget_bytes: int | None, baseline_bytes: int, leanest: Measurement, share: float) -> None:
    least = baseline_bytes if leanest.peak_bytes is None else min(baseline_bytes, leanest.peak_bytes)
    if budget_bytes is not None and share * least > budget_bytes:
        raise BudgetError(
            f"memory budget is {format_bytes(budget_bytes)} but the leanest plan needs {format_bytes(least)}",
            where="--memory-budget",
            allowed=f"at least {format_bytes(least)} ({least / baseline_bytes:.1%} of the baseline's peak)",
        )
