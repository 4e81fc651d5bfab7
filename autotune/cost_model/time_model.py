"""Predicted seconds of a step under any plan: a calibrated sum of a profile's measured parts."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autotune.cost_model.memory_model import choices
from autotune.cost_model.pipeline_choice import pipeline_seconds
from autotune.cost_model.profile import Calibration, Profile
from autotune.plan import Plan


def seconds_per_step(profile: Profile, plan: Plan) -> float:
    """Return the predicted seconds of a step under a plan.

    Raises:
        ProfileError: if the plan's k is not in the profile.
    """
    if profile.pipeline:
        return pipeline_seconds(profile, plan)
    return profile.calibration.seconds(summed_seconds(profile, plan), plan.accumulation_steps)


def summed_seconds(profile: Profile, plan: Plan) -> float:
    """Return the seconds of a step as the sum of its parts, without calibration."""
    table = profile.table_for(plan)
    pieces = zip(table.segments, choices(table.segments, plan), strict=True)
    return table.update_s + sum(segment.cost(name).seconds for segment, name in pieces)


def seconds_by_operation(profile: Profile, plan: Plan) -> dict[str, float]:
    """Return the seconds of a step by operation: ``forward``, ``backward`` (recomputation included), ``optimizer``.

    These are the measured seconds; the calibration, which applies only to their sum, is left out.
    """
    table = profile.table_for(plan)
    pieces = zip(table.segments, choices(table.segments, plan), strict=True)
    costs = [segment.cost(name) for segment, name in pieces]
    return {
        "forward": sum(cost.forward_s for cost in costs),
        "backward": sum(cost.backward_s for cost in costs),
        "optimizer": table.update_s,
    }


def calibrated(profile: Profile, measured: Sequence[tuple[Plan, float]]) -> Profile:
    """Return the profile with a calibration fitted to measured plans.

    The three coefficients are regularized towards (1, 0, 0), so that few or noisy plans cannot change them much. The
    scale stays positive, so that raising the cost of a part never lowers a prediction; and where the other two would
    predict that a plan takes no time, the scale alone is fitted.

    Args:
        profile: the profile.
        measured: plans and their seconds per step.
    """
    if not measured:
        return replace(profile, calibration=Calibration())
    fits = [_fitted(profile, measured[:count]) for count in range(len(measured) + 1)]
    errors = [_error(replace(profile, calibration=fit), measured) for fit in fits]
    needed = next(count for count, error in enumerate(errors) if error <= 1.1 * errors[-1])
    return replace(profile, calibration=replace(fits[-1], error_frac=errors[-1], plans_needed=needed))


def _fitted(profile: Profile, measured: Sequence[tuple[Plan, float]]) -> Calibration:
    if not measured:
        return Calibration()
    found = _ridge(profile, measured, 3)
    tables = (*profile.tables, *itertools.chain.from_iterable(profile.uniform_tables.values()))
    if all(found.seconds(table.least_s, table.accumulation_steps) > 0 for table in tables):
        return found
    return _ridge(profile, measured, 1)


def _ridge(profile: Profile, measured: Sequence[tuple[Plan, float]], terms: int) -> Calibration:
    """Return a fit of the first coefficients alone.

    Args:
        profile: the profile.
        measured: plans and their seconds per step; at least one.
        terms: number of coefficients.
    """
    sums = np.array([summed_seconds(profile, plan) for plan, _ in measured])
    steps = np.array([float(plan.accumulation_steps) for plan, _ in measured])
    seconds = np.array([value for _, value in measured])
    # Ridge regression on relative errors. A penalty of 1 weighs about as much as one measured plan, so the two added
    # terms are kept near 0 much more strongly than the scale is kept near 1.
    size = seconds.mean()
    design = np.stack([sums, steps * size, np.full_like(sums, size)], axis=1) / seconds[:, None]
    rest = (seconds - sums) / seconds
    penalty = np.diag([1.0, 30.0, 30.0])
    change = np.zeros(3)
    design, penalty = design[:, :terms], penalty[:terms, :terms]
    change[:terms] = np.linalg.solve(design.T @ design + penalty, design.T @ rest)
    return Calibration(
        scale=max(1.0 + float(change[0]), 0.1),
        micro_batch_s=float(change[1] * size),
        constant_s=float(change[2] * size),
        plans=len(measured),
    )


def _error(profile: Profile, measured: Sequence[tuple[Plan, float]]) -> float:
    """Return the median relative error of a profile's predictions."""
    return statistics.median(abs(seconds_per_step(profile, plan) / value - 1) for plan, value in measured)
