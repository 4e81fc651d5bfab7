"""Judge arms against a baseline from paired runs: speed and quality as two tests, and what must not be compared.

This file only counts; what was run is handed over.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from autotune.io.documents import LEAST_RATIO
from autotune.records.protocol import Arm, Protocol, RunRecord

# How much fewer samples than the baseline an arm may need: who learns more per sample trains something else. Source:
# MLPerf Training rules, reference convergence points: a run that converges faster than the reference is refused.
_PLAUSIBLE_FRAC = 0.05


def judge(
    arm: Arm, runs: Sequence[RunRecord], baseline: Sequence[RunRecord], protocol: Protocol, goal: str
) -> dict[str, Any]:
    """Return one entry of ``against_baseline``.

    Time: mean log ratio of paired times, with a t-interval, an exact sign-flip test and, to be read beside them, a
    BCa bootstrap interval, which assumes no distribution; the t-interval decides. Quality: the final metric is
    non-inferior if the one-sided bound of the mean relative loss stays below the margin. A run that failed, or did not
    reach the target, stays in as the worst outcome.
    """
    entry: dict[str, Any] = {
        "arm": arm.name,
        "time_ratio": None,
        "time_ratio_ci95": None,
        "time_ratio_bca95": None,
        "p_value": None,
        "samples_ratio": None,
        "memory_ratio": _memory_ratio(runs, baseline),
        "metric_difference": None,
        "non_inferior": None,
        "break_even_steps": None,
    }
    reason = _incomparable(runs, baseline)
    if reason is not None:
        return {**entry, "verdict": "not comparable", "reason": reason}
    failures = [record.failure for record in runs if record.failure is not None]
    if failures:
        entry["non_inferior"] = False
        listed = ", ".join(dict.fromkeys(failures))
        reason = f"{len(failures)} of {len(runs)} runs ended with {listed}, which counts as never arriving"
        return {**entry, "verdict": "slower", "reason": reason}
    worse = _relative_losses(runs, baseline, goal)
    entry["metric_difference"] = _metric_difference(runs, baseline)
    entry["non_inferior"] = upper_bound(worse, protocol.confidence) <= protocol.margin
    missed = sum(not record.reached for record in runs)
    if missed:
        reason = f"{missed} of {len(runs)} runs did not reach the target"
        return {**entry, "verdict": "slower", "reason": reason}
    logs = log_ratios([_time(record) for record in runs], [_time(record) for record in baseline])
    low, high = interval(logs, protocol.confidence)
    entry["time_ratio"] = ratio_of(statistics.fmean(logs))
    entry["time_ratio_ci95"] = [ratio_of(low), ratio_of(high)]
    bounds = bootstrap_interval(logs, protocol.confidence)
    entry["time_ratio_bca95"] = None if bounds is None else [ratio_of(bound) for bound in bounds]
    entry["p_value"] = sign_flip(logs)
    entry["break_even_steps"] = _break_even(arm, runs, baseline)
    entry["samples_ratio"], suspicious = _learnt(runs, baseline, protocol.confidence)
    # An arm with a schedule of its own may learn more per sample.
    if suspicious is not None and arm.job is None:
        return {**entry, "verdict": "not comparable", "reason": suspicious}
    return {**entry, **verdict_of(entry["time_ratio_ci95"], non_inferior=entry["non_inferior"])}


def verdict_of(time_ratio_ci: Sequence[float], *, non_inferior: bool) -> dict[str, str]:
    """Return the verdict and its reason, from the interval of the time ratio and from quality."""
    low, high = time_ratio_ci
    if low > 1:
        return {"verdict": "slower", "reason": "the whole interval of the time ratio is above 1"}
    if high >= 1:
        return {"verdict": "no difference shown", "reason": "the interval of the time ratio contains 1"}
    if not non_inferior:
        return {
            "verdict": "no difference shown",
            "reason": "its time is shorter, but its final metric was not shown to be within the margin",
        }
    return {"verdict": "faster", "reason": "shorter time, and a final metric within the margin"}


def gated(entries: Sequence[Mapping[str, Any]], gate: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries as they stand beside the baseline's comparison with itself.

    Args:
        entries: of ``against_baseline``.
        gate: the same of the baseline, run a second time; called faster or slower, it takes every verdict away.
    """
    if gate["verdict"] not in ("faster", "slower"):
        return [dict(entry) for entry in entries]
    ratio = "" if gate["time_ratio"] is None else f" ({gate['time_ratio']:.3f} of its own time)"
    reason = f"the baseline is called {gate['verdict']} than itself{ratio}: the machine decides here, not the arm"
    return [{**entry, "verdict": "not comparable", "reason": reason} for entry in entries]


def ratio_of(log: float) -> float:
    """Return the ratio of a logarithm, as far as it says anything: two pairs that differ have an endless interval."""
    return min(max(math.exp(min(log, 700.0)), LEAST_RATIO), 1 / LEAST_RATIO)


def log_ratios(own: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the logarithm of each pair's ratio, of numbers above 0."""
    return [math.log(first / second) for first, second in zip(own, others, strict=True)]


def _incomparable(runs: Sequence[RunRecord], baseline: Sequence[RunRecord]) -> str | None:
    """Return why nothing can be said of an arm, whatever it did; ``None`` if something can."""
    if not all(record.reached for record in baseline):
        return "the baseline did not reach its target on every seed"
    if any(record.failure is not None for record in baseline):
        return "the baseline failed after it had reached its target"
    if any(_time(record) == 0 for record in [*baseline, *(run for run in runs if run.reached)]):
        return "the target is met before any training"
    if any(record.final_metric is None for record in [*baseline, *(run for run in runs if run.failure is None)]):
        return "a run has no final metric"
    return None


def _learnt(
    runs: Sequence[RunRecord], baseline: Sequence[RunRecord], confidence: float
) -> tuple[float | None, str | None]:
    """Return the ratio of samples to the target, and what is wrong if it is implausibly small.

    It is, if it is clearly below 1, and by more than the evaluations are apart.
    """
    own, other = ([samples_to_target(record.curve, _time(record)) for record in side] for side in (runs, baseline))
    if any(count <= 0 for count in (*own, *other)):
        return None, None
    logs = log_ratios(own, other)
    ratio = ratio_of(statistics.fmean(logs))
    gained = statistics.fmean(other) - statistics.fmean(own)
    clearly = upper_bound(logs, confidence) < math.log1p(-_PLAUSIBLE_FRAC)
    if not clearly or gained <= max(_stride(record) for record in (*runs, *baseline)):
        return ratio, None
    return ratio, (
        f"it arrives after {1 - ratio:.0%} fewer samples than the baseline: it learns something else per sample (a "
        "learning rate that is scaled wrongly?), so that its time says nothing of its speed"
    )


def samples_to_target(curve: Iterable[Sequence[float]], time_s: float) -> int:
    """Return the samples after which a run reached its target; 0 where that was not kept.

    Args:
        curve: seconds, samples and metric of each evaluation.
        time_s: the seconds after which it did.
    """
    return next((int(samples) for seconds, samples, _ in curve if seconds >= time_s), 0)


def _stride(record: RunRecord) -> int:
    samples = [count for _, count, _ in record.curve]
    return max((after - before for before, after in itertools.pairwise(samples)), default=0)


def interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the t-interval of a mean; a point where the values do not differ.

    Args:
        values: at least two numbers.
        confidence: two-sided.
    """
    mean, error = statistics.fmean(values), stats.sem(values)
    if error == 0:
        return mean, mean
    low, high = stats.t.interval(confidence, len(values) - 1, loc=mean, scale=error)
    return float(low), float(high)


def bootstrap_interval(values: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Return the BCa interval of a mean from 9,999 seeded resamples; ``None`` of fewer than three, or of equal values.

    Args:
        values: the numbers.
        confidence: two-sided.

    Source: B. Efron, Journal of the American Statistical Association 82 (1987) 171, as scipy computes it.
    """
    if len(values) < 3 or len(set(values)) < 2:
        return None
    generator = np.random.default_rng(0)
    found = stats.bootstrap((np.asarray(values),), np.mean, confidence_level=confidence, method="BCa", rng=generator)
    low, high = map(float, found.confidence_interval)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def upper_bound(values: Sequence[float], confidence: float) -> float:
    """Return the one-sided upper confidence bound of a mean."""
    mean, error = statistics.fmean(values), float(stats.sem(values))
    return mean + float(stats.t.ppf(confidence, len(values) - 1)) * error


def sign_flip(values: Sequence[float], largest_exact: int = 12) -> float:
    """Return the two-sided p-value of the sign-flip test that a mean is 0.

    Exact up to ``largest_exact`` values, by 20,000 seeded random flips above.
    """
    array = np.asarray(values)
    observed = abs(array.mean())
    if len(array) <= largest_exact:
        signs = np.array(list(itertools.product((-1, 1), repeat=len(array))))
    else:
        signs = np.random.default_rng(0).choice((-1, 1), size=(20_000, len(array)))
    return float((np.abs((signs * array).mean(axis=1)) >= observed * (1 - 1e-12)).mean())


def _time(record: RunRecord) -> float:
    assert record.time_to_target_s is not None
    return record.time_to_target_s


def _relative_difference(run: RunRecord, other: RunRecord) -> float:
    """Return the difference of two final metrics, as a share of the second; of 0, anything else is all of it away."""
    assert run.final_metric is not None
    assert other.final_metric is not None
    difference = run.final_metric - other.final_metric
    return difference / abs(other.final_metric) if other.final_metric else float(np.sign(difference))


def _relative_losses(runs: Sequence[RunRecord], baseline: Sequence[RunRecord], goal: str) -> list[float]:
    """Return by what share each final metric is worse than its pair's; below 0 is better."""
    sign = 1 if goal == "min" else -1
    return [sign * _relative_difference(run, other) for run, other in zip(runs, baseline, strict=True)]


def _metric_difference(runs: Sequence[RunRecord], baseline: Sequence[RunRecord]) -> float:
    return statistics.fmean(_relative_difference(run, other) for run, other in zip(runs, baseline, strict=True))


def _memory_ratio(runs: Sequence[RunRecord], baseline: Sequence[RunRecord]) -> float | None:
    peaks = [[record.peak_bytes for record in side if record.peak_bytes] for side in (runs, baseline)]
    return max(peaks[0]) / max(peaks[1]) if all(peaks) else None


def _break_even(arm: Arm, runs: Sequence[RunRecord], baseline: Sequence[RunRecord]) -> int | None:
    """Return the baseline's steps after which the tuning time is won back; ``None`` if it never is."""
    own = statistics.fmean(_time(record) for record in runs)
    other = statistics.fmean(_time(record) for record in baseline)
    if own >= other:
        return None
    steps = statistics.fmean(record.steps for record in baseline)
    return math.ceil(arm.tuning_s / (1 - own / other) / (other / steps)) if arm.tuning_s else 0
