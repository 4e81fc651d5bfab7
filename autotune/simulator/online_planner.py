"""Plan window by window while conditions move: re-solve with what is believed, switch only where it pays.

A planner knows profiles, budgets, the lengths that it has seen and an estimate of the noise scale. What it believes of
costs it corrects by the seconds that steps took. It knows nothing of simulations: the same planner leads real runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.cost_model.cost_arrays import CostArrays, Floats, Indices
from autotune.cost_model.goodput import step_efficiency
from autotune.cost_model.plan_pool import PlanPool
from autotune.io.documents import STRICT
from autotune.simulator.simulated_job import Flags

# Windows that what is believed of rises beforehand counts for, and the smallest weight of a new one.
_PRIOR_WINDOWS = 4
_RISE_WEIGHT = 0.05
# Scale of a logistic distribution over its standard deviation.
_LOGISTIC = 3**0.5 / np.pi
# Windows, the next one included, whose budgets are announced.
LOOK_AHEAD = 8
# Dips of the memory that are smaller are none.
DIP = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known of n lanes before a window.

    Attributes:
        budget: shape (n, windows), bytes of the next window and of those after it that are announced.
        progress: shape (n,), share of the run that is done.
        windows_left: shape (n,), the next one included.
        noise_scale: shape (n,), as estimated, in samples; NaN while unknown.
        switch_s: shape (n,), what a switch of plans costs.
    """

    budget: Floats
    progress: Floats
    windows_left: Floats
    noise_scale: Floats
    switch_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a window of n lanes saw; arrays of shape (n,).

    Attributes:
        plan: the number of the plan that it ran under.
        length: mean factor on the profiled sequence length.
        longest: the same of its longest batch.
        dip: by how much less memory there was than announced, as a logarithm; 0 where all was as announced.
        step_s: measured seconds per step.
        window_s: what its steps took, without switching and lost work.
        total_s: what it took.
        ran_out: whether it ran out of memory.
    """

    plan: Indices
    length: Floats
    longest: Floats
    dip: Floats
    step_s: Floats
    window_s: Floats
    total_s: Floats
    ran_out: Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """How a planner plans.

    Attributes:
        reserve: share by which sequences are taken to be longer than those last seen, where memory is concerned.
        rise: standard deviation by which the longest batch of a window is taken, before any was seen, to differ from
            the length of the window before, and its memory from what was announced, as a logarithm; plans are then
            weighed by what running out of memory would cost. 0 takes what was seen last, and the reserve, for certain.
        retry: windows that are lost when one runs out of memory, the leanest plan's not counted.
        horizon: windows over which a switch must pay for itself; 0 switches whenever another plan is better.
        cost_error: standard deviation of the logarithm by which profiles are taken to be wrong; 0 believes them.
        common_share: share of that variance that all units have in common in a precision.
        drift: the same standard deviation, of what is forgotten per window.
        time_noise: the same of a window's measured seconds per step.
    """

    __pydantic_config__ = STRICT

    reserve: float = 0.0
    rise: float = 0.0
    retry: float = 1.0
    horizon: float = 3.0
    cost_error: float = 0.3
    common_share: float = 0.6
    drift: float = 0.02
    time_noise: float = 0.02


@dataclass(slots=True)
class Levers:
    """What may be asked of a planner beyond its settings, per lane; all neutral by default.

    Attributes:
        brace: shape (n,), share of the last dip of the memory that is expected again.
        caution: shape (n,), standard deviations by which the next window's longest batch is taken to be longer.
        k_bias: shape (n,), factor on the worth of each doubling of k, as a logarithm.
        price_16_bit: shape (n,), logarithm of a factor on the seconds of 16-bit choices.
        optimism: shape (n,), standard deviations by which what is not known well is taken to be faster.
        stickiness: shape (n,), factor on what a switch is taken to cost.
    """

    brace: Floats
    caution: Floats
    k_bias: Floats
    price_16_bit: Floats
    optimism: Floats
    stickiness: Floats

    @classmethod
    def neutral(cls, lanes: int) -> Levers:
        """Return levers that change nothing."""
        zero = np.zeros(lanes)
        return cls(zero, zero.copy(), zero.copy(), zero.copy(), zero.copy(), np.ones(lanes))


class Belief:
    """Believe factors on what each unit costs in each precision, and learn them from whole steps.

    A step's seconds are linear in the factors, so that a Kalman filter is exact: factors are normal, those of one
    precision correlated, and forgotten at a constant rate.

    Args:
        lanes: how many.
        units: per lane.
        precisions: per unit.
        settings: how wrong profiles are taken to be.

    Attributes:
        mean: shape (lanes, units, precisions).
    """

    def __init__(self, lanes: int, units: int, precisions: int, settings: PlannerSettings) -> None:
        self.mean = np.ones((lanes, units, precisions))
        same = np.kron(np.ones((units, units)), np.eye(precisions))
        own = np.eye(units * precisions)
        prior = settings.common_share * same + (1 - settings.common_share) * own
        self._forgotten = settings.drift**2 * same
        self._noise = settings.time_noise**2
        self._covariance = np.tile(settings.cost_error**2 * prior, (lanes, 1, 1))
        self._off = settings.cost_error == 0

    def deviation(self) -> Floats:
        """Return how unsure each factor is, shape (lanes, units, precisions)."""
        variance = np.einsum("nii->ni", self._covariance).reshape(self.mean.shape)
        return np.asarray(np.sqrt(np.maximum(variance, 0.0)))

    def learn(self, weights: Floats, constant: Floats, measured: Floats, valid: Flags) -> None:
        """Take in one step of each lane.

        Args:
            weights: shape (lanes, units x precisions), seconds of each unit in the precision that it ran in, as told.
            constant: shape (lanes,), seconds of a step that no factor touches.
            measured: shape (lanes,), seconds of the step.
            valid: shape (lanes,), which lanes measured anything.
        """
        if self._off:
            return
        self._covariance += self._forgotten
        expected = constant + (weights * self.mean.reshape(len(weights), -1)).sum(axis=1)
        spread = np.matmul(self._covariance, weights[:, :, None])[:, :, 0]
        variance = (weights * spread).sum(axis=1) + self._noise * np.square(expected)
        gain = spread / np.where(variance > 0, variance, 1.0)[:, None] * valid[:, None]
        self.mean += (gain * (measured - expected)[:, None]).reshape(self.mean.shape)
        np.clip(self.mean, 0.1, 10.0, out=self.mean)
        self._covariance -= gain[:, :, None] * spread[:, None, :]


class Rises:
    """Learn by how much a window's longest batch exceeds the length of the window before, as a logarithm.

    Args:
        deviation: shape (lanes,), standard deviation before anything was seen; counts for ``_PRIOR_WINDOWS``.

    Attributes:
        mean: shape (lanes,).
        deviation: shape (lanes,).
    """

    def __init__(self, deviation: Floats) -> None:
        self.mean = np.zeros(len(deviation))
        self._square = np.square(deviation)
        self._windows = _PRIOR_WINDOWS

    @property
    def deviation(self) -> Floats:
        """Return the standard deviation as seen so far, shape (lanes,)."""
        return np.asarray(np.sqrt(self._square))

    def learn(self, rise: Floats) -> None:
        """Take in one window of each lane."""
        weight = max(1 / (self._windows + 1), _RISE_WEIGHT)
        difference = rise - self.mean
        self.mean = self.mean + weight * difference
        self._square = (1 - weight) * (self._square + weight * difference**2)
        self._windows += 1

    def exceed(self, rise: Floats, caution: Floats) -> Floats:
        """Return the chance that the next rise exceeds another, shape (lanes, plans), of a logistic distribution."""
        scale = np.maximum(_LOGISTIC * self.deviation, 1e-9)[:, None]
        middle = (self.mean + caution * self.deviation)[:, None]
        return np.asarray(1 / (1 + np.exp(np.clip((rise - middle) / scale, -50, 50))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """What a planner is told of n runs.

    Attributes:
        pool: each lane's plans; see :meth:`PlanPool.take`.
        steps: shape (n, plans), each plan's k.
        batch: shape (n,), samples of one batch.
        adaptive: shape (n,), whether a step consumes k batches.
        num_k: shape (n,), how many k can be chosen.
        num_units: shape (n,).
        recomputable: shape (n, max_units).
        still: shape (n,), whether sequences are known to be all of one length.
    """

    pool: PlanPool
    steps: Floats
    batch: Floats
    adaptive: Flags
    num_k: Indices
    num_units: Indices
    recomputable: Flags
    still: Flags

    def __len__(self) -> int:
        return len(self.batch)

    @classmethod
    def of(cls, pool: PlanPool, arrays: CostArrays, job: Indices, still: Flags) -> Lanes:
        """Return lanes of jobs.

        Args:
            pool: the jobs' plans.
            arrays: the jobs.
            job: shape (n,), each lane's.
            still: shape (n,), whether sequences are known to be all of one length.
        """
        profiles = arrays.profiles
        return cls(
            pool=pool.take(job),
            steps=np.take_along_axis(arrays.accumulation_steps[job], pool.k[job], axis=1).astype(np.float64),
            batch=np.array([float(profile.batch_size) for profile in profiles])[job],
            adaptive=np.array([profile.batching == "adaptive" for profile in profiles])[job],
            num_k=arrays.num_k[job],
            num_units=arrays.num_units[job],
            recomputable=arrays.recomputable[job],
            still=still,
        )


class Planner:
    """Plan the next window of n lanes: a plan is its number in its lane's pool.

    Args:
        lanes: what is planned for.
        settings: how to plan.

    Attributes:
        lanes: what is planned for.
        settings: how to plan.
        belief: what is believed of costs.
        rises: what is believed of the next window's longest batch.
        length: shape (n,), the sequence length seen last.
        dip: shape (n,), the last dip of the memory that was not announced, as a logarithm; 0 before any.
        seen: the last window; ``None`` before the first.
    """

    def __init__(self, lanes: Lanes, settings: PlannerSettings) -> None:
        self.lanes = lanes
        self.settings = settings
        units = lanes.recomputable.shape[1]
        self.belief = Belief(len(lanes), units, lanes.pool.weights.shape[2] // units, settings)
        self.rises = Rises(np.where(lanes.still, 0.0, settings.rise))
        self.length = np.ones(len(lanes))
        self.dip = np.zeros(len(lanes))
        self.seen: Seen | None = None

    @property
    def plan(self) -> Indices:
        """Return the running plan; before the first window, the baseline."""
        return self.lanes.pool.baseline if self.seen is None else self.seen.plan

    def decide(self, situation: Situation, levers: Levers | None = None) -> Indices:
        """Return the number of each lane's plan for the next window."""
        levers = levers or Levers.neutral(len(self.lanes))
        pool = self.lanes.pool
        budget = situation.budget[:, 0] * np.exp(-levers.brace * self.dip)
        fits = pool.there & (pool.peak_bytes(self.length * (1 + self.settings.reserve)) <= budget[:, None])
        time = pool.seconds_per_step(self._factor(levers), self.length) / self._worth(situation.noise_scale, levers)
        if self.settings.rise:
            time = time + self._risk(time, budget, situation.switch_s, levers)
        best = np.where(fits, time, np.inf).argmin(axis=1)
        plan = np.where(fits.any(axis=1), best, pool.leanest)
        if self.seen is None:
            return plan
        rows = np.arange(len(plan))
        now, then = time[rows, self.seen.plan], time[rows, plan]
        # Only what pays for its switch within the horizon is worth one.
        saved = (1 - then / now) * self.seen.window_s * self.settings.horizon
        pays = saved > situation.switch_s * levers.stickiness if self.settings.horizon else then < now
        return np.where(fits[rows, self.seen.plan] & ~pays, self.seen.plan, plan)

    def observe(self, seen: Seen) -> None:
        """Take in what a window saw: the sequences' length, and the seconds of its steps."""
        if self.settings.rise:
            former = seen.length if self.seen is None else self.length
            self.rises.learn(np.log(seen.longest / former) + seen.dip)
        self.dip = np.where(seen.dip > DIP, seen.dip, self.dip)
        self.seen = seen
        self.length = seen.length
        rows, pool = np.arange(len(self.lanes)), self.lanes.pool
        between, constant = pool.between[rows, seen.plan], pool.constant[rows, seen.plan]
        weights = pool.weights[rows, seen.plan] * seen.length[:, None]
        valid = ~seen.ran_out & np.isfinite(seen.step_s) & (seen.step_s > 0)
        self.belief.learn(weights, constant + between * seen.length, np.where(valid, seen.step_s, 0.0), valid)

    def step_seconds(self, plan: Indices, length: Floats) -> Floats:
        """Return what a step of a plan is believed to take, shape (n,)."""
        return self.lanes.pool.seconds_of(plan, self.belief.mean, length)

    def _risk(self, time: Floats, budget: Floats, switch_s: Floats, levers: Levers) -> Floats:
        """Return what each plan's chance to run out of memory costs, in its time's unit, shape (n, plans)."""
        pool, window_s = self.lanes.pool, None if self.seen is None else self.seen.window_s
        room = pool.longest(budget) / self.length[:, None]
        chance = self.rises.exceed(np.log(room), levers.caution)
        lean = np.take_along_axis(time, pool.leanest[:, None], axis=1)
        # What is lost, and the leanest plan's repetition, take the place of the window's own time.
        lost = (self.settings.retry - 1) * time + lean
        if window_s is not None:
            running = np.take_along_axis(time, self.plan[:, None], axis=1)
            lost = lost + 2 * switch_s[:, None] / np.maximum(window_s, 1e-12)[:, None] * running
        # Nothing leaner can be run than the leanest plan: its own risk is not a matter of choice.
        least = np.take_along_axis(chance, pool.leanest[:, None], axis=1)
        return np.asarray(np.maximum(chance - least, 0.0) * lost)

    def _factor(self, levers: Levers) -> Floats:
        """Return by what each unit is believed to cost more than told, shape (n, max_units, precisions)."""
        factor = self.belief.mean
        if levers.optimism.any():
            factor = np.maximum(factor - levers.optimism[:, None, None] * self.belief.deviation(), 0.1 * factor)
        if levers.price_16_bit.any():
            factor = factor.copy()
            factor[:, :, 1:] *= np.exp(levers.price_16_bit)[:, None, None]
        return factor

    def _worth(self, noise_scale: Floats, levers: Levers) -> Floats:
        """Return what a step under each plan is believed to be worth, shape (n, plans)."""
        lanes = self.lanes
        adaptive, k = lanes.adaptive[:, None], lanes.steps
        known = ~np.isnan(noise_scale)[:, None]
        worth = step_efficiency(lanes.batch[:, None] * np.where(adaptive, k, 1.0), np.nan_to_num(noise_scale)[:, None])
        # At k = 1 nothing is learnt of the noise under adaptive batching: as long as it is unknown, k = 2 is taken.
        first = np.where(lanes.pool.k == 1, 1.0, 1e-3)
        worth = np.where(known | ~adaptive | (lanes.num_k < 2)[:, None], worth, first)
        return np.asarray(worth * k ** levers.k_bias[:, None])
