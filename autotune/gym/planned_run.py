"""One real run under the planner: converts observations to the planner's inputs, and plan numbers to plans."""

from __future__ import annotations

import math
import statistics
from collections import deque

import numpy as np
from numpy.typing import NDArray

from autotune.cost_model.cost_arrays import CostArrays, Plans
from autotune.cost_model.plan_pool import PlanPool, PoolSettings, make_pool
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import SAFETY_MARGIN, Goal, solve_each
from autotune.errors import BudgetError, ProfileError
from autotune.gym.levers import Watch
from autotune.gym.observation import Observation
from autotune.measurement import Failure
from autotune.plan import Plan
from autotune.simulator.online_planner import LOOK_AHEAD, Lanes, Planner, Seen, Situation
from autotune.simulator.planner_settings import PlannerSettings

# Number of windows from which the machine's speed is estimated, and number of standard deviations of costs beyond which
# a difference is attributed to the machine.
_SPEED_WINDOWS = 8
_SPEED_DEVIATIONS = 3
_OUT_OF_MEMORY = (Failure.OUT_OF_MEMORY, Failure.OVER_BUDGET)


class PlannedRun:
    """The planner of one run, and the conversion of observations to its inputs.

    Args:
        profile: the profile of the job.
        budget_bytes: memory budget at the start of the run; ``None`` for none.
        settings: settings of the planner.

    Attributes:
        planner: the planner, with one lane.
        watch: describes the run with features.
        first: shape (1,), number of the initial plan; the baseline until it is set.
    """

    def __init__(self, profile: Profile, budget_bytes: int | None, settings: PlannerSettings) -> None:
        self._profile = profile
        self._arrays = CostArrays([profile])
        pool = launch_pool(profile, self._arrays, budget_bytes)
        self.planner = Planner(
            Lanes.of(pool, self._arrays, np.zeros(1, dtype=np.int64), np.array([profile.length_spread == 0])), settings
        )
        self.watch = Watch(self.planner)
        self.first = pool.baseline
        pairs = zip(pool.k[0], pool.choices[0], pool.there[0], strict=True)
        rows = [(int(k), *choices.tolist()) for k, choices, there in pairs if there]
        self._numbers = {row: number for number, row in reversed(list(enumerate(rows)))}
        # Caches, because decoding a plan of many units and finding its number takes longer than choosing the plan.
        self._plans: dict[int, Plan] = {}
        self._found: dict[Plan, int | None] = {}
        self._noise_scale = float("nan")
        self._speeds: deque[float] = deque(maxlen=_SPEED_WINDOWS)
        self._told = _usable(budget_bytes)

    def opening(self) -> Situation:
        """Return what the planner knows before the first window."""
        return self._situation((self._told,), 0.0, 1.0)

    def situation(self, observation: Observation) -> Situation:
        """Return what the planner knows before the next window."""
        ahead = observation.budget_ahead or (observation.memory_budget_bytes,)
        self._told = _usable(ahead[0])
        per_window = observation.progress / max(float(self.watch.memory.windows[0]), 1.0)
        left = (1 - observation.progress) / max(per_window, 1e-6)
        return self._situation(tuple(_usable(size) for size in ahead), observation.progress, max(left, 1.0))

    def observe(self, observation: Observation) -> None:
        """Update the planner and its features with the last window."""
        window = observation.window
        noise = observation.gradient.noise_scale
        if noise is not None and 0 < noise < np.inf:
            self._noise_scale = noise
        number = self._number(observation.plan)
        actual = _usable(window.memory_budget_bytes)
        mean, longest = self._lengths(observation)
        measured = float("nan") if number is None else self._at_profiled_speed(window.seconds_per_step, number, mean)
        former = self.planner.seen
        # The time of a failed window also contains the lost part and the repetition under the leanest plan.
        working = window.total_s if window.failure is None or former is None else float(former.window_s[0])
        seen = Seen(
            plan=self.planner.lanes.pool.baseline if number is None else np.array([number]),
            length=np.array([mean]),
            longest=np.array([longest]),
            dip=np.array([max(float(np.log(self._told / actual)), 0.0) if np.isfinite(actual) else 0.0]),
            budget=np.array([actual]),
            step_s=np.array([measured]),
            window_s=np.array([working]),
            total_s=np.array([window.total_s]),
            ran_out=np.array([window.failure in _OUT_OF_MEMORY]),
        )
        self.watch.observe(seen, np.array([self._noise_scale]))

    def _at_profiled_speed(self, step_s: float | None, number: int, length: float) -> float:
        """Return the seconds of a step, corrected to the machine's speed at the time of the profile.

        A busy machine slows all plans down equally, which must not change their comparison. Smaller differences, which
        errors in single units' costs can explain, are left to the planner.
        """
        if step_s is None or not 0 < step_s < np.inf:
            return float("nan")
        pool = self.planner.lanes.pool
        told = pool.seconds_of(np.array([number]), np.ones_like(self.planner.belief.mean), np.array([length]))
        self._speeds.append(float(told[0]) / step_s)
        speed = statistics.median(self._speeds)
        far = abs(math.log(speed)) > _SPEED_DEVIATIONS * self.planner.settings.cost_error
        return step_s * speed if far else step_s

    def plan_of(self, number: NDArray[np.int64]) -> Plan:
        """Return the plan with a number of shape (1,)."""
        pool, one = self.planner.lanes.pool, int(number[0])
        if one not in self._plans:
            self._plans[one] = self._arrays.decode(0, int(pool.k[0, one]), pool.choices[0, one])
        return self._plans[one]

    def _situation(self, budgets: tuple[float, ...], progress: float, left: float) -> Situation:
        announced = [*budgets, *(budgets[-1:] * LOOK_AHEAD)][:LOOK_AHEAD]
        return Situation(
            budget=np.array([announced]),
            progress=np.array([progress]),
            windows_left=np.array([left]),
            noise_scale=np.array([self._noise_scale]),
            switch_s=np.array([self._profile.switch_s]),
        )

    def _lengths(self, observation: Observation) -> tuple[float, float]:
        """Return the sizes of the window's mean and largest batch, relative to the profiled batch."""
        reference, sizes = self._profile.tables[0].batch_bytes, observation.window.batch_bytes
        if sizes is None or not reference:
            return 1.0, 1.0
        mean, largest = sizes
        return max(mean / reference, 1e-3), max(largest / reference, 1e-3)

    def _number(self, plan: Plan) -> int | None:
        """Return the number of a plan; ``None`` if it is not in the pool."""
        if plan not in self._found:
            try:
                k, choices = self._arrays.encode(0, plan)
                self._found[plan] = self._numbers.get((k, *choices.tolist()))
            except ProfileError:
                self._found[plan] = None
        return self._found[plan]


def launch_pool(profile: Profile, arrays: CostArrays, budget_bytes: int | None) -> PlanPool:
    """Return the plans of a run: a generated pool that includes the exact solver's plans for the initial budget.

    Args:
        profile: the profile of the job.
        arrays: the profile as arrays.
        budget_bytes: memory budget at the start of the run; ``None`` for none.
    """
    # If only storage can be chosen, fewer plans suffice, and a live run waits until they are generated.
    fewer = PoolSettings(size=128, worlds=2, budgets=32, rounds=1, changes=1024)
    settings = fewer if len(profile.precisions) * len(profile.tables) == 1 else PoolSettings()
    try:
        solutions = solve_each(profile, budget_bytes, Goal())
    except BudgetError:
        return make_pool(arrays, settings)
    encoded = [arrays.encode(0, solution.plan) for solution in solutions]
    zero = np.zeros(1, dtype=np.int64)
    return make_pool(arrays, settings, also=[Plans(zero, np.array([k]), choices[None]) for k, choices in encoded])


def _usable(budget_bytes: int | None) -> float:
    """Return the largest predicted peak that is allowed within a budget, in bytes."""
    return 1e18 if budget_bytes is None else max(budget_bytes * (1 - SAFETY_MARGIN), 1.0)
