"""Observations and actions of a learned policy that adjusts a planner: features of a run, and levers.

The planner makes the plans. An action only adjusts it: how likely a dip of the memory is, how cautious to be
about longer sequences, how to value a larger k and 16-bit formats, how much to explore uncertain costs, and how costly
a switch is. With neutral levers the planner acts unchanged. The same code serves thousands of simulated lanes and the
one lane of a real run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.cost_model.cost_arrays import Floats
from autotune.simulator.online_planner import Levers, Planner, Seen, Situation

LEVER_VERSION = 3
# Values of each lever by the index in an action. The neutral value is 0, and 1 for the stickiness.
DIP_ODDS = (-2.0, -1.0, 0.0, 1.0, 2.0)
CAUTIONS = (-1.0, -0.5, 0.0, 0.5, 1.0)
K_BIASES = (-0.6, -0.3, 0.0, 0.3, 0.6)
PRICES_16_BIT = (-0.15, 0.0, 0.15)
OPTIMISMS = (0.0, 0.5, 1.0)
STICKINESSES = (0.25, 0.5, 1.0, 2.0, 4.0, 1e9)
SIZES = tuple(len(choices) for choices in (DIP_ODDS, CAUTIONS, K_BIASES, PRICES_16_BIT, OPTIMISMS, STICKINESSES))
NEUTRAL = (
    DIP_ODDS.index(0.0),
    CAUTIONS.index(0.0),
    K_BIASES.index(0.0),
    PRICES_16_BIT.index(0.0),
    OPTIMISMS.index(0.0),
    STICKINESSES.index(1.0),
)
LIMIT = 5.0
# Counts of windows are clipped to this limit, so that runs may be longer than in training.
_LONG = 100.0
# Weight of a new window in moving averages.
_WEIGHT = 0.3

Features = NDArray[np.float32]
Actions = NDArray[np.int64]


def levers_of(actions: Actions) -> Levers:
    """Return the levers for actions of shape (n, levers)."""
    return Levers(
        dip_odds=np.array(DIP_ODDS)[actions[:, 0]],
        caution=np.array(CAUTIONS)[actions[:, 1]],
        k_bias=np.array(K_BIASES)[actions[:, 2]],
        price_16_bit=np.array(PRICES_16_BIT)[actions[:, 3]],
        optimism=np.array(OPTIMISMS)[actions[:, 4]],
        stickiness=np.array(STICKINESSES)[actions[:, 5]],
    )


@dataclass(slots=True)
class Memory:
    """Statistics of n runs; arrays of shape (n,), most of them moving averages.

    Attributes:
        windows: number of windows so far.
        length: logarithm of the sequence length.
        change: change of ``length`` from window to window.
        rise: logarithm of a window's longest batch over the length of the window before.
        rise_square: square of ``rise``.
        rise_max: largest rise so far.
        ran_out: share of windows that ran out of memory.
        out_since: windows since the last one that ran out of memory.
        noise: logarithm of the last known noise scale, in batches.
        noise_change: change of ``noise`` from window to window.
        noise_square: square of ``noise_change``.
        surprise: logarithm of measured over expected seconds per step.
        surprise_square: square of ``surprise``.
        held: windows under the running plan.
    """

    windows: Floats
    length: Floats
    change: Floats
    rise: Floats
    rise_square: Floats
    rise_max: Floats
    ran_out: Floats
    out_since: Floats
    noise: Floats
    noise_change: Floats
    noise_square: Floats
    surprise: Floats
    surprise_square: Floats
    held: Floats

    @classmethod
    def of(cls, lanes: int) -> Memory:
        """Return the statistics before the first window."""
        memory = cls(*(np.zeros(lanes) for _ in range(14)))
        memory.out_since += 40.0
        return memory


class Watch:
    """An observer that describes a planner's runs with features.

    Args:
        planner: the planner.

    Attributes:
        planner: the planner.
        baseline_peak: shape (n,), peak of the baseline plan at the profiled length, in bytes.
        memory: statistics of the runs.
        situation: the situation before the next window, which the features describe.
        full: shape (n,), peak of the running plan at the last length, as a share of the next window's budget.
        unsure: shape (n, max_units, precisions), standard deviation of each cost factor.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.lanes = len(planner.lanes)
        self.baseline_peak = planner.lanes.pool.peak_of(planner.lanes.pool.baseline, np.ones(self.lanes))
        self.memory = Memory.of(self.lanes)
        self.situation: Situation
        self.full: Floats
        self.unsure: Floats

    def observe(self, seen: Seen, noise_scale: Floats) -> None:
        """Update the planner and the statistics with a window.

        Args:
            seen: measurements of the window.
            noise_scale: shape (n,), estimated noise scale in samples; NaN while unknown.
        """
        memory, former_plan = self.memory, self.planner.plan
        length, longest = np.log(seen.length), np.log(seen.longest)
        former = length if self.planner.seen is None else np.log(self.planner.length)
        valid = ~seen.ran_out & (seen.step_s > 0)
        believed = self.planner.step_seconds(seen.plan, seen.length)
        surprise = np.where(valid, np.log(np.where(valid, seen.step_s, 1.0) / believed), 0.0)
        self.planner.observe(seen)

        def mix(old: Floats, new: Floats) -> Floats:
            weight = np.maximum(_WEIGHT, 1 / (1 + memory.windows))
            return np.asarray(old + weight * (new - old))

        rise = longest - former
        known = ~np.isnan(noise_scale)
        noise = np.where(
            known, np.log(np.where(known, noise_scale, 1.0) / self.planner.lanes.batch + 1e-3), memory.noise
        )
        step = np.where(known & (memory.noise != 0), noise - memory.noise, 0.0)
        memory.length = mix(memory.length, length)
        memory.change = mix(memory.change, length - former)
        memory.rise, memory.rise_square = mix(memory.rise, rise), mix(memory.rise_square, rise**2)
        memory.rise_max = np.maximum(memory.rise_max, rise)
        memory.ran_out = mix(memory.ran_out, seen.ran_out.astype(float))
        memory.out_since = np.where(seen.ran_out, 0.0, memory.out_since + 1)
        memory.noise_change, memory.noise_square = mix(memory.noise_change, step), mix(memory.noise_square, step**2)
        memory.noise = noise
        memory.surprise = mix(memory.surprise, surprise)
        memory.surprise_square = mix(memory.surprise_square, surprise**2)
        memory.held = np.where(seen.plan == former_plan, memory.held + 1, 0.0)
        memory.windows = memory.windows + 1

    def features(self, situation: Situation) -> tuple[Features, Features]:
        """Return the features before a window, each between -5 and 5.

        Returns:
            ``run``: shape (n, len(RUN_FEATURES)); ``units``: shape (n, max_units, len(UNIT_FEATURES)), zeros for units
            that do not exist.
        """
        self.situation = situation
        # Several features use these.
        self.full, self.unsure = self.pressure(), self.planner.belief.deviation()
        run = np.stack([read(self) for read in RUN_FEATURES.values()], axis=1)
        return _bounded(run), _bounded(self._units())

    @property
    def choices(self) -> NDArray[np.int64]:
        """The choices of the running plans, shape (n, max_units)."""
        return self.planner.lanes.pool.choices[np.arange(self.lanes), self.planner.plan]

    def pressure(self, longer: Floats | float = 0.0) -> Floats:
        """Return the peak of the running plan as a share of the next window's budget, shape (n,).

        Args:
            longer: logarithm of the assumed length over the last one.
        """
        length = self.planner.length * np.exp(longer)
        return self.planner.lanes.pool.peak_of(self.planner.plan, length) / self.situation.budget[:, 0]

    def share(self, flags: NDArray[np.bool_]) -> Floats:
        """Return the share of each lane's units for which a flag is set."""
        return np.asarray(flags.sum(axis=1) / self.planner.lanes.num_units)

    def _units(self) -> Floats:
        planner, lanes, choices = self.planner, self.planner.lanes, self.choices
        rows = np.arange(self.lanes)
        mean, deviation = planner.belief.mean, self.unsure
        seconds = lanes.pool.weights[rows, planner.plan].reshape(mean.shape) * mean
        chosen = seconds.sum(axis=2)
        there = np.arange(choices.shape[1])[None, :] < lanes.num_units[:, None]
        precision = lanes.numbering.precision(choices)
        own = np.take_along_axis(deviation, precision[:, :, None], axis=2)[:, :, 0]
        believed = np.take_along_axis(mean, precision[:, :, None], axis=2)[:, :, 0]
        parts = [
            there.astype(float),
            lanes.recomputable.astype(float),
            chosen / np.maximum(chosen.sum(axis=1, keepdims=True), 1e-12) * lanes.num_units[:, None],
            2 * np.log(believed),
            2 * np.log(mean.max(axis=2) / mean.min(axis=2)),
            5 * own,
            5 * deviation.max(axis=2),
            (precision > 0).astype(float),
            lanes.numbering.recomputes(choices).astype(float),
        ]
        return np.where(there[:, :, None], np.stack(parts, axis=2), 0.0)


def _bounded(values: Floats) -> Features:
    return np.clip(np.nan_to_num(values), -LIMIT, LIMIT).astype(np.float32)


UNIT_FEATURES = (
    "present",
    "recomputable",
    "seconds_share",
    "cost_factor",
    "cost_factor_range",
    "unsure",
    "unsure_most",
    "is_16_bit",
    "is_recomputed",
)


def _deviation(mean: Floats, square: Floats) -> Floats:
    return np.asarray(np.sqrt(np.maximum(square - mean**2, 0.0)))


def _next_lower(w: Watch) -> Floats:
    """Return the logarithm of the smallest announced budget over the next one."""
    return np.asarray(np.log(w.situation.budget.min(axis=1) / w.situation.budget[:, 0]))


def _until_lower(w: Watch) -> Floats:
    """Return 1 over the number of windows until a smaller budget; 0 if none is announced."""
    lower = w.situation.budget[:, 1:] < 0.999 * w.situation.budget[:, :1]
    return np.where(lower.any(axis=1), 1.0 / (1.0 + lower.argmax(axis=1)), 0.0)


def _until_higher(w: Watch) -> Floats:
    """Return 1 over the number of windows until a larger budget; 0 if none is announced."""
    higher = w.situation.budget[:, 1:] > 1.001 * w.situation.budget[:, :1]
    return np.where(higher.any(axis=1), 1.0 / (1.0 + higher.argmax(axis=1)), 0.0)


def _dip_risk(w: Watch) -> Floats:
    """Return whether the running plan would run out of memory in a dip like the last ones."""
    return np.asarray(w.full * w.situation.budget[:, 0] > np.exp(w.planner.dips.level), dtype=np.float64)


def _dip(w: Watch) -> Floats:
    """Return the logarithm of the announced budget over what a dip leaves; 0 before the first."""
    known = np.isfinite(w.planner.dips.level)
    return np.where(known, np.log(w.situation.budget[:, 0]) - np.where(known, w.planner.dips.level, 0.0), 0.0)


def _switch_share(w: Watch) -> Floats:
    if w.planner.seen is None:
        return np.zeros(w.lanes)
    return w.situation.switch_s / np.maximum(w.planner.seen.window_s, 1e-12) * 2


def _running(w: Watch, values: NDArray[Any]) -> NDArray[Any]:
    """Return the value for the running plan, given the values for all plans, shape (n, plans)."""
    return values[np.arange(w.lanes), w.planner.plan]


# Features of a run by name.
RUN_FEATURES: dict[str, Callable[[Watch], Floats]] = {
    "progress": lambda w: w.situation.progress,
    "windows_left": lambda w: np.log(np.clip(w.situation.windows_left, 1.0, _LONG)) / 2,
    "windows": lambda w: np.log1p(np.minimum(w.memory.windows, _LONG)) / 2,
    "still": lambda w: w.planner.lanes.still.astype(np.float64),
    "length": lambda w: 2 * np.log(w.planner.length),
    "length_over_mean": lambda w: 5 * (np.log(w.planner.length) - w.memory.length),
    "length_change": lambda w: 10 * w.memory.change,
    "rise": lambda w: 10 * w.memory.rise,
    "rise_deviation": lambda w: 10 * _deviation(w.memory.rise, w.memory.rise_square),
    "rise_max": lambda w: 5 * w.memory.rise_max,
    "ran_out": lambda w: 3 * w.memory.ran_out,
    "ran_out_since": lambda w: 1 / (1 + w.memory.out_since),
    "pressure": lambda w: 3 * (w.full - 0.8),
    "pressure_longest": lambda w: 3 * (w.pressure(w.memory.rise_max) - 0.8),
    "budget": lambda w: np.log(w.situation.budget[:, 0] / w.baseline_peak),
    "budget_ahead": lambda w: 3 * _next_lower(w),
    "until_lower": _until_lower,
    "until_higher": _until_higher,
    "dip": lambda w: 5 * _dip(w),
    "dips": lambda w: np.log1p(np.minimum(w.planner.dips.count, _LONG / 10)),
    "dip_since": lambda w: np.log1p(np.minimum(w.planner.dips.elapsed, _LONG)),
    "dip_interval": lambda w: np.log1p(np.minimum(w.planner.dips.interval, _LONG)),
    "dip_chance": lambda w: 4 * w.planner.dips.chances(1)[:, 0],
    "dip_chance_soon": lambda w: 2 * w.planner.dips.chances(3).sum(axis=1),
    "dip_unsure": lambda w: 5 * w.planner.dips.deviation,
    "dip_risk": _dip_risk,
    "switch_cost": _switch_share,
    "held": lambda w: np.log1p(np.minimum(w.memory.held, _LONG)) / 2,
    "noise_known": lambda w: (~np.isnan(w.situation.noise_scale)).astype(float),
    "noise": lambda w: w.memory.noise / 2,
    "noise_change": lambda w: 3 * w.memory.noise_change,
    "noise_deviation": lambda w: 2 * np.sqrt(w.memory.noise_square),
    "adaptive": lambda w: w.planner.lanes.adaptive.astype(float),
    "k": lambda w: np.log2(_running(w, w.planner.lanes.steps)) / 2,
    "k_more": lambda w: (_running(w, w.planner.lanes.pool.k) + 1 < w.planner.lanes.num_k).astype(float),
    "once": lambda w: (
        _running(w, w.planner.lanes.pool.constant) / w.planner.step_seconds(w.planner.plan, w.planner.length)
    ),
    "surprise": lambda w: 10 * w.memory.surprise,
    "surprise_deviation": lambda w: 10 * _deviation(w.memory.surprise, w.memory.surprise_square),
    "unsure": lambda w: 5 * w.unsure.mean(axis=(1, 2)),
    "recomputed": lambda w: w.share(w.planner.lanes.numbering.recomputes(w.choices)),
    "lowered": lambda w: w.share(w.planner.lanes.numbering.precision(w.choices) > 0),
    "depth": lambda w: np.log2(1 + w.planner.lanes.num_units) / 4,
}
