"""Families of memory pressure: when events begin that leave less memory than announced.

Some are regular and some cannot be known beforehand. A method that was tuned to one family is tested on the others.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autotune.cost_model.cost_arrays import Floats, Indices
from autotune.simulator.simulated_job import Flags

# Largest deviation of an interval from the mean one, as a share of it, if events are jittered.
_JITTER = 0.2
# Share of periodic events that do not happen, if some are missing.
_MISSING = 0.25
# Mean number of events in a burst, and windows between them.
_BURST, _BURST_GAP = 3.0, 2
# Number of slow periods in a run, and how much the rate of events changes during one.
_DAYS, _DAY_SHARE = 3, 0.9

# Draws the windows in which events begin: a generator, mean intervals of shape (n, 1) and the number of windows, to
# flags of shape (n, windows).
Family = Callable[[np.random.Generator, Indices, int], Flags]


def _periodic(generator: np.random.Generator, every: Indices, windows: int) -> Flags:
    """Return events at a fixed interval, as evaluations and snapshots have."""
    return np.asarray((np.arange(windows) + generator.integers(0, every)) % every == 0)


def _missing(generator: np.random.Generator, every: Indices, windows: int) -> Flags:
    """Return periodic events of which some do not happen."""
    happens = generator.random((len(every), windows)) >= _MISSING
    return _periodic(generator, every, windows) & happens


def _jittered(generator: np.random.Generator, every: Indices, windows: int) -> Flags:
    """Return events whose intervals differ by up to a fifth, as work of a neighbour that takes its time."""
    return _renewed(every, windows, generator, lambda mean: mean * (1 + _JITTER * generator.uniform(-1, 1, mean.shape)))


def _bursts(generator: np.random.Generator, every: Indices, windows: int) -> Flags:
    """Return events that come several at a time, as requests to a server on the same device."""

    def gap(mean: Floats) -> Floats:
        again = generator.random(mean.shape) < 1 - 1 / _BURST
        # The mean over all intervals stays the family's own.
        pause = np.maximum(_BURST * mean - (_BURST - 1) * _BURST_GAP, _BURST_GAP + 1)
        return np.where(again, _BURST_GAP, generator.exponential(pause))

    return _renewed(every, windows, generator, gap)


def _memoryless(generator: np.random.Generator, every: Indices, windows: int) -> Flags:
    """Return events that are equally likely in every window."""
    return np.asarray(generator.random((len(every), windows)) < 1 / every)


def _diurnal(generator: np.random.Generator, every: Indices, windows: int) -> Flags:
    """Return events that are frequent in one half of a slow period and rare in the other."""
    phase = 2 * np.pi * (_DAYS * np.arange(windows) / windows + generator.random((len(every), 1)))
    return np.asarray(generator.random((len(every), windows)) < (1 + _DAY_SHARE * np.sin(phase)) / every)


def _renewed(every: Indices, windows: int, generator: np.random.Generator, gap: Callable[[Floats], Floats]) -> Flags:
    """Return events with independent intervals, at least one window each, after a random start."""
    mean = every[:, 0].astype(np.float64)
    event = np.zeros((len(every), windows), dtype=bool)
    at = generator.uniform(0, mean)
    while (inside := at < windows).any():
        event[inside, at[inside].astype(np.int64)] = True
        at = at + np.maximum(gap(mean), 1.0)
    return event


FAMILIES: dict[str, Family] = {
    "periodic": _periodic,
    "jittered": _jittered,
    "missing": _missing,
    "bursts": _bursts,
    "memoryless": _memoryless,
    "diurnal": _diurnal,
}


def draw_events(
    generator: np.random.Generator, families: tuple[str, ...], every: Indices, lasts: Indices, windows: int
) -> tuple[Flags, Flags]:
    """Return which windows belong to an event and which of them begin one, both of shape (n, windows).

    Args:
        generator: source of random numbers.
        families: names of :data:`FAMILIES`; each lane draws one of them.
        every: shape (n, 1), mean windows from one event to the next; 0 for none.
        lasts: shape (n, 1), windows that an event lasts; limited to ``every`` - 1, but at least 1. An event that begins
            during another one extends it.
        windows: number of windows.
    """
    period, n = np.maximum(every, 1), len(every)
    own = generator.integers(0, len(families), n)
    starts = np.zeros((n, windows), dtype=bool)
    for number, name in enumerate(families):
        drawn = FAMILIES[name](generator, period, windows)
        starts = np.where((own == number)[:, None], drawn, starts)
    starts &= every > 0
    lasts = np.minimum(lasts, np.maximum(every - 1, 1))
    place = np.arange(windows)
    last = np.maximum.accumulate(np.where(starts, place, -windows), axis=1)
    event = place - last < lasts
    before = np.concatenate([np.zeros((n, 1), dtype=bool), event[:, :-1]], axis=1)
    return event, starts & ~before
