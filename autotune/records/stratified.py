"""Combined result of comparisons on several jobs: one time ratio, in which each job has the same weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.records.verdicts import verdict_of
from autotune.stats import log_ratios, ratio_of_log, stratified_mean_interval


def together(documents: Sequence[Mapping[str, Any]], confidence: float = 0.95) -> list[dict[str, Any]]:
    """Return one entry for each arm that was compared on every job.

    Args:
        documents: ``comparison.json`` of each job.
        confidence: confidence level of the intervals.
    """
    judged = [{entry["arm"]: entry for entry in document["against_baseline"]} for document in documents]
    arms = [name for name in judged[0] if all(name in one for one in judged)]
    return [_entry(name, documents, [one[name] for one in judged], confidence) for name in arms]


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
    mean, low, high = stratified_mean_interval([_logs(document, arm) for document in documents], confidence)
    found |= {"time_ratio": ratio_of_log(mean), "time_ratio_ci95": [ratio_of_log(low), ratio_of_log(high)]}
    return {**found, **verdict_of(found["time_ratio_ci95"], non_inferior=found["non_inferior"])}


def _logs(document: Mapping[str, Any], arm: str) -> list[float]:
    """Return the log of the time ratio of each pair of runs; all runs reached the target."""
    times = {one["name"]: {run["seed"]: run["time_to_target_s"] for run in one["runs"]} for one in document["arms"]}
    own, baseline = times[arm], times[document["baseline"]]
    return log_ratios([own[seed] for seed in document["seeds"]], [baseline[seed] for seed in document["seeds"]])
