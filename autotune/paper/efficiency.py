"""Repeat tables I and II: the FP32 baseline at a constant learning rate, the paper's recipe, and a tuned run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autotune.campaign.arms import live_arm
from autotune.cost_model.profile import Profile
from autotune.engines.job_checks import ask, build_model
from autotune.job import Job
from autotune.mechanics.devices import device_kind
from autotune.mechanics.precision import DTYPES
from autotune.mechanics.randomness import isolated, seed_all
from autotune.mechanics.stepping import num_samples
from autotune.mechanics.trees import map_tensors
from autotune.paper.experiments import Experiment
from autotune.paper.paper_numbers import MEMORY, QUALITY, THROUGHPUT, TIME, UTILISATION, Pair
from autotune.paper.rows import Row, over
from autotune.paper.table_comparisons import (
    TF32,
    Campaign,
    Summary,
    baseline_arm,
    fp32_notes,
    paper_arm,
    samples_needed,
    summarised,
    tf32_arms,
)
from autotune.plan import Precision
from autotune.profiling.flops import matmul_peak, step_flops
from autotune.records.protocol import Arm
from autotune.records.run_documents import Rates

# Share of the FP32 baseline's peak that tuned runs are held to: the paper saves a quarter.
MEMORY_SHARE = 0.75
TUNED = "ppo"
_SECONDS = {"min": 60.0, "hr": 3600.0}


def efficiency(
    experiment: Experiment, numbers: Sequence[Pair], campaign: Campaign
) -> tuple[list[Row], list[str], dict[str, Any]]:
    """Return rows, notes and facts of one efficiency table.

    Args:
        experiment: the task.
        numbers: the paper's table.
        campaign: what it is measured with.
    """
    job = experiment.job
    profile = campaign.profile(job)
    budget = campaign.budget(job, MEMORY_SHARE)
    tuned = tuned_arm(experiment, profile, budget)
    arms = [baseline_arm(experiment), *tf32_arms(experiment), paper_arm(experiment), tuned]
    rates = campaign.journal.once({"flops": job.name}, lambda: _rates(job, profile.precisions, device_kind()), Rates)
    document = campaign.race(experiment, arms, budget)
    rows = [row for pair in _with_utilisation(numbers) for row in _rows(pair, experiment, document, rates)]
    held = _held(experiment, document, rates)
    notes = [
        f"{TUNED}: the shipped policy, deciding while the job trains, within {MEMORY_SHARE:.0%} of the baseline's peak "
        "and at its constant learning rate; paper: its recipe, warm-up and cosine decay included",
        *fp32_notes(document),
        *(entry["sentence"] for entry in held),
        _peak_note(rates),
    ]
    return rows, notes, {"comparison": document, "flops": rates, "held": held}


def tuned_arm(experiment: Experiment, profile: Profile, budget_bytes: int) -> Arm:
    """Return the shipped policy, deciding while the job trains at the baseline's rate: it tunes plans, no schedules."""
    return replace(live_arm(TUNED, profile, budget_bytes), job=experiment.constant)


def _with_utilisation(numbers: Sequence[Pair]) -> list[Pair | None]:
    """Return the table's lines; ``None`` for the utilisation where the paper's table has none."""
    return [*numbers, *([] if any(pair.metric == UTILISATION for pair in numbers) else [None])]


def _rates(job: Job, precisions: Sequence[Precision], place: str) -> dict[str, Any]:
    """Count a real step's operations, and measure the device's highest rate of matrix products beside it."""
    with isolated():
        seed_all(0)
        model = build_model(job).to(place).train()
        batch = next(iter(ask(job, "batches", lambda: iter(job.batches(0)))))
    batch = map_tensors(lambda tensor: tensor.to(place), batch)
    per_sample = step_flops(model, job.loss, batch) / num_samples(batch)
    return {
        "per_sample": per_sample,
        "peak_per_s": {str(precision): matmul_peak(DTYPES[precision], place) for precision in precisions},
        "threads": torch.get_num_threads(),
    }


def _rows(
    pair: Pair | None, experiment: Experiment, document: Mapping[str, Any], rates: Mapping[str, Any]
) -> list[Row]:
    metric, unit = (UTILISATION, "%") if pair is None else (pair.metric, pair.unit)
    values, problems = {}, {}
    for arm in document["arms"]:
        summary = summarised(document, arm["name"])
        values[arm["name"]] = _value(metric, unit, summary, experiment, rates)
        problems[arm["name"]] = summary.problem
    shown = {THROUGHPUT: experiment.item_unit, QUALITY: experiment.quality_unit}.get(metric, unit)
    rows = []
    for name, value in values.items():
        first, theirs = name == "baseline", None if name == TF32 else pair
        paper = None if theirs is None else theirs.baseline if first else theirs.optimized
        rows.append(
            Row(
                metric=metric,
                configuration=name,
                unit=shown,
                paper=paper,
                ours=value,
                paper_change=None if first or theirs is None else over(theirs.optimized, theirs.baseline),
                our_change=None if first else over(value, values["baseline"]),
                source="" if theirs is None else theirs.source,
                note=problems[name] if value is None else "",
            )
        )
    return rows


def _value(metric: str, unit: str, summary: Summary, experiment: Experiment, rates: Mapping[str, Any]) -> float | None:
    """Return an arm's number in the paper's unit."""
    if metric == TIME:
        return None if summary.time_s is None else summary.time_s / _SECONDS[unit]
    if metric == MEMORY:
        return None if summary.peak_bytes is None else summary.peak_bytes / 1e9
    if metric == QUALITY:
        return None if summary.metric is None else experiment.quality(summary.metric)
    if summary.throughput is None:
        return None
    if metric == THROUGHPUT:
        return summary.throughput * experiment.items
    peak: float = max(rates["peak_per_s"].values())
    return 100 * summary.throughput * float(rates["per_sample"]) / peak


def _peak_note(rates: Mapping[str, Any]) -> str:
    measured = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in rates["peak_per_s"].items())
    return (
        "FLOPs utilisation: operations of matrix products, convolutions and attention of one real fp32 step (none "
        "counted twice for being recomputed), times samples per second, over the highest rate of a square matrix "
        f"product measured in this run on {rates['threads']} thread(s) ({measured} GFLOP/s), the same for every "
        "arm. In the paper's Table I utilisation rises 1.39 times and throughput 1.27 times: of one model they would "
        "rise alike"
    )


def _held(experiment: Experiment, document: Mapping[str, Any], rates: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return per arm whether it held what was promised, and what its time is made of."""
    baseline = document["arms"][0]["runs"]
    found = []
    for entry, arm in zip(document["against_baseline"], document["arms"][1:], strict=True):
        if entry["arm"] == TF32:
            continue
        ratio = entry["time_ratio"]
        if ratio is None:
            sentence = f"{entry['arm']}: {entry['verdict']}, since {entry['reason']}"
            found.append({"arm": entry["arm"], "time_ratio": None, "holds": False, "sentence": sentence})
            continue
        samples = statistics.geometric_mean(
            [samples_needed(run) / samples_needed(other) for run, other in zip(arm["runs"], baseline, strict=True)]
        )
        holds = ratio <= experiment.at_most and entry["non_inferior"]
        found.append(
            {
                "arm": entry["arm"],
                "time_ratio": ratio,
                "at_most": experiment.at_most,
                "samples_ratio": samples,
                "seconds_per_sample_ratio": ratio / samples,
                "memory_ratio": entry["memory_ratio"],
                "metric_difference": entry["metric_difference"],
                "non_inferior": entry["non_inferior"],
                "holds": holds,
                "sentence": _sentence(experiment, entry, samples, rates, holds=holds),
            }
        )
    return found


def _sentence(
    experiment: Experiment, entry: Mapping[str, Any], samples: float, rates: Mapping[str, Any], *, holds: bool
) -> str:
    ratio, peaks = entry["time_ratio"], rates["peak_per_s"]
    faster = max(peaks.values()) / peaks[str(Precision.FP32)]
    better = (entry["metric_difference"] > 0) == (experiment.job.goal == "max")
    quality = f"final metric {entry['metric_difference']:+.2%} ({'better' if better else 'worse'})"
    if not entry["non_inferior"]:
        quality += ", which these seeds do not show to be within 0.5 %"
    made_of = f"{ratio / samples:.2f} (seconds per sample) x {samples:.2f} (samples to the target)"
    said = (
        f"{entry['arm']}: time to target {ratio:.2f} of the baseline's (aim: at most {experiment.at_most:.2f}) = "
        f"{made_of}, "
        f"{entry['memory_ratio'] or 0:.0%} of its memory, {quality}: {'holds' if holds else 'does not hold'}"
    )
    if ratio <= experiment.at_most:
        return said
    return f"{said}; bounded by this device, whose 16-bit matrix products are {faster:.1f} times as fast as fp32 ones"
