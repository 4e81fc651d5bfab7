"""Verdicts on arms against a baseline, from paired runs: speed and quality are judged separately."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from autotune.records.protocol import Arm, Protocol, RunRecord
from autotune.stats import (
    log_ratios,
    mean_interval,
    mean_interval_bca,
    mean_upper_bound,
    ratio_of_log,
    sign_flip_p_value,
)

# Share by which an arm may need fewer samples than the baseline: one that learns more per sample does not do the same
# training. Source: MLPerf Training rules, reference convergence points: a run that converges faster is refused.
_PLAUSIBLE_FRAC = 0.05


def judge(
    arm: Arm,
    runs: Sequence[RunRecord],
    baseline: Sequence[RunRecord],
    protocol: Protocol,
    goal: str,
    *,
    targeted: bool = True,
) -> dict[str, Any]:
    """Return one entry of ``against_baseline``.

    Time is judged by the t-interval of the mean log ratio of paired times. The entry also contains a sign-flip test and
    a BCa bootstrap interval of the same ratios. The final metric is non-inferior if the one-sided upper bound of its
    mean relative loss is at most the margin. An arm with a run that failed or missed the target is "slower".

    Args:
        arm: the arm.
        runs: the runs of the arm, in the order of seeds.
        baseline: the runs of the baseline, in the same order.
        protocol: protocol that was declared before the runs.
        goal: ``min`` or ``max``, the direction in which the job's metric improves.
        targeted: whether the job has a target; without one, the times of whole runs are compared, per sample.
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
    reason = _incomparable(runs, baseline, targeted=targeted)
    if reason is not None:
        return {**entry, "verdict": "not comparable", "reason": reason}
    failures = [record.failure for record in runs if record.failure is not None]
    if failures:
        listed = ", ".join(dict.fromkeys(failures))
        reason = f"{len(failures)} of {len(runs)} runs ended with {listed}"
        reason += ", which counts as missing the target" if targeted else ""
        return {**entry, "non_inferior": False, "verdict": "slower", "reason": reason}
    differences = [_relative_difference(run, other) for run, other in zip(runs, baseline, strict=True)]
    losses = differences if goal == "min" else [-difference for difference in differences]
    entry["metric_difference"] = statistics.fmean(differences)
    entry["non_inferior"] = mean_upper_bound(losses, protocol.confidence) <= protocol.margin
    missed = sum(not record.reached for record in runs)
    if missed:
        reason = f"{missed} of {len(runs)} runs did not reach the target"
        return {**entry, "verdict": "slower", "reason": reason}
    entry |= _time_ratio(runs, baseline, protocol.confidence, per_sample=not targeted)
    entry["break_even_steps"] = _break_even(arm, runs, baseline)
    entry["samples_ratio"], suspicious = _samples_ratio(runs, baseline, protocol.confidence)
    # An arm with its own job, such as another schedule, may learn more per sample.
    if suspicious is not None and arm.job is None:
        return {**entry, "verdict": "not comparable", "reason": suspicious}
    return {**entry, **verdict_of(entry["time_ratio_ci95"], non_inferior=entry["non_inferior"])}


def _time_ratio(
    runs: Sequence[RunRecord], baseline: Sequence[RunRecord], confidence: float, *, per_sample: bool
) -> dict[str, Any]:
    own, other = (
        [_time(record) / (record.samples if per_sample else 1) for record in side] for side in (runs, baseline)
    )
    logs = log_ratios(own, other)
    bounds = mean_interval_bca(logs, confidence)
    return {
        "time_ratio": ratio_of_log(statistics.fmean(logs)),
        "time_ratio_ci95": [ratio_of_log(bound) for bound in mean_interval(logs, confidence)],
        "time_ratio_bca95": None if bounds is None else [ratio_of_log(bound) for bound in bounds],
        "p_value": sign_flip_p_value(logs),
    }


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
    """Return the entries; if the repeated baseline is "faster" or "slower", all are "not comparable".

    Args:
        entries: entries of ``against_baseline``.
        gate: entry of the repeated baseline.
    """
    if gate["verdict"] not in ("faster", "slower"):
        return [dict(entry) for entry in entries]
    ratio = "" if gate["time_ratio"] is None else f" ({gate['time_ratio']:.3f} of its own time)"
    reason = (
        f"the baseline is called {gate['verdict']} than itself{ratio}: differences between arms are within the "
        "machine's noise"
    )
    return _without_verdicts(entries, reason)


def disturbed(entries: Sequence[Mapping[str, Any]], busy: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries as "not comparable", because other programs used the machine.

    Args:
        entries: entries of ``against_baseline``.
        busy: number of disturbed runs, of all runs, and the largest share of waiting.
    """
    reason = (
        f"the machine was busy: {busy['runs']} of {busy['of']} runs waited for a processor for up to "
        f"{busy['waited_frac_max']:.0%} of their time, also where they were repeated"
    )
    return _without_verdicts(entries, reason)


def _without_verdicts(entries: Sequence[Mapping[str, Any]], reason: str) -> list[dict[str, Any]]:
    return [{**entry, "verdict": "not comparable", "reason": reason} for entry in entries]


def _incomparable(runs: Sequence[RunRecord], baseline: Sequence[RunRecord], *, targeted: bool) -> str | None:
    """Return why an arm cannot be compared with the baseline; ``None`` if it can."""
    failed = [record for record in baseline if record.failure is not None and not (targeted and record.reached)]
    if failed:
        detail = f": {failed[0].failure_detail}" if failed[0].failure_detail else ""
        return f"the baseline failed ({failed[0].failure} after {failed[0].steps} steps{detail})"
    if not all(record.reached for record in baseline):
        return "the baseline did not reach its target on every seed"
    if any(record.failure is not None for record in baseline):
        return "the baseline failed after it had reached its target"
    if any(_time(record) == 0 for record in [*baseline, *(run for run in runs if run.reached)]):
        return "the target is met before any training"
    if any(record.final_metric is None for record in [*baseline, *(run for run in runs if run.failure is None)]):
        return "a run has no final metric"
    return None


def _samples_ratio(
    runs: Sequence[RunRecord], baseline: Sequence[RunRecord], confidence: float
) -> tuple[float | None, str | None]:
    """Return the ratio of samples to the target, and a reason to doubt it if it is implausibly small.

    It is implausible if its upper bound is below 1 - ``_PLAUSIBLE_FRAC``, and the arm saves more samples than lie
    between two evaluations.
    """
    own, other = ([samples_to_target(record.curve, _time(record)) for record in side] for side in (runs, baseline))
    if any(count <= 0 for count in (*own, *other)):
        return None, None
    logs = log_ratios(own, other)
    ratio = ratio_of_log(statistics.fmean(logs))
    saved = statistics.fmean(other) - statistics.fmean(own)
    clearly = mean_upper_bound(logs, confidence) < math.log1p(-_PLAUSIBLE_FRAC)
    if not clearly or saved <= max(_stride(record) for record in (*runs, *baseline)):
        return ratio, None
    return ratio, (
        f"it reaches the target after {1 - ratio:.0%} fewer samples than the baseline: it learns a different amount "
        "per sample (a wrongly scaled learning rate?), so its time does not measure its speed"
    )


def samples_to_target(curve: Iterable[Sequence[float]], time_s: float) -> int:
    """Return the number of samples after which a run reached its target; 0 if the curve ends before that time.

    Args:
        curve: seconds, samples and metric of each evaluation.
        time_s: seconds after which the run reached its target.
    """
    return next((int(samples) for seconds, samples, _ in curve if seconds >= time_s), 0)


def _stride(record: RunRecord) -> int:
    """Return the largest number of samples between two evaluations."""
    samples = [count for _, count, _ in record.curve]
    return max((after - before for before, after in itertools.pairwise(samples)), default=0)


def _time(record: RunRecord) -> float:
    assert record.time_to_target_s is not None
    return record.time_to_target_s


def _relative_difference(run: RunRecord, other: RunRecord) -> float:
    """Return the relative difference of a final metric from another; if the other is 0, the sign of the difference."""
    assert run.final_metric is not None
    assert other.final_metric is not None
    difference = run.final_metric - other.final_metric
    return difference / abs(other.final_metric) if other.final_metric else float(np.sign(difference))


def _memory_ratio(runs: Sequence[RunRecord], baseline: Sequence[RunRecord]) -> float | None:
    peaks = [[record.peak_bytes for record in side if record.peak_bytes] for side in (runs, baseline)]
    return max(peaks[0]) / max(peaks[1]) if all(peaks) else None


def _break_even(arm: Arm, runs: Sequence[RunRecord], baseline: Sequence[RunRecord]) -> int | None:
    """Return the number of baseline steps after which the tuning time is recovered; ``None`` if it never is."""
    own = statistics.fmean(_time(record) for record in runs)
    other = statistics.fmean(_time(record) for record in baseline)
    if own >= other:
        return None
    steps = statistics.fmean(record.steps for record in baseline)
    return math.ceil(arm.tuning_s / (1 - own / other) / (other / steps)) if arm.tuning_s else 0
