"""A planner that chooses a plan for each window by estimated costs, and switches only if that pays off.

It knows profiles, budgets, the sequence lengths so far and an estimate of the noise scale, and it corrects its cost
estimates with measured step times. It weighs what it cannot know, the next dip of the memory budget and the next long
batch, by their probability and cost, a few windows ahead. The same planner serves simulated and real runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autotune.cost_model.cost_arrays import CostArrays, Floats, Indices, Numbering
from autotune.cost_model.goodput import step_efficiency
from autotune.cost_model.plan_pool import PlanPool
from autotune.simulator.cost_belief import CostBelief, expected_gain
from autotune.simulator.dip_forecasts import DIP, FORECASTS
from autotune.simulator.planner_settings import PlannerSettings
from autotune.simulator.simulated_job import Flags

# Weight of the prior on rises, in windows, and the smallest weight of a new window.
_PRIOR_WINDOWS = 4
_RISE_WEIGHT = 0.05
# Scale of a logistic distribution, divided by its standard deviation.
_LOGISTIC = 3**0.5 / np.pi
# Probability of a dip above which memory that is left free is left for it.
_LIKELY = 0.01
# Number of plans whose measurement may be worth its time: those with the smallest expected times.
_CLOSE = 16
# Changes of a plan's time that no measurement is worth, as a share of it.
_SMALL = 1e-3
# Weight of a window for how likely its plan is to run out of memory, and what is left of that after each other window.
_FAILURE_WEIGHT, _FORGOTTEN = 0.5, 0.95
# Logarithm of a budget over the need of the fullest plan, beyond which a budget is as good as none.
_ROOMY = 1.0
# Number of windows whose budgets are announced, including the next one.
LOOK_AHEAD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known about n lanes before a window.

    Attributes:
        budget: shape (n, windows), announced budgets of the next window and of those after it, in bytes.
        progress: shape (n,), share of the run that is done.
        windows_left: shape (n,), windows left, including the next one.
        noise_scale: shape (n,), estimate in samples; NaN while unknown.
        switch_s: shape (n,), seconds that a switch of plans costs.
    """

    budget: Floats
    progress: Floats
    windows_left: Floats
    noise_scale: Floats
    switch_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Measurements of one window of n lanes; arrays of shape (n,).

    Attributes:
        plan: number of the plan.
        length: mean sequence length relative to the profiled one.
        longest: sequence length of the window's longest batch, relative to the profiled one.
        dip: logarithm of announced over actual budget; 0 if the budget was as announced.
        budget: actual budget in bytes.
        step_s: measured seconds per step.
        window_s: seconds of its steps, without switching and lost work.
        total_s: seconds of the whole window.
        ran_out: whether the window ran out of memory.
    """

    plan: Indices
    length: Floats
    longest: Floats
    dip: Floats
    budget: Floats
    step_s: Floats
    window_s: Floats
    total_s: Floats
    ran_out: Flags


@dataclass(slots=True)
class Levers:
    """Adjustments of a planner beyond its settings, per lane.

    Attributes:
        dip_odds: shape (n,), logarithm of a factor on the odds of a dip in the next window, once there has been one.
        caution: shape (n,), standard deviations that are added to the expected longest batch of the next window, and to
            the expected depth of a dip.
        k_bias: shape (n,), logarithm of a factor on the worth of each doubling of k.
        price_16_bit: shape (n,), logarithm of a factor on the seconds of 16-bit choices.
        optimism: shape (n,), standard deviations that are subtracted from uncertain costs.
        stickiness: shape (n,), factor on the cost of a switch.
    """

    dip_odds: Floats
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


class Rises:
    """Estimates of the logarithm of a window's longest batch over the length of the window before.

    Args:
        deviation: shape (lanes,), prior standard deviation, which weighs as much as ``_PRIOR_WINDOWS`` windows.

    Attributes:
        mean: shape (lanes,), expected logarithm.
    """

    def __init__(self, deviation: Floats) -> None:
        self.mean = np.zeros(len(deviation))
        self._square = np.square(deviation)
        self._windows = _PRIOR_WINDOWS

    @property
    def deviation(self) -> Floats:
        """Return the standard deviation of the logarithm, shape (lanes,)."""
        return np.asarray(np.sqrt(self._square))

    def learn(self, rise: Floats) -> None:
        """Update the estimates with one window of each lane, shape (lanes,)."""
        weight = max(1 / (self._windows + 1), _RISE_WEIGHT)
        difference = rise - self.mean
        self.mean = self.mean + weight * difference
        self._square = (1 - weight) * (self._square + weight * difference**2)
        self._windows += 1

    def exceed(self, rise: Floats, caution: Floats, unsure: Floats | float = 0.0) -> Floats:
        """Return the probability that the next rise, assumed logistic, exceeds thresholds.

        Args:
            rise: shape (lanes, plans), the thresholds.
            caution: shape (lanes,), standard deviations that are added to the expected rise.
            unsure: shape (lanes,), standard deviation of the thresholds themselves.
        """
        spread = np.hypot(self.deviation, unsure)
        scale = np.maximum(_LOGISTIC * spread, 1e-9)[:, None]
        middle = (self.mean + caution * spread)[:, None]
        return np.asarray(1 / (1 + np.exp(np.clip((rise - middle) / scale, -50, 50))))


class Rooms:
    """The largest length at which each plan fits a budget, computed anew only for lanes whose budget changes.

    Args:
        pool: plans of the lanes.
    """

    def __init__(self, pool: PlanPool) -> None:
        self._pool = pool
        self._known: dict[int | None, tuple[Floats, Floats]] = {}

    def log_longest(self, budget: Floats, window: int | None) -> Floats:
        """Return the logarithm of these lengths relative to the profiled one, shape (n, plans).

        Args:
            budget: shape (n,), budgets in bytes.
            window: the window that they are for, 0 for the next one; ``None`` for what a dip leaves.
        """
        known = self._known.get(window)
        if known is None and window and (before := self._known.get(window - 1)):
            known = before[0], before[1].copy()
        if known is None:
            known = budget, np.log(self._pool.longest(budget))
        former, found = known
        if len(changed := np.flatnonzero(former != budget)):
            found[changed] = np.log(self._pool.longest(budget[changed], changed))
        self._known[window] = (budget.copy(), found)
        return found

    def go_on(self) -> None:
        """Note that a window has passed, so that each of those ahead is one nearer."""
        self._known = {one and one - 1: known for one, known in self._known.items() if one != 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """What a planner knows about n runs.

    Attributes:
        pool: each lane's plans; see :meth:`PlanPool.take`.
        numbering: how the choices of a unit are numbered.
        steps: shape (n, plans), k of each plan.
        batch: shape (n,), samples in one batch.
        adaptive: shape (n,), whether a step consumes k batches.
        num_k: shape (n,), number of allowed k.
        num_units: shape (n,), number of units.
        recomputable: shape (n, max_units), whether a unit can be recomputed.
        still: shape (n,), whether all sequences are known to have one length.
    """

    pool: PlanPool
    numbering: Numbering
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
            pool: plans of the jobs.
            arrays: costs of the jobs.
            job: shape (n,), number of each lane's job.
            still: shape (n,), whether all sequences are known to have one length.
        """
        profiles = arrays.profiles
        return cls(
            pool=pool.take(job),
            numbering=arrays.numbering,
            steps=np.take_along_axis(arrays.accumulation_steps[job], pool.k[job], axis=1).astype(np.float64),
            batch=np.array([float(profile.batch_size) for profile in profiles])[job],
            adaptive=np.array([profile.batching == "adaptive" for profile in profiles])[job],
            num_k=arrays.num_k[job],
            num_units=arrays.num_units[job],
            recomputable=arrays.recomputable[job],
            still=still,
        )


class Planner:
    """A planner of n lanes; a plan is given by its number in its lane's pool.

    Args:
        lanes: the lanes.
        settings: the settings.

    Attributes:
        lanes: the lanes.
        settings: the settings.
        belief: estimates of costs.
        rises: estimates of the next window's longest batch.
        length: shape (n,), the last sequence length.
        dips: the forecast of dips of the memory budget.
        left_free: shape (n,), share of the next window's budget that the last decision leaves free for a dip.
        seen: the last window; ``None`` before the first.
    """

    def __init__(self, lanes: Lanes, settings: PlannerSettings) -> None:
        self.lanes = lanes
        self.settings = settings
        units = lanes.recomputable.shape[1]
        self.belief = CostBelief(len(lanes), units, lanes.pool.weights.shape[2] // units, settings)
        self.rises = Rises(np.where(lanes.still, 0.0, settings.rise))
        self.length = np.ones(len(lanes))
        self.dips = FORECASTS[settings.dips](len(lanes))
        self.seen: Seen | None = None
        self.left_free = np.zeros(len(lanes))
        self._rooms = Rooms(lanes.pool)
        # How likely each plan is to run out of memory without a dip, as its own windows show; rises tell it beforehand.
        self._failing = np.zeros(lanes.pool.there.shape)
        self._failures = self._failing
        # Each plan's peak in bytes at the last length.
        self._peaks = lanes.pool.peak_bytes(self.length)
        self._by_peak = np.where(lanes.pool.there, self._peaks, 0.0).argsort(axis=1)
        self._fullest = self._by_peak[:, -1]

    @property
    def plan(self) -> Indices:
        """Return the numbers of the running plans; before the first window, of the baselines."""
        return self.lanes.pool.baseline if self.seen is None else self.seen.plan

    def decide(self, situation: Situation, levers: Levers | None = None) -> Indices:
        """Return the number of each lane's plan for the next window.

        It is the first plan of the sequence with the smallest expected time over the horizon, switches included.
        """
        levers = levers or Levers.neutral(len(self.lanes))
        time = self.lanes.pool.seconds_per_step(self._factor(levers), self.length)
        worth = self._worth(situation.noise_scale, levers)
        time = time / worth
        switch = self._in_windows(situation.switch_s * levers.stickiness * (self.settings.horizon > 0), time)
        left = np.zeros_like(time)
        ahead = self._ahead(time, situation, levers)
        for weight, expected in reversed(ahead):
            left = weight * expected + np.minimum(left, left.min(axis=1, keepdims=True) + switch)
        self._note_free(situation.budget[:, 0], ahead[0][1])
        if self.settings.costs == "weighed" and self.settings.cost_error and self.settings.horizon:
            left = left - self._taught(left, worth, situation.windows_left)
        return self._cheapest(left, switch)

    def _taught(self, left: Floats, worth: Floats, windows_left: Floats) -> Floats:
        """Return the time that measuring each plan in the next window is expected to save later, shape (n, plans).

        Args:
            left: shape (n, plans), expected time over the horizon if the plan runs in the next window.
            worth: shape (n, plans), worth of a step.
            windows_left: shape (n,), windows left, including the next one.
        """
        pool, horizon = self.lanes.pool, self.settings.horizon
        rows, best = np.arange(len(left))[:, None], left.argmin(axis=1)[:, None]
        close = np.argpartition(left, min(_CLOSE, left.shape[1]) - 1, axis=1)[:, :_CLOSE]
        per_length = self.length[:, None] / worth
        weights = pool.weights[rows, close] * per_length[rows, close][:, :, None]
        other = (pool.weights[rows, best] * per_length[rows, best][:, :, None])[:, 0]
        seconds = (weights * self.belief.mean.reshape(len(left), 1, -1)).sum(axis=2)
        slower = (left[rows, close] - left[rows, best]) / max(horizon, 1.0)
        moved = self.belief.moved(weights, other, seconds)
        gain = expected_gain(slower, np.where(moved > _SMALL * seconds, moved, 0.0))
        # A window that runs out of memory teaches nothing.
        gain *= 1 - self._failures[rows, close]
        taught = np.zeros_like(left)
        taught[rows, close] = gain * np.clip(windows_left - 1, 0.0, horizon)[:, None]
        return taught

    def _cheapest(self, cost: Floats, switch: Floats) -> Indices:
        """Return the plans of the lowest cost, shape (n,); running plans cost no switch and are kept in a draw."""
        if self.seen is None:
            return np.asarray(cost.argmin(axis=1))
        running = np.take_along_axis(cost, self.seen.plan[:, None], axis=1)[:, 0]
        plan = (cost + switch).argmin(axis=1)
        other = np.take_along_axis(cost + switch, plan[:, None], axis=1)[:, 0]
        return np.where(other < running, plan, self.seen.plan)

    def _ahead(self, time: Floats, situation: Situation, levers: Levers) -> list[tuple[float, Floats]]:
        """Return, for each window of the horizon, its weight and every plan's expected time; infinite if too large.

        Args:
            time: shape (n, plans), time of a window under each plan if nothing happens.
            situation: what is known before the next window.
            levers: adjustments; those of dips apply to the next window.
        """
        windows = max(math.ceil(self.settings.horizon), 1)
        horizon = self.settings.horizon or 1.0
        chances = self._chances(windows, levers)
        reserve = self.settings.reserve
        peaks = self.lanes.pool.peak_bytes(self.length * (1 + reserve)) if reserve else self._peaks
        lost = self._lost(time, situation.switch_s)
        found: list[tuple[float, Floats]] = []
        former, risks = None, (time, time)
        for window in range(windows):
            budget = situation.budget[:, min(window, LOOK_AHEAD - 1)]
            if former is None or not np.array_equal(budget, former):
                former, risks = budget, self._risks(budget, window, levers, any_dip=bool(chances.any()))
            chance = chances[:, window, None]
            expected = time + lost * ((1 - chance) * risks[0] + chance * risks[1])
            found.append((min(1.0, horizon - window), self._fitting(expected, peaks, budget, time)))
        return found

    def _fitting(self, expected: Floats, peaks: Floats, budget: Floats, time: Floats) -> Floats:
        """Return infinity in place of the cost of plans that do not fit; the leanest plan of each lane always does."""
        fits = self.lanes.pool.there & (peaks <= budget[:, None])
        cost = np.where(fits, expected, np.inf)
        none, lean = np.flatnonzero(~fits.any(axis=1)), self.lanes.pool.leanest
        cost[none, lean[none]] = time[none, lean[none]]
        return cost

    def _chances(self, windows: int, levers: Levers) -> Floats:
        """Return the probability that a dip begins in each of the next windows, shape (n, windows)."""
        chances = self.dips.chances(windows).copy()
        moved = (levers.dip_odds != 0) & (self.dips.count > 0)
        if moved.any():
            first = np.clip(chances[:, 0], 1e-4, 1 - 1e-4)
            odds = np.exp(levers.dip_odds) * first / (1 - first)
            chances[:, 0] = np.where(moved, odds / (1 + odds), chances[:, 0])
        return chances

    def _risks(self, budget: Floats, window: int, levers: Levers, *, any_dip: bool) -> tuple[Floats, Floats]:
        """Return each plan's probability of running out of memory without and with a dip, shape (n, plans) each.

        No plan has a lower peak than the leanest one, so its own risk cannot be avoided and is left out.
        """
        leanest, length = self.lanes.pool.leanest[:, None], np.log(self.length)[:, None]

        def beyond(available: Floats, use: int | None, unsure: Floats | float) -> Floats:
            room = self._rooms.log_longest(available, use) - length
            chance = self.rises.exceed(room, levers.caution, unsure)
            return np.asarray(np.maximum(chance - np.take_along_axis(chance, leanest, axis=1), 0.0))

        usual = beyond(budget, window, 0.0) if self.settings.rise else self._failures
        if not any_dip:
            return usual, usual
        low = np.minimum(budget, np.exp(self.dips.level))
        return usual, np.maximum(beyond(low, None, self.dips.deviation), usual)

    def _lost(self, time: Floats, switch_s: Floats) -> Floats:
        """Return the time that running out of memory costs, shape (n, plans).

        The lost part and the repetition under the leanest plan replace the window's own time.
        """
        lean = np.take_along_axis(time, self.lanes.pool.leanest[:, None], axis=1)
        return (self.settings.retry - 1) * time + lean + 2 * self._in_windows(switch_s, time)

    def _in_windows(self, seconds: Floats, time: Floats) -> Floats:
        """Return seconds in the unit of ``time``, shape (n, 1); 0 before the first window."""
        if self.seen is None:
            return np.zeros((len(seconds), 1))
        running = np.take_along_axis(time, self.seen.plan[:, None], axis=1)
        return np.asarray(seconds[:, None] / np.maximum(self.seen.window_s, 1e-12)[:, None] * running)

    def _note_free(self, budget: Floats, expected: Floats) -> None:
        """Note how much of the next window's budget is best left free for a dip.

        Args:
            budget: shape (n,), the announced budget.
            expected: shape (n, plans), expected time of the next window; infinite for plans that do not fit.
        """
        level = np.minimum(np.exp(self.dips.level), budget)
        ready = self._peaks <= level[:, None]
        pays = np.where(ready, expected, np.inf).min(axis=1) < np.where(ready, np.inf, expected).min(axis=1)
        likely = self.dips.chances(1)[:, 0] > _LIKELY
        self.left_free = np.where(pays & likely, 1 - level / np.maximum(budget, 1.0), 0.0)

    def observe(self, seen: Seen) -> None:
        """Update the estimates with the measurements of a window."""
        if self.settings.rise:
            former = seen.length if self.seen is None else self.length
            self.rises.learn(np.log(seen.longest / former))
        else:
            self._learn_failure(seen)
        self._learn_dip(seen)
        self.seen = seen
        if not np.array_equal(seen.length, self.length):
            self._peaks = self.lanes.pool.peak_bytes(seen.length)
        self.length = seen.length
        self._rooms.go_on()
        rows, pool = np.arange(len(self.lanes)), self.lanes.pool
        between, constant = pool.between[rows, seen.plan], pool.constant[rows, seen.plan]
        weights = pool.weights[rows, seen.plan] * seen.length[:, None]
        valid = ~seen.ran_out & np.isfinite(seen.step_s) & (seen.step_s > 0)
        self.belief.learn(weights, constant + between * seen.length, np.where(valid, seen.step_s, 0.0), valid)

    def _learn_dip(self, seen: Seen) -> None:
        """Take in a window's dip, as far as plans can differ in it: not below what the leanest one needs."""
        pool = self.lanes.pool
        least, most = (np.log(pool.peak_of(plan, seen.length)) for plan in (pool.leanest, self._fullest))
        left = np.maximum(np.log(seen.budget), least)
        self.dips.learn(np.minimum(seen.dip, most + _ROOMY - left), left)

    def _learn_failure(self, seen: Seen) -> None:
        """Take in whether a window without a dip ran out of memory; what was learnt so is forgotten slowly.

        A plan is at least as likely to run out of memory as any of a lower peak.
        """
        rows, usual = np.arange(len(self.lanes)), seen.dip <= DIP
        self._failing *= _FORGOTTEN
        known = self._failing[rows, seen.plan]
        self._failing[rows, seen.plan] = np.where(usual, known + _FAILURE_WEIGHT * (seen.ran_out - known), known)
        failed = np.flatnonzero(self._failing.any(axis=1))
        order = self._by_peak[failed]
        sorted_by_peak = np.take_along_axis(self._failing[failed], order, axis=1)
        likely = np.empty_like(sorted_by_peak)
        np.put_along_axis(likely, order, np.maximum.accumulate(sorted_by_peak, axis=1), axis=1)
        self._failures = np.zeros_like(self._failing)
        self._failures[failed] = likely

    def step_seconds(self, plan: Indices, length: Floats) -> Floats:
        """Return the expected seconds of a step, shape (n,).

        Args:
            plan: shape (n,), number of each lane's plan.
            length: shape (n,), sequence length relative to the profiled one.
        """
        return self.lanes.pool.seconds_of(plan, self.belief.mean, length)

    def _factor(self, levers: Levers) -> Floats:
        """Return the expected cost of each unit relative to its profile, shape (n, max_units, precisions)."""
        factor = self.belief.mean
        if levers.optimism.any():
            factor = np.maximum(factor - levers.optimism[:, None, None] * self.belief.deviation(), 0.1 * factor)
        if levers.price_16_bit.any():
            factor = factor.copy()
            factor[:, :, 1:] *= np.exp(levers.price_16_bit)[:, None, None]
        return factor

    def _worth(self, noise_scale: Floats, levers: Levers) -> Floats:
        """Return the expected worth of a step under each plan, shape (n, plans)."""
        lanes = self.lanes
        adaptive, k = lanes.adaptive[:, None], lanes.steps
        known = ~np.isnan(noise_scale)[:, None]
        worth = step_efficiency(lanes.batch[:, None] * np.where(adaptive, k, 1.0), np.nan_to_num(noise_scale)[:, None])
        # Under adaptive batching, k = 1 gives no estimate of the noise scale; while it is unknown, prefer the second k.
        first = np.where(lanes.pool.k == 1, 1.0, 1e-3)
        worth = np.where(known | ~adaptive | (lanes.num_k < 2)[:, None], worth, first)
        return np.asarray(worth * k ** levers.k_bias[:, None] if levers.k_bias.any() else worth)
