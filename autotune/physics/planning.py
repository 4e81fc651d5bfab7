"""Plan window by window while conditions move: re-solve with what is believed, switch only where it pays.

The planner knows profiles, budgets, the lengths that it has seen and an estimate of the noise scale. It corrects what
it believes of costs by the seconds that it measures. A clairvoyant, which knows the course, says how much is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.physics.convergence import step_efficiency
from autotune.physics.cost_arrays import Floats, Indices, Plans
from autotune.physics.moving import Course, MovingRuns, Outcome
from autotune.physics.price_solver import PriceSolver


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Say how a planner plans.

    Attributes:
        reserve: share by which sequences are taken to be longer than those last seen, where memory is concerned.
        horizon: windows over which a switch must pay for itself; 0 switches whenever another plan is better.
        correction: weight of a new measurement in what is believed of a unit's cost; 0 believes the profile.
    """

    reserve: float = 0.0
    horizon: float = 3.0
    correction: float = 0.5


@dataclass(slots=True)
class Levers:
    """Hold what may be asked of a planner beyond its settings, per lane; all neutral by default.

    Attributes:
        reserve: shape (n,), added to the settings' reserve.
        k_bias: shape (n,), factor on the worth of each doubling of k, as a logarithm.
        price_16_bit: shape (n,), logarithm of a factor on the seconds of 16-bit choices.
        stickiness: shape (n,), factor on what a switch is taken to cost.
    """

    reserve: Floats
    k_bias: Floats
    price_16_bit: Floats
    stickiness: Floats

    @classmethod
    def neutral(cls, lanes: int) -> Levers:
        """Return levers that change nothing."""
        return cls(np.zeros(lanes), np.zeros(lanes), np.zeros(lanes), np.ones(lanes))


class Planner:
    """Plan every lane's next window.

    Args:
        runs: the runs, begun.
        settings: how to plan.
        solver: of the runs' arrays; ``None`` makes one.

    Attributes:
        factor: shape (n, max_units, precisions), believed factor on what a unit costs in a precision.
        length: shape (n,), the sequence length seen last.
    """

    def __init__(self, runs: MovingRuns, settings: PlannerSettings, solver: PriceSolver | None = None) -> None:
        self._runs = runs
        self._settings = settings
        self._solver = solver or PriceSolver(runs.arrays)
        assert runs.course is not None
        self._job = runs.course.job
        n, arrays = len(self._job), runs.arrays
        self.factor = np.ones((n, arrays.max_units, arrays.max_choices // 2))
        self._measured = np.zeros_like(self.factor, dtype=bool)
        self.length = np.ones(n)

    def decide(self, levers: Levers | None = None) -> tuple[Indices, Indices]:
        """Return each lane's k and choices for the next window."""
        runs, settings = self._runs, self._settings
        assert runs.course is not None
        levers = levers or Levers.neutral(len(self._job))
        # Announced events are known, lengths are not: the last one is expected again.
        budget = runs.course.budget[:, runs.window]
        room = budget / (1 + settings.reserve + levers.reserve)
        seconds = self._believed_seconds(levers)
        worth = self._worth(levers)
        plans, _ = self._solver.solve(self._job, room, self.length, worth, seconds)
        if runs.window == 0:
            return plans.k, plans.choices
        stay = self._stays(plans, room, seconds, worth, levers)
        return np.where(stay, runs.k, plans.k), np.where(stay[:, None], runs.choices, plans.choices)

    def observe(self, outcome: Outcome) -> None:
        """Take in what the window saw: the sequences' length, and each unit's seconds under its choice."""
        runs, course = self._runs, self._runs.course
        assert course is not None
        window = runs.window - 1
        self.length = course.length[:, window]
        if not self._settings.correction:
            return
        precision = runs.choices // 2
        ran = Plans(self._job, runs.k, runs.choices)
        seconds = runs.arrays.unit_seconds[self._job, runs.arrays.variant(ran)]
        told = np.take_along_axis(seconds, runs.choices[:, :, None], axis=2)[:, :, 0]
        there = (told > 0) & ~outcome.ran_out[:, None]
        ratio = outcome.unit_seconds / np.where(told > 0, told, 1.0) / self.length[:, None]
        known = np.take_along_axis(self._measured, precision[:, :, None], axis=2)[:, :, 0]
        believed = np.take_along_axis(self.factor, precision[:, :, None], axis=2)[:, :, 0]
        weight = np.where(known, self._settings.correction, 1.0)
        updated = np.where(there, believed + weight * (ratio - believed), believed)
        np.put_along_axis(self.factor, precision[:, :, None], updated[:, :, None], axis=2)
        np.put_along_axis(self._measured, precision[:, :, None], (known | there)[:, :, None], axis=2)

    def believed_step_seconds(self) -> Floats:
        """Return what a step of the running plan is believed to take at the length last seen."""
        runs = self._runs
        plans = Plans(self._job, runs.k, runs.choices)
        own = runs.arrays.unit_seconds[self._job, runs.arrays.variant(plans)] * np.repeat(self.factor, 2, axis=2)
        return runs.arrays.seconds_per_step(plans, self.length, own)

    def _believed_seconds(self, levers: Levers) -> Floats:
        """Return what each lane's units are believed to cost, shape (n, variants, max_units, choices)."""
        factor = np.repeat(self.factor, 2, axis=2)
        if levers.price_16_bit.any():
            factor = factor.copy()
            factor[:, :, 2:] *= np.exp(levers.price_16_bit)[:, None, None]
        return self._runs.arrays.unit_seconds[self._job] * factor[:, None]

    def _worth(self, levers: Levers) -> Floats:
        """Return what a step at each k is believed to be worth, shape (n, max_k)."""
        runs, facts = self._runs, self._runs.facts
        k = runs.arrays.accumulation_steps[self._job].astype(np.float64)
        adaptive = facts.adaptive[self._job][:, None]
        batch = facts.batch[self._job][:, None] * np.where(adaptive, k, 1.0)
        noise = runs.known_noise_scale()[:, None]
        known = ~np.isnan(noise)
        worth = step_efficiency(batch, np.where(known, noise, 0.0))
        # At k = 1 nothing is learnt of the noise under adaptive batching: as long as it is unknown, k = 2 is taken.
        first = np.where(np.arange(k.shape[1]) == 1, 1.0, 1e-3) * np.ones_like(k)
        alone = runs.arrays.num_k[self._job][:, None] < 2
        worth = np.where(known | ~adaptive | alone, worth, first)
        return worth * k ** levers.k_bias[:, None]

    def _stays(self, plans: Plans, room: Floats, seconds: Floats, worth: Floats, levers: Levers) -> np.ndarray:
        """Tell which lanes keep their plan: it fits, and another would not pay for the switch in time."""
        runs, arrays = self._runs, self._runs.arrays
        lanes = np.arange(len(self._job))
        current = Plans(self._job, runs.k, runs.choices)

        def window_seconds(plan: Plans) -> Floats:
            step = arrays.seconds_per_step(plan, self.length, seconds[lanes, arrays.variant(plan)])
            return step / worth[lanes, plan.k]

        now, then = window_seconds(current), window_seconds(plans)
        # Seconds per unit of worth become those of a window by the current plan's own steps.
        steps = runs.steps(runs.window, runs.k, runs.choices, np.nan_to_num(runs.known_noise_scale(), nan=0.0))
        saved = (now - then) * steps * worth[lanes, runs.k] * self._settings.horizon
        fits = arrays.peak_bytes(current, self.length) <= room
        if not self._settings.horizon:
            return np.asarray(fits & (now <= then))
        return np.asarray(fits & (saved <= runs.switch_seconds() * levers.stickiness))


def run_planner(runs: MovingRuns, course: Course, settings: PlannerSettings) -> tuple[Floats, list[Plans]]:
    """Return each lane's seconds under a planner, shape (n,), and the plans of each window."""
    runs.begin(course)
    planner = Planner(runs, settings)
    chosen = []
    for _ in range(runs.windows):
        k, choices = planner.decide()
        chosen.append(Plans(course.job, k, choices))
        planner.observe(runs.run(k, choices))
    return runs.seconds, chosen


def clairvoyant(runs: MovingRuns, course: Course, also: Sequence[Plans] = ()) -> Floats:
    """Return the seconds of the best sequence of plans for a course that is known beforehand, shape (n,).

    Candidates are the price solver's plans for every window and k with true costs; the best path through them is found
    by dynamic programming, switching included. A lower bound in practice, not in proof: candidates are few.

    Args:
        runs: the runs.
        course: what happens.
        also: further candidates, one plan per lane each.
    """
    runs.begin(course)
    k, choices = _candidates(runs, course, also)
    best: Floats | None = None
    switch = runs.switch_seconds()[:, None]
    for window in range(runs.windows):
        cost = _costs(runs, course, window, k, choices)
        if best is None:
            best = cost
            continue
        best = np.minimum(best, best.min(axis=1, keepdims=True) + switch) + cost
    assert best is not None
    return np.asarray(best.min(axis=1))


def _candidates(runs: MovingRuns, course: Course, also: Sequence[Plans]) -> tuple[Indices, Indices]:
    """Return plans, shape (n, m) and (n, m, max_units)."""
    arrays, solver = runs.arrays, PriceSolver(runs.arrays)
    found = list(also)
    for window in range(runs.windows):
        seconds = arrays.unit_seconds[course.job] * runs.unit_factors(window)[:, None]
        for k in range(arrays.max_k):
            worth = np.where(np.arange(arrays.max_k) == k, 1.0, 1e-9) * np.ones((len(course.job), 1))
            budget, longest = course.budget[:, window], course.longest[:, window]
            plans, _ = solver.solve(course.job, budget, longest, worth, seconds)
            found.append(plans)
    return np.stack([plans.k for plans in found], axis=1), np.stack([plans.choices for plans in found], axis=1)


def _costs(runs: MovingRuns, course: Course, window: int, k: Indices, choices: Indices) -> Floats:
    """Return what a window costs each lane under each candidate, shape (n, m), switching left out."""
    lanes, count = k.shape
    flat = course.take(np.repeat(np.arange(lanes), count))
    original, runs.course = runs.course, flat
    unit_of_time, runs.unit_of_time = runs.unit_of_time, np.repeat(runs.unit_of_time, count)
    try:
        cost = runs.judged_seconds(window, k.reshape(-1), choices.reshape(lanes * count, -1))
    finally:
        runs.course, runs.unit_of_time = original, unit_of_time
    return cost.reshape(lanes, count)
