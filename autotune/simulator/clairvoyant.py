"""Lower bounds on time under moving conditions: the best plans for a course that is known in advance."""

from __future__ import annotations

import numpy as np

from autotune.cost_model.cost_arrays import Floats, Indices
from autotune.simulator.moving_conditions import Course, MovingRuns
from autotune.simulator.online_planner import Planner
from autotune.simulator.planner_settings import PlannerSettings


def run_planner(runs: MovingRuns, course: Course, settings: PlannerSettings) -> Floats:
    """Return the seconds of each window under a planner, shape (n, windows)."""
    runs.begin(course)
    planner = Planner(runs.lanes, settings)
    seconds = []
    for _ in range(runs.windows):
        seen = runs.run(planner.decide(runs.situation()))
        planner.observe(seen)
        seconds.append(seen.total_s)
    return np.stack(seconds, axis=1)


def clairvoyant(runs: MovingRuns, course: Course) -> Floats:
    """Return the seconds of the best sequence of plans for a course, shape (n,).

    Uses dynamic programming over the plans of the pools, including the cost of switching.
    """
    runs.begin(course)
    best = runs.every_plan(0)
    for window in range(1, runs.windows):
        best = np.minimum(best, best.min(axis=1, keepdims=True) + runs.switch_s[:, None]) + runs.every_plan(window)
    return np.asarray(best.min(axis=1))


def held(runs: MovingRuns, course: Course, plan: Indices) -> Floats:
    """Return the seconds of each lane if it keeps one plan for a whole course, shape (n,)."""
    runs.begin(course)
    for _ in range(runs.windows):
        runs.run(plan)
    return runs.seconds


def best_static(runs: MovingRuns, course: Course) -> Floats:
    """Return the seconds of the best single plan for a whole course, shape (n,)."""
    runs.begin(course)
    total = runs.every_plan(0)
    for window in range(1, runs.windows):
        total = total + runs.every_plan(window)
    return np.asarray(total.min(axis=1))
