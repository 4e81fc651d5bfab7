"""A problem whose costs are given by a formula: its best plan is known, and searching it takes no real steps."""

from __future__ import annotations

import numpy as np
from replay_engine import ReplayEngine
from test_env import SPACE

from autotune import Measurement, Plan, Precision, Storage
from autotune.measurement import Failure
from autotune.plan import PlanSpace


def known_cost(plan: Plan) -> float:
    """The cost of a problem whose best plan is k = 2, bf16 everywhere, only blocks.1 recomputed."""
    seconds = 0.1 + 0.02 * sum(plan.precision_of(unit.name) is Precision.FP32 for unit in SPACE.units)
    seconds += 0.01 * sum(choice is Storage.RECOMPUTE for choice in plan.storage.values())
    return seconds + {1: 0.0, 2: 0.005, 4: 0.05}[plan.accumulation_steps]


def known_peak(plan: Plan) -> int:
    saved = sum(plan.storage_of(unit.name) is Storage.SAVE for unit in SPACE.units)
    wide = sum(plan.precision_of(unit.name) is Precision.FP32 for unit in SPACE.units)
    return (
        100
        + int((100 * saved + 100 * wide) / plan.accumulation_steps)
        + 5 * (plan.storage_of("blocks.2") is Storage.RECOMPUTE)
        + 5 * (plan.storage_of("blocks.3") is Storage.RECOMPUTE)
    )


def known_answer(plan: Plan, steps: int, budget: int | None) -> Measurement:
    """Return the window of a plan under a budget, as the real engine would."""
    over = budget is not None and known_peak(plan) > budget
    return Measurement(
        steps=1 if over else steps,
        samples=8 * steps,
        items=8 * steps,
        total_s=0.1,
        step_s=() if over else (known_cost(plan),) * 2,
        seconds_per_step=None if over else known_cost(plan),
        samples_per_step=None if over else 8.0,
        peak_bytes=known_peak(plan),
        memory_budget_bytes=budget,
        loss=1.0,
        failure=Failure.OVER_BUDGET if over else None,
    )


class KnownEngine(ReplayEngine):
    """An engine that computes each window by the formula."""

    def __init__(self) -> None:
        super().__init__(SPACE, lambda plan, steps: known_answer(plan, steps, self.memory_budget_bytes))


def distinct_plans(space: PlanSpace, count: int) -> list[Plan]:
    generator = np.random.default_rng(5)
    found: dict[Plan, None] = {}
    while len(found) < count:
        found[space.sample(generator)] = None
    return list(found)
