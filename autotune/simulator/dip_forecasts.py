"""Forecasts of unannounced dips of the memory budget: how likely one is in each of the next windows, and how deep."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from autotune.cost_model.cost_arrays import Floats, Indices
from autotune.simulator.simulated_job import Flags

# Smaller dips of the memory budget (as a logarithm) are ignored.
DIP = 0.02
# The longest forecast, the longest regular interval between dips, and the longest that is told from others, in windows.
FARTHEST = 64
_LONGEST = 160
_SPAN = _LONGEST + FARTHEST
# Gaps in a burst of dips, and shares of dips that another one follows at once.
_GAPS, _AGAIN = (1.0, 2.0, 3.0, 5.0), (0.4, 0.7)
# Share of each hypothesis that is left to any other interval, and the mean of those.
_OTHER, _OTHER_MEAN = 0.01, 12.0
# Probability that the cause of dips changes after one.
_CHANGES = 0.01
# Deviation of the depth of dips after the first one, as a share of it.
_FIRST = 0.1
# Smallest deviation of the logarithm of the memory that a dip leaves, and the smallest weight of a new dip.
_LEVEL_DEVIATION, _LEVEL_WEIGHT = 0.01, 0.25


class DipForecast:
    """What n lanes have seen of dips; this forecast expects none.

    Args:
        lanes: number of lanes.

    Attributes:
        count: shape (n,), dips so far.
        elapsed: shape (n,), windows since the last dip began; 0 before the first.
        interval: shape (n,), windows between the last two dips; 0 before the second.
        level: shape (n,), expected logarithm of the memory that a dip leaves, in bytes; infinite before the first.
        deviation: shape (n,), standard deviation of that logarithm.
    """

    def __init__(self, lanes: int) -> None:
        self.count = np.zeros(lanes, dtype=np.int64)
        self.elapsed = np.zeros(lanes, dtype=np.int64)
        self.interval = np.zeros(lanes, dtype=np.int64)
        self.level = np.full(lanes, np.inf)
        self._variance = np.zeros(lanes)
        self._chances = np.zeros((lanes, 0))

    @property
    def deviation(self) -> Floats:
        """Return the standard deviation of ``level``, shape (n,)."""
        return np.asarray(np.maximum(np.sqrt(self._variance), _LEVEL_DEVIATION))

    def learn(self, dip: Floats, left: Floats) -> None:
        """Take in one window of each lane.

        Args:
            dip: shape (n,), logarithm of announced over actual memory.
            left: shape (n,), logarithm of the actual memory in bytes.
        """
        self._chances = self._chances[:, :0]
        begins = dip > DIP
        self.elapsed = self.elapsed + (self.count > 0)
        again = begins & (self.count > 0)
        self.interval = np.where(again, self.elapsed, self.interval)
        self._learn_interval(again)
        self.count = self.count + begins
        self.elapsed = np.where(begins, 0, self.elapsed)
        weight = np.maximum(1 / np.maximum(self.count, 1), _LEVEL_WEIGHT)
        off = np.where(np.isfinite(self.level) & begins, left - self.level, 0.0)
        self.level = np.where(begins, np.where(self.count == 1, left, self.level + weight * off), self.level)
        learnt = np.where(self.count == 1, (_FIRST * dip) ** 2, (1 - weight) * (self._variance + weight * off**2))
        self._variance = np.where(begins, learnt, self._variance)

    def chances(self, windows: int) -> Floats:
        """Return the probability that the next dip begins in each of the next windows, shape (n, windows)."""
        if self._chances.shape[1] < windows:
            self._chances = self._forecast(windows)
        return self._chances[:, :windows]

    def _forecast(self, windows: int) -> Floats:
        """Return what :meth:`chances` does."""
        return np.zeros((len(self.count), windows))

    def _learn_interval(self, lanes: Flags) -> None:
        """Take in ``interval`` of some lanes, shape (n,)."""


class LastInterval(DipForecast):
    """The two-line rule: the next dip comes after the last interval, for certain."""

    def _forecast(self, windows: int) -> Floats:
        """Return 1 in the window that is due, shape (n, windows)."""
        due = (self.interval - self.elapsed)[:, None] == 1 + np.arange(windows)
        return np.where(self.interval[:, None] > 0, due, False).astype(np.float64)


class DipBelief(DipForecast):
    """A Bayesian belief about the intervals between dips: one posterior over regular, irregular and memoryless causes.

    Each hypothesis is a distribution of intervals, and intervals are taken to be independent. Silent before the first
    dip, since its depth is unknown.
    """

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes)
        self._prior, self._mass, self._beyond = _hypotheses()
        self._weights = np.tile(self._prior, (lanes, 1))

    def _forecast(self, windows: int) -> Floats:
        """Return the posterior mean of all hypotheses, shape (n, windows)."""
        elapsed = np.minimum(self.elapsed, _LONGEST - 1)
        # After a longer silence, all that is known is its length.
        silent = elapsed / np.maximum(self.elapsed, 1)
        alive = (self._weights * self._beyond[elapsed]).sum(axis=1)
        ahead = [(self._weights * self._mass[elapsed + 1 + window]).sum(axis=1) for window in range(windows)]
        chance = np.stack(ahead, axis=1) / np.maximum(alive, 1e-300)[:, None]
        return np.where(self.count[:, None] > 0, chance * np.where(self.elapsed > elapsed, silent, 1.0)[:, None], 0.0)

    def _learn_interval(self, lanes: Flags) -> None:
        interval = self.interval[lanes]
        inside = np.minimum(interval, _SPAN - 1)
        said = np.where((interval < _SPAN)[:, None], self._mass[inside], self._beyond[inside])
        later = self._weights[lanes] * np.maximum(said, 1e-12)
        self._weights[lanes] = (1 - _CHANGES) * later / later.sum(axis=1, keepdims=True) + _CHANGES * self._prior


@functools.cache
def _hypotheses() -> tuple[Floats, Floats, Floats]:
    """Return all hypotheses: priors (h,), and masses and survival of intervals, shape (windows, h)."""
    means = np.unique(np.round(np.geomspace(2, 400, 30)))
    periods = np.arange(1.0, _LONGEST)
    families: list[tuple[Floats, Callable[[float], Floats]]] = [
        (periods, lambda mean: _repeated(mean, 0.02)),
        (periods, lambda mean: _repeated(mean, 0.25)),
        (means, lambda mean: _normal(mean, 0.06)),
        (means, lambda mean: _normal(mean, 0.12)),
        (means, lambda mean: _normal(mean, 0.25)),
        (means, lambda mean: _geometric(mean)),
        *((means, functools.partial(_bursts, gap, share)) for gap in _GAPS for share in _AGAIN),
    ]
    priors, masses = [], []
    for number, (values, mass_of) in enumerate(families):
        # Bursts are one cause among seven, whatever their gaps.
        weight = 1.0 if number < len(families) - len(_GAPS) * len(_AGAIN) else 1 / (len(_GAPS) * len(_AGAIN))
        prior = 1 / np.maximum(values, 2.0)
        priors.append(weight * prior / prior.sum())
        masses += [(1 - _OTHER) * mass_of(float(mean)) + _OTHER * _geometric(_OTHER_MEAN) for mean in values]
    # What is missing to 1 lies beyond the longest interval.
    mass, every = np.stack(masses, axis=1), np.concatenate(priors)
    return every / every.sum(), mass, np.maximum(1 - np.cumsum(mass, axis=0), 1e-12)


def _repeated(period: float, missing: float) -> Floats:
    """Return the mass of intervals between periodic dips of which a share is missing."""
    times, rest = np.divmod(np.arange(_SPAN), int(period))
    return np.where((rest == 0) & (times > 0), (1 - missing) * missing ** np.maximum(times - 1.0, 0.0), 0.0)


def _normal(mean: float, deviation: float) -> Floats:
    """Return the mass of normal intervals; the deviation is a share of the mean."""
    wide = max(deviation * mean, 0.4)
    place = (np.arange(_SPAN) - mean) / wide
    mass = np.exp(-0.5 * np.square(np.minimum(np.abs(place), 30.0)))
    mass[0] = 0.0
    return np.asarray(mass / max(float(mass.sum()), wide * (2 * np.pi) ** 0.5))


def _bursts(gap: float, share: float, mean: float) -> Floats:
    """Return the mass of intervals of which a share is a short gap, and the others memoryless pauses."""
    return np.asarray(share * _normal(gap, 0.2) + (1 - share) * _geometric(mean))


def _geometric(mean: float) -> Floats:
    """Return the mass of intervals of which every window is equally likely to be the last."""
    windows: Indices = np.arange(_SPAN)
    return np.where(windows > 0, (1 - 1 / mean) ** np.maximum(windows - 1.0, 0.0) / mean, 0.0)


FORECASTS: dict[str, type[DipForecast]] = {"none": DipForecast, "last": LastInterval, "belief": DipBelief}
