"""Plan window by window while conditions move: re-solve with what is believed, switch only where it pays.

A planner knows profiles, budgets, the lengths that it has seen and an estimate of the noise scale. What it believes of
costs it corrects by the seconds that steps took. It knows nothing of simulations: the same planner leads real runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.physics.convergence import step_efficiency
from autotune.physics.cost_arrays import CostArrays, Floats, Indices
from autotune.physics.plan_pool import PlanPool
from autotune.physics.simulated_job import Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Hold what is known of n lanes before a window.

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
    """Hold what a window of n lanes saw; arrays of shape (n,).

    Attributes:
        plan: the number of the plan that it ran under.
        length: mean factor on the profiled sequence length.
        longest: the same of its longest batch.
        step_s: measured seconds per step.
        window_s: what its steps took, without switching and lost work.
        total_s: what it took.
        ran_out: whether it ran out of memory.
    """

    plan: Indices
    length: Floats
    longest: Floats
    step_s: Floats
    window_s: Floats
    total_s: Floats
    ran_out: Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Say how a planner plans.

    Attributes:
        reserve: share by which sequences are taken to be longer than those last seen, where memory is concerned.
        horizon: windows over which a switch must pay for itself; 0 switches whenever another plan is better.
        cost_error: standard deviation of the logarithm by which profiles are taken to be wrong; 0 believes them.
        common_share: share of that variance that all units have in common in a precision.
        drift: the same standard deviation, of what is forgotten per window.
        time_noise: the same of a window's measured seconds per step.
    """

    reserve: float = 0.0
    horizon: float = 3.0
    cost_error: float = 0.3
    common_share: float = 0.6
    drift: float = 0.02
    time_noise: float = 0.02


@dataclass(slots=True)
class Levers:
    """Hold what may be asked of a planner beyond its settings, per lane; all neutral by default.

    Attributes:
        reserve: shape (n,), added to the settings' reserve.
        k_bias: shape (n,), factor on the worth of each doubling of k, as a logarithm.
        price_16_bit: shape (n,), logarithm of a factor on the seconds of 16-bit choices.
        optimism: shape (n,), standard deviations by which what is not known well is taken to be faster.
        stickiness: shape (n,), factor on what a switch is taken to cost.
    """

    reserve: Floats
    k_bias: Floats
    price_16_bit: Floats
    optimism: Floats
    stickiness: Floats

    @classmethod
    def neutral(cls, lanes: int) -> Levers:
        """Return levers that change nothing."""
        zero = np.zeros(lanes)
        return cls(zero, zero.copy(), zero.copy(), zero.copy(), np.ones(lanes))


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
        return np.sqrt(np.maximum(variance, 0.0))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Hold what a planner is told of n runs.

    Attributes:
        pool: each lane's plans; see :meth:`PlanPool.take`.
        steps: shape (n, plans), each plan's k.
        batch: shape (n,), samples of one batch.
        adaptive: shape (n,), whether a step consumes k batches.
        num_k: shape (n,), how many k can be chosen.
        num_units: shape (n,).
        recomputable: shape (n, max_units).
    """

    pool: PlanPool
    steps: Floats
    batch: Floats
    adaptive: Flags
    num_k: Indices
    num_units: Indices
    recomputable: Flags

    def __len__(self) -> int:
        return len(self.batch)

    @classmethod
    def of(cls, pool: PlanPool, arrays: CostArrays, job: Indices) -> Lanes:
        """Return lanes of jobs.

        Args:
            pool: the jobs' plans.
            arrays: the jobs.
            job: shape (n,), each lane's.
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
        length: shape (n,), the sequence length seen last.
        seen: the last window; ``None`` before the first.
    """

    def __init__(self, lanes: Lanes, settings: PlannerSettings) -> None:
        self.lanes = lanes
        self.settings = settings
        units = lanes.recomputable.shape[1]
        self.belief = Belief(len(lanes), units, lanes.pool.weights.shape[2] // units, settings)
        self.length = np.ones(len(lanes))
        self.seen: Seen | None = None

    @property
    def plan(self) -> Indices:
        """Return the running plan; before the first window, the baseline."""
        return self.lanes.pool.baseline if self.seen is None else self.seen.plan

    def decide(self, situation: Situation, levers: Levers | None = None) -> Indices:
        """Return the number of each lane's plan for the next window."""
        levers = levers or Levers.neutral(len(self.lanes))
        pool = self.lanes.pool
        peak = pool.peak_bytes(self.length * (1 + self.settings.reserve + levers.reserve))
        fits = pool.there & (peak <= situation.budget[:, :1])
        worth = self._worth(situation.noise_scale, levers)
        time = pool.seconds_per_step(self._factor(levers), self.length) / worth
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
