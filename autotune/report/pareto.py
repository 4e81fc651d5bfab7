"""Costs of plans, measured and predicted: time, memory, the Pareto front, and the optimum within the budget."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import SAFETY_MARGIN, Solution, smallest, solve
from autotune.cost_model.time_model import seconds_per_step
from autotune.engines.tuning_windows import merge_windows
from autotune.errors import BudgetError, ProfileError
from autotune.measurement import Measurement
from autotune.plan import Plan
from autotune.report.campaign_run import CampaignRun

_POINTS = 14
# Seconds after which no further point of the front is solved; in large models, each point takes seconds.
_LIMIT_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a plan, measured or predicted.

    Attributes:
        seconds_per_sample: training seconds per sample.
        peak_bytes: peak memory.
        spread: lowest and highest seconds per sample, over seeds or over measured steps; equal for predictions.
    """

    seconds_per_sample: float
    peak_bytes: int
    spread: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """The best plans that a profile predicts.

    Attributes:
        points: the best plan for each of several budgets, the smallest budget first.
        best: the best plan within the run's budget; ``None`` if none fits.
    """

    points: tuple[tuple[Plan, Cost], ...]
    best: tuple[Plan, Cost] | None


def predicted(profile: Profile, plan: Plan) -> Cost | None:
    """Return the predicted cost of a plan; ``None`` for a plan that the profile cannot predict."""
    try:
        seconds, peak = seconds_per_step(profile, plan), peak_bytes(profile, plan)
    except ProfileError:
        return None
    each = seconds / samples_per_step(profile, plan)
    return Cost(seconds_per_sample=each, peak_bytes=peak, spread=(each, each))


def samples_per_step(profile: Profile, plan: Plan) -> int:
    """Return how many samples a step of a plan consumes."""
    return profile.batch_size * (plan.accumulation_steps if profile.batching == "adaptive" else 1)


def front_of(profile: Profile, budget_bytes: int | None, *, limit_s: float = _LIMIT_S) -> Front:
    """Return the best plans that a profile predicts.

    Args:
        profile: the profile.
        budget_bytes: the run's budget; ``None`` without one.
        limit_s: seconds after which no further point is started; the ends of the front are solved first.
    """
    began = time.perf_counter()
    try:
        best: Solution | None = solve(profile, budget_bytes)
    except BudgetError:
        best = None
    least, fastest = smallest(profile), solve(profile)
    found = [least, fastest, *([] if best is None else [best])]
    ends = least.peak_bytes, max(fastest.peak_bytes, least.peak_bytes)
    for budget in _coarse_first(list(np.geomspace(*ends, _POINTS)[1:-1])):
        if time.perf_counter() - began > limit_s:
            break
        found.append(solve(profile, math.ceil(budget / (1 - SAFETY_MARGIN)) + 1))
    return Front(
        points=tuple(_costed(profile, one) for one in _undominated(found)),
        best=None if best is None else _costed(profile, best),
    )


def _coarse_first(values: list[float]) -> list[float]:
    """Return the values reordered so that any prefix covers the range: every eighth value, then every fourth, ..."""
    order = sorted(range(len(values)), key=lambda number: (-(_twos(number + 1)), number))
    return [values[number] for number in order]


def _twos(number: int) -> int:
    return (number & -number).bit_length()


def _undominated(found: list[Solution]) -> list[Solution]:
    front: list[Solution] = []
    for one in sorted(found, key=lambda item: (item.peak_bytes, item.seconds_per_sample)):
        if not front or one.seconds_per_sample < front[-1].seconds_per_sample * (1 - 1e-9):
            front.append(one)
    return front


def _costed(profile: Profile, solution: Solution) -> tuple[Plan, Cost]:
    each = solution.seconds_per_step / samples_per_step(profile, solution.plan)
    return solution.plan, Cost(seconds_per_sample=each, peak_bytes=solution.peak_bytes, spread=(each, each))


def measured_arm(arm: Mapping[str, Any]) -> Cost | None:
    """Return the cost of an arm of ``comparison.json``; ``None`` if time or memory was never measured."""
    each = [1 / run["throughput"] for run in arm["runs"] if run["throughput"]]
    peaks = [run["peak_bytes"] for run in arm["runs"] if run["peak_bytes"]]
    if not each or not peaks:
        return None
    return Cost(seconds_per_sample=statistics.fmean(each), peak_bytes=max(peaks), spread=(min(each), max(each)))


def measured_trial(trial: Mapping[str, Any]) -> Cost | None:
    """Return the cost of a window of ``trials.jsonl``; ``None`` if it failed or lacks time or memory."""
    return _measured(Measurement.from_json(trial["measurement"]))


def measured_finals(run: CampaignRun) -> dict[Plan, Cost]:
    """Return the cost of each finalist of a tuning and of the baseline, over all final windows."""
    windows: dict[Plan, list[Measurement]] = {}
    for trial in run.trials:
        if trial["final"]:
            windows.setdefault(Plan.from_json(trial["plan"]), []).append(Measurement.from_json(trial["measurement"]))
    costs = {plan: _measured(merge_windows(seen)) for plan, seen in windows.items()}
    return {plan: cost for plan, cost in costs.items() if cost is not None}


def _measured(window: Measurement) -> Cost | None:
    if window.failure is not None or not window.throughput or window.peak_bytes is None or not window.samples_per_step:
        return None
    steps = [seconds / window.samples_per_step for seconds in window.step_s]
    return Cost(seconds_per_sample=1 / window.throughput, peak_bytes=window.peak_bytes, spread=(min(steps), max(steps)))
