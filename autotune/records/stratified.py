"""Put the comparisons of several jobs together: one ratio for all of them, each job counting alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scipy import stats

from autotune.records.verdicts import log_ratios, ratio_of, verdict_of


def together(documents: Sequence[Mapping[str, Any]], confidence: float = 0.95) -> list[dict[str, Any]]:
    """Return one entry for each arm that was compared on every job.

    Args:
        documents: ``comparison.json`` of each job.
        confidence: of the intervals.
    """
    judged = [{entry["arm"]: entry for entry in document["against_baseline"]} for document in documents]
    arms = [name for name in judged[0] if all(name in one for one in judged)]
    return [_entry(name, documents, [one[name] for one in judged], confidence) for name in arms]


def stratified_interval(strata: Sequence[Sequence[float]], confidence: float) -> tuple[float, float, float]:
    """Return the mean of several means, and the ends of its interval; a point where nothing varies.

    Args:
        strata: at least two numbers of each.
        confidence: two-sided.

    Source: F. E. Satterthwaite, Biometrics Bulletin 2 (1946) 110, for the degrees of freedom.
    """
    mean = statistics.fmean(statistics.fmean(values) for values in strata)
    parts = [statistics.variance(values) / len(values) / len(strata) ** 2 for values in strata]
    variance = sum(parts)
    if variance == 0:
        return mean, mean, mean
    # Of shares, since the square of a tiny variance is 0.
    shares = [part / variance for part in parts]
    freedom = 1 / sum(share**2 / (len(values) - 1) for share, values in zip(shares, strata, strict=True))
    reach = float(stats.t.ppf(0.5 + confidence / 2, freedom)) * math.sqrt(variance)
    return mean, mean - reach, mean + reach


def _entry(
    arm: str, documents: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]], confidence: float
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "arm": arm,
        "jobs": len(documents),
        "time_ratio": None,
        "time_ratio_ci95": None,
        "non_inferior": all(entry["non_inferior"] for entry in entries),
    }
    for verdict in ("not comparable", "slower"):
        for document, entry in zip(documents, entries, strict=True):
            if entry["verdict"] == verdict and (verdict == "not comparable" or entry["time_ratio"] is None):
                return {**found, "verdict": verdict, "reason": f"{document['job']}: {entry['reason']}"}
    mean, low, high = stratified_interval([_logs(document, arm) for document in documents], confidence)
    found |= {"time_ratio": ratio_of(mean), "time_ratio_ci95": [ratio_of(low), ratio_of(high)]}
    return {**found, **verdict_of(found["time_ratio_ci95"], non_inferior=found["non_inferior"])}


def _logs(document: Mapping[str, Any], arm: str) -> list[float]:
    """Return the logarithm of the ratio of times of each pair; all of them reached the target."""
    times = {one["name"]: {run["seed"]: run["time_to_target_s"] for run in one["runs"]} for one in document["arms"]}
    own, baseline = times[arm], times[document["baseline"]]
    return log_ratios([own[seed] for seed in document["seeds"]], [baseline[seed] for seed in document["seeds"]])
