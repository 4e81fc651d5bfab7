"""Fit the cost model's constants to published runs, from their priors.

Constants of time and of memory are fitted apart, since no run's peak says anything about speed. Each constant pays for
leaving its prior in proportion to its spread, so a constant that the rows say nothing about stays where it was.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autotune.bench.published_rows import PublishedRow
from autotune.cost_model.cluster.constants import Constants, from_values, meanings
from autotune.cost_model.cluster.memory import predict_memory
from autotune.cost_model.cluster.step_time import predict_seconds

# The constants that memory depends on; all others are of time.
_OF_MEMORY = frozenset({"context_bytes", "logit_bytes", "working", "fragmentation"})
# Relative errors of published runs that the model cannot explain: of times and of peaks.
_TIME_NOISE, _PEAK_NOISE = 0.10, 0.05
_MOST_EVALUATIONS = 25


def predicted_peak(row: PublishedRow, constants: Constants) -> float:
    """Return the predicted peak in bytes, as the row's source counts it.

    Args:
        row: the published run.
        constants: the model's constants.
    """
    parts = predict_memory(row.model, row.layout, constants)
    return parts.reserved if row.peak_is_reserved else parts.total


def predicted_seconds(row: PublishedRow, constants: Constants) -> float:
    """Return the predicted seconds of a step; arguments as for :func:`predicted_peak`."""
    return predict_seconds(row.model, row.layout, row.machine, constants).total


def fit_constants(rows: Sequence[PublishedRow]) -> Constants:
    """Return the constants that explain published runs best, given their priors.

    Args:
        rows: the runs; without any, the constants are the priors.
    """
    free = [name for name, one in meanings().items() if one.spread]
    with_peaks = [row for row in rows if row.peak_bytes is not None]
    values = _fit(rows, [name for name in free if name not in _OF_MEMORY], _time_error)
    values |= _fit(with_peaks, [name for name in free if name in _OF_MEMORY], _peak_error)
    return from_values(values)


_Error = Callable[[PublishedRow, Constants], float]


def _time_error(row: PublishedRow, constants: Constants) -> float:
    return math.log(predicted_seconds(row, constants) / row.seconds) / _TIME_NOISE


def _peak_error(row: PublishedRow, constants: Constants) -> float:
    assert row.peak_bytes is not None
    return math.log(predicted_peak(row, constants) / row.peak_bytes) / _PEAK_NOISE


def _fit(rows: Sequence[PublishedRow], names: Sequence[str], error: _Error) -> dict[str, float]:
    """Return the values of some constants that minimise the rows' errors and the distances from the priors."""
    known = meanings()
    start = np.log([known[name].prior for name in names])
    if not rows:
        return {name: known[name].prior for name in names}
    spreads = np.array([known[name].spread for name in names])
    weights = _weights(rows)

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        constants = from_values(dict(zip(names, np.exp(logs), strict=True)))
        errors = np.array([error(row, constants) for row in rows])
        # Large errors count linearly instead of squared: some published runs were disturbed.
        flat = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([weights * flat, (logs - start) / spreads])

    found = least_squares(residuals, start, diff_step=1e-3, max_nfev=_MOST_EVALUATIONS)
    return {name: float(value) for name, value in zip(names, np.exp(found.x), strict=True)}


def _weights(rows: Sequence[PublishedRow]) -> NDArray[np.float64]:
    """Return the weight of each row: a source of many rows counts more than one of few, but less than in proportion."""
    counts = Counter(row.kind for row in rows)
    return np.array([2 * counts[row.kind] ** -0.25 for row in rows])
