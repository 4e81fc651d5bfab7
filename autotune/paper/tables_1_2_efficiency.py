"""Tables I and II, reproduced: the FP32 baseline at a constant learning rate, the paper's recipe, and a tuned run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autotune.campaign.arms import live_arm
from autotune.cost_model.profile import Profile
from autotune.engines.job_checks import ask, build_model
from autotune.job import Job
from autotune.mechanics.cutting import num_samples
from autotune.mechanics.devices import device_kind
from autotune.mechanics.flops import matmul_peak, step_flops
from autotune.mechanics.precision import DTYPES
from autotune.mechanics.randomness import isolated, seed_all
from autotune.mechanics.trees import map_tensors
from autotune.paper.experiments import Experiment
from autotune.paper.paper_numbers import QUALITY, THROUGHPUT, UTILISATION, PaperRow
from autotune.paper.rows import Table, TableRow
from autotune.paper.table_comparisons import (
    TF32,
    ArmSummary,
    Campaign,
    fp32_notes,
    number_of,
    rule_arm,
    samples_needed,
    summarised,
    tf32_arms,
)
from autotune.plan import Precision
from autotune.records.protocol import Arm
from autotune.records.run_documents import Rates

# Memory budget of tuned runs as a share of the FP32 baseline's peak; the paper saves a quarter.
MEMORY_SHARE = 0.75
TUNED = "ppo"


def efficiency(experiment: Experiment, printed: Sequence[PaperRow], campaign: Campaign) -> Table:
    """Measure one efficiency table.

    Args:
        experiment: the task.
        printed: the paper's table.
        campaign: the measurement setup.
    """
    job = experiment.job
    profile = campaign.profile(job)
    budget = campaign.budget(job, MEMORY_SHARE)
    # The baseline has a constant learning rate, and the paper's recipe a schedule.
    arms = [rule_arm("baseline", experiment.constant), *tf32_arms(experiment), rule_arm("paper", job)]
    arms.append(tuned_arm(experiment, profile, budget))
    rates = campaign.journal.once({"flops": job.name}, lambda: _rates(job, profile.precisions, device_kind()), Rates)
    document = campaign.race(experiment, arms, budget)
    # Every table has a row for utilisation, even if the paper's has none.
    lines = [*printed, *([] if any(line.metric == UTILISATION for line in printed) else [None])]
    rows = [row for line in lines for row in _rows(line, experiment, document, rates)]
    held = _held(experiment, document, rates)
    notes = [
        f"{TUNED}: the shipped policy, deciding while the job trains, within {MEMORY_SHARE:.0%} of the baseline's peak "
        "and at its constant learning rate; paper: its recipe, warm-up and cosine decay included",
        *fp32_notes(document),
        *(entry["sentence"] for entry in held),
        _peak_note(rates),
    ]
    return Table(rows=rows, notes=notes, facts={"comparison": document, "flops": rates, "held": held})


def tuned_arm(experiment: Experiment, profile: Profile, budget_bytes: int) -> Arm:
    """Return the arm of the shipped policy, at the baseline's constant learning rate."""
    return replace(live_arm(TUNED, profile, budget_bytes), job=experiment.constant)


def _rates(job: Job, precisions: Sequence[Precision], place: str) -> dict[str, Any]:
    """Return the operations of a real step per sample, and the device's measured peak rates of matrix products."""
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
    line: PaperRow | None, experiment: Experiment, document: Mapping[str, Any], rates: Mapping[str, Any]
) -> Iterator[TableRow]:
    metric, unit = (UTILISATION, "%") if line is None else (line.metric, line.unit)
    shown = {THROUGHPUT: experiment.item_unit, QUALITY: experiment.quality_unit}.get(metric, unit)
    base: float | None = None
    for number, arm in enumerate(document["arms"]):
        summary = summarised(document, arm["name"])
        value = _value(metric, unit, summary, experiment, rates)
        printed = None if arm["name"] == TF32 else line
        yield TableRow(
            metric,
            arm["name"],
            shown,
            value,
            base=base,
            paper=None if printed is None else printed.optimized if number else printed.baseline,
            paper_base=printed.baseline if number and printed is not None else None,
            source="" if printed is None else printed.source,
            problem=summary.problem,
        )
        if number == 0:
            base = value


def _value(
    metric: str, unit: str, summary: ArmSummary, experiment: Experiment, rates: Mapping[str, Any]
) -> float | None:
    """Return an arm's number in the paper's unit."""
    if metric != UTILISATION:
        return number_of(summary, metric, unit, experiment)
    peak: float = max(rates["peak_per_s"].values())
    return None if summary.throughput is None else 100 * summary.throughput * float(rates["per_sample"]) / peak


def _peak_note(rates: Mapping[str, Any]) -> str:
    measured = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in rates["peak_per_s"].items())
    return (
        "FLOPs utilisation: operations of matrix products, convolutions and attention of one real fp32 step (none "
        "counted twice for being recomputed), times samples per second, over the highest rate of a square matrix "
        f"product measured in this run on {rates['threads']} thread(s) ({measured} GFLOP/s), the same for every "
        "arm. In the paper's Table I utilisation rises 1.39 times and throughput 1.27 times: of one model they would "
        "rise equally"
    )


def _held(experiment: Experiment, document: Mapping[str, Any], rates: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, for each arm, whether it met the goal, and the factors of its time to target."""
    baseline = document["arms"][0]["runs"]
    return [
        _held_by(experiment, entry, arm["runs"], baseline, rates)
        for entry, arm in zip(document["against_baseline"], document["arms"][1:], strict=True)
        if entry["arm"] != TF32
    ]


def _held_by(
    experiment: Experiment,
    entry: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    baseline: Sequence[Mapping[str, Any]],
    rates: Mapping[str, Any],
) -> dict[str, Any]:
    ratio = entry["time_ratio"]
    if ratio is None:
        sentence = f"{entry['arm']}: {entry['verdict']}, since {entry['reason']}"
        return {"arm": entry["arm"], "time_ratio": None, "holds": False, "sentence": sentence}
    samples = statistics.geometric_mean(
        samples_needed(run) / samples_needed(other) for run, other in zip(runs, baseline, strict=True)
    )
    holds = ratio <= experiment.at_most and entry["non_inferior"]
    return {
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


def _sentence(
    experiment: Experiment, entry: Mapping[str, Any], samples: float, rates: Mapping[str, Any], *, holds: bool
) -> str:
    ratio, peaks = entry["time_ratio"], rates["peak_per_s"]
    faster = max(peaks.values()) / peaks[str(Precision.FP32)]
    better = (entry["metric_difference"] > 0) == (experiment.job.goal == "max")
    quality = f"final metric {entry['metric_difference']:+z.2%} ({'better' if better else 'worse'})"
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
