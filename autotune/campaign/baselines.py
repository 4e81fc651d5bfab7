"""Reference measurements of every search: the baseline, and the leanest plan if a budget may be too small."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from autotune.budget import MemoryBudget, format_bytes
from autotune.engines.engine import Engine
from autotune.engines.tuning_windows import WINDOW_STEPS
from autotune.errors import BudgetError, JobError
from autotune.measurement import Measurement

# Below this share of the baseline's peak, the leanest plan is measured even if ``with_leanest`` is false.
_DOUBTFUL = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """Measurements before any search.

    Attributes:
        baseline: window of the baseline, without a budget.
        leanest: window of the leanest plan; ``None`` if it was not needed.
        memory_budget_bytes: the memory budget; ``None`` for no budget.
        steps: real optimizer steps spent.
        seconds: seconds spent.
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
    """Measure the baseline and, if needed, the leanest plan; check that the budget can be met.

    Args:
        engine: engine that measures.
        budget: the memory budget; ``None`` for none.
        with_leanest: whether to measure the leanest plan in any case. A planner predicts which plans fit, so it needs
            this measurement only for a very small budget.
        clock: as for :func:`autotune.campaign.plan_search.tune`.

    Raises:
        JobError: if the baseline cannot run, or the device does not report its memory.
        BudgetError: if the budget is too small for the leanest plan.
    """
    began = clock()
    engine.memory_budget_bytes = None
    engine.apply(engine.space.baseline())
    # One more step than usual, since the memory of an engine's first step cannot be measured.
    baseline = engine.run(WINDOW_STEPS + 1)
    if baseline.failure is not None:
        raise JobError(f"the baseline ends with {baseline.failure}: {baseline.failure_detail}", where="job")
    if baseline.peak_bytes is None:
        raise JobError("the device does not report the memory of a step (see autotune doctor)", where="job")
    size = None if budget is None else budget.resolve(baseline.peak_bytes, baseline.fragments_bytes)
    leanest = None
    if with_leanest or (size is not None and size < _DOUBTFUL * baseline.peak_bytes):
        engine.apply(engine.space.leanest())
        leanest = engine.run(WINDOW_STEPS)
        # Another plan may need less memory than the nominally leanest one, but at least half as much.
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
