"""Statistics of measured values: paired ratios, intervals of means and medians, and tests.

Every function is deterministic: resampling uses a fixed seed. Intervals are two-sided, given as lower and upper end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from autotune.io.documents import LEAST_RATIO

Interval = tuple[float, float]

# Resamples of medians, and of means and sums.
_RESAMPLED_MEDIANS, _RESAMPLES = 5000, 2000


def log_ratios(own: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the logarithm of each pair's ratio; all values are above 0."""
    return [math.log(first / second) for first, second in zip(own, others, strict=True)]


def ratio_of_log(log: float) -> float:
    """Return the ratio for a logarithm, limited to the range of documents; an interval from two pairs can exceed it."""
    return min(max(math.exp(min(log, 700.0)), LEAST_RATIO), 1 / LEAST_RATIO)


def paired_ratio(own: Sequence[float], others: Sequence[float], *, starts: int = 1) -> dict[str, Any]:
    """Return ratios of one side's times to the other side's, pair by pair.

    Args:
        own: seconds of one side.
        others: seconds of the other side.
        starts: number of process starts that the pairs come from; see :func:`median_interval`.

    Returns:
        ``ratio_median``, ``ratio_ci95`` (interval of that median) and ``ratio_total`` (ratio of the sums).
    """
    ratios = [first / second for first, second in zip(own, others, strict=True)]
    return {
        "ratio_median": statistics.median(ratios),
        "ratio_ci95": list(median_interval(ratios, starts=starts)),
        "ratio_total": sum(own) / sum(others),
    }


def mean_with_interval(values: Sequence[float]) -> dict[str, Any]:
    """Return ``mean``, ``ci95`` (Student's t-interval; a point for a single value) and ``values``."""
    low, high = mean_interval(values) if len(values) > 1 else (values[0], values[0])
    return {"mean": statistics.fmean(values), "ci95": [low, high], "values": list(values)}


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return Student's t-interval of a mean; a point if all values are equal.

    Args:
        values: at least two values.
        confidence: confidence level.

    Source: Student, Biometrika 6 (1908) 1.
    """
    mean, error = statistics.fmean(values), stats.sem(values)
    if error == 0:
        return mean, mean
    low, high = stats.t.interval(confidence, len(values) - 1, loc=mean, scale=error)
    return float(low), float(high)


def mean_upper_bound(values: Sequence[float], confidence: float) -> float:
    """Return the one-sided upper confidence bound of a mean by Student's t-distribution.

    Args:
        values: at least two values.
        confidence: confidence level.

    Source: Student, Biometrika 6 (1908) 1.
    """
    mean, error = statistics.fmean(values), float(stats.sem(values))
    return mean + float(stats.t.ppf(confidence, len(values) - 1)) * error


def mean_interval_bca(values: Sequence[float], confidence: float) -> Interval | None:
    """Return the BCa bootstrap interval of a mean from 9,999 resamples; it assumes no distribution.

    Args:
        values: the values.
        confidence: confidence level.

    Returns:
        The interval; ``None`` for fewer than three values, if all values are equal, or if an end is not finite.

    Source: B. Efron, Journal of the American Statistical Association 82 (1987) 171.
    """
    if len(values) < 3 or len(set(values)) < 2:
        return None
    generator = np.random.default_rng(0)
    found = stats.bootstrap((np.asarray(values),), np.mean, confidence_level=confidence, method="BCa", rng=generator)
    low, high = map(float, found.confidence_interval)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def stratified_mean_interval(strata: Sequence[Sequence[float]], confidence: float) -> tuple[float, float, float]:
    """Return the mean of the strata's means, and its Welch-Satterthwaite t-interval; a point if nothing varies.

    Args:
        strata: at least two values of each stratum; all strata have the same weight.
        confidence: confidence level.

    Returns:
        The mean, and the lower and upper end of its interval.

    Source: F. E. Satterthwaite, Biometrics Bulletin 2 (1946) 110, for the degrees of freedom.
    """
    mean = statistics.fmean(statistics.fmean(values) for values in strata)
    parts = [statistics.variance(values) / len(values) / len(strata) ** 2 for values in strata]
    variance = sum(parts)
    if variance == 0:
        return mean, mean, mean
    # Shares are squared instead of variances, because the square of a tiny variance underflows to 0.
    shares = [part / variance for part in parts]
    freedom = 1 / sum(share**2 / (len(values) - 1) for share, values in zip(shares, strata, strict=True))
    reach = float(stats.t.ppf(0.5 + confidence / 2, freedom)) * math.sqrt(variance)
    return mean, mean - reach, mean + reach


def clustered_mean_interval(
    values: NDArray[np.float64], clusters: NDArray[Any], *, resamples: int = _RESAMPLES, confidence: float = 0.95
) -> Interval:
    """Return the percentile-bootstrap interval of a mean; rows and clusters of columns are both resampled.

    Args:
        values: shape (rows, columns), such as training seeds and simulated runs.
        clusters: shape (columns,), the cluster of each column, such as its job: a cluster is resampled as a whole.
        resamples: number of resamples.
        confidence: confidence level.

    Source: A. C. Davison, D. V. Hinkley, "Bootstrap Methods and Their Application" (1997), section 3.8.
    """
    generator = np.random.default_rng(0)
    names, place = np.unique(clusters, return_inverse=True)
    count = np.bincount(place)
    sums = np.stack([np.bincount(place, row) for row in values])
    means = []
    for _ in range(resamples):
        drawn = generator.integers(0, len(names), len(names))
        rows = generator.integers(0, len(values), len(values))
        means.append(sums[np.ix_(rows, drawn)].sum() / (count[drawn].sum() * len(rows)))
    return _percentiles(means, confidence)


def median_interval(values: Sequence[float], *, starts: int = 1) -> Interval:
    """Return the 95 % percentile-bootstrap interval of a median.

    Args:
        values: the same number of values from each start, one start after another.
        starts: number of process starts that the values come from; starts are resampled as well, because the values
            of one start share part of the variation.

    Source: A. C. Davison, D. V. Hinkley, "Bootstrap Methods and Their Application" (1997), sections 3.8 and 5.3.
    """
    array = np.asarray(values).reshape(starts, -1)
    generator = np.random.default_rng(0)
    rows = generator.integers(starts, size=(_RESAMPLED_MEDIANS, starts, 1))
    columns = generator.integers(array.shape[1], size=(_RESAMPLED_MEDIANS, starts, array.shape[1]))
    return _percentiles(np.median(array[rows, columns].reshape(_RESAMPLED_MEDIANS, -1), axis=1))


def censored_median(values: Sequence[float | None]) -> float | None:
    """Return the median of values, some of which are known only to be larger than all others.

    Args:
        values: the values; ``None`` for one that is larger than all others.

    Returns:
        The median; ``None`` if it is one of the unknown values.
    """
    found = statistics.median([math.inf if value is None else value for value in values])
    return found if math.isfinite(found) else None


def total_ratio_interval(own: ArrayLike, others: ArrayLike) -> Interval:
    """Return the 95 % percentile-bootstrap interval of the ratio of two sums; pairs are resampled.

    Args:
        own: values of one side.
        others: values of the other side.

    Source: A. C. Davison, D. V. Hinkley, "Bootstrap Methods and Their Application" (1997), section 5.3.
    """
    first, second = np.asarray(own), np.asarray(others)
    rows = np.random.default_rng(0).integers(len(first), size=(_RESAMPLES, len(first)))
    return _percentiles(first[rows].sum(axis=1) / second[rows].sum(axis=1))


def _percentiles(resampled: ArrayLike, confidence: float = 0.95) -> Interval:
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.asarray(resampled), (tail, 1 - tail))
    return float(low), float(high)


def sign_flip_p_value(values: Sequence[float]) -> float:
    """Return the two-sided p-value of the sign-flip permutation test that a mean is 0.

    For up to 14 values, all sign flips are counted. For more, 20,000 random flips and the observed values are counted,
    so that the result is never 0.

    Source: R. A. Fisher, "The Design of Experiments" (1935), section 21; B. Phipson, G. K. Smyth, Statistical
    Applications in Genetics and Molecular Biology 9 (2010) 39, for random flips.
    """
    test = stats.permutation_test(
        (np.asarray(values),), np.mean, permutation_type="samples", n_resamples=20_000, rng=np.random.default_rng(0)
    )
    return float(test.pvalue)


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Return Spearman's rank correlation of two sequences, from -1 to 1.

    Source: C. Spearman, American Journal of Psychology 15 (1904) 72.
    """
    return float(stats.spearmanr(first, second).statistic)
