"""Repeat the error analysis: where gains come from, by phase, operation and architecture, and what follows."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.cost_model.profile import Profile
from autotune.cost_model.time_model import seconds_by_operation, seconds_per_step
from autotune.paper import paper_numbers as paper
from autotune.paper.ablation import (
    ACCUMULATION,
    BASELINE,
    CHECKPOINTS,
    PRECISION,
    SCHEDULE,
    ablation,
    component_plans,
)
from autotune.paper.experiments import TRANSFORMER, Experiment
from autotune.paper.rows import Row
from autotune.paper.scaling import measure
from autotune.paper.speedup_equations import NOTES, outlook
from autotune.paper.table_comparisons import Campaign, Summary, summarised

# Ranks whose communication is set beside the operations of one process.
_RANKS = 2


def error_analysis(
    experiments: Sequence[Experiment], campaign: Campaign
) -> tuple[list[Row], list[str], dict[str, Any]]:
    """Return rows, notes and facts of the analysis of both tasks.

    Args:
        experiments: the tasks.
        campaign: what they are measured with.
    """
    rows: list[Row] = []
    facts: dict[str, Any] = {}
    for experiment in experiments:
        profile = campaign.profile(experiment.job)
        document = ablation(experiment, campaign)[2]["comparison"]
        ranks = measure(experiment, campaign, (_RANKS,))
        found = _found(document, profile, ranks)
        rows += [*_impact(experiment, found), *_architecture(experiment, document)]
        rows += outlook(experiment, document, found["recomputation_overhead"])
        facts[experiment.architecture] = {"job": experiment.reference, "comparison": document, **found}
    runs = sum(len(arm["runs"]) for fact in facts.values() for arm in fact["comparison"]["arms"])
    return rows, [*_notes(runs), *NOTES], facts


def _found(document: Mapping[str, Any], profile: Profile, ranks: Mapping[str, Any]) -> dict[str, Any]:
    plans = component_plans(profile.space)
    before, after = (seconds_by_operation(profile, plans[name]) for name in (BASELINE, CHECKPOINTS))
    # Per sample: under adaptive batching a step of a larger k is a larger step.
    scale = 1 if profile.space.k_splits else plans[CHECKPOINTS].accumulation_steps
    before["communication"] = ranks[f"baseline-{_RANKS}"]["communication_s"]
    after["communication"] = ranks[f"paper-{_RANKS}"]["communication_s"]
    after = {name: seconds / scale for name, seconds in after.items()}
    whole = seconds_per_step(profile, plans[SCHEDULE])
    shares = {name: 100 * ranks[name]["communication_s"] / ranks[name]["step_s"] for name in ranks}
    return {
        "early_share": early_share(document, CHECKPOINTS),
        "seconds_by_operation": {"baseline": before, "paper": after},
        "gain_by_operation": gain_shares(before, after),
        "communication_percent": shares,
        "recomputation_overhead": seconds_per_step(profile, plans[CHECKPOINTS]) / whole - 1,
    }


def gain_shares(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float] | None:
    """Return each operation's share of the seconds saved; ``None`` if none are saved. A negative one costs time.

    Args:
        before: seconds by operation.
        after: the same under another plan.
    """
    saved = {name: before[name] - after[name] for name in before}
    total = sum(saved.values())
    return {name: seconds / total for name, seconds in saved.items()} if total > 0 else None


def early_share(document: Mapping[str, Any], arm: str) -> float | None:
    """Return the share of the time saved that is saved in the early half of training, over all pairs of runs.

    The early half ends at the metric that the baseline has at half of its own time to target; both runs' times to that
    metric are read off their curves, straight between evaluations.

    Returns:
        The share; ``None`` if a run did not arrive, or no time is saved.
    """
    goal = document["metric"]["goal"]
    runs = {entry["name"]: entry["runs"] for entry in document["arms"]}
    early, total = 0.0, 0.0
    for own, other in zip(runs[arm], runs[document["baseline"]], strict=True):
        if not (own["reached"] and other["reached"]):
            return None
        halfway = other["time_to_target_s"] / 2
        metric = _metric_at(other["curve"], halfway)
        reached = _time_of(own["curve"], metric, goal)
        early += _time_of(other["curve"], metric, goal) - min(reached, own["time_to_target_s"])
        total += other["time_to_target_s"] - own["time_to_target_s"]
    return early / total if total > 0 else None


def _metric_at(curve: Sequence[Sequence[float]], seconds: float) -> float:
    for (before, _, first), (after, _, second) in itertools.pairwise(curve):
        if before <= seconds <= after and after > before:
            return first + (second - first) * (seconds - before) / (after - before)
    return curve[-1][2]


def _time_of(curve: Sequence[Sequence[float]], metric: float, goal: str) -> float:
    """Return the seconds at which a curve first comes to a metric."""
    sign = 1 if goal == "min" else -1
    for (before, _, first), (after, _, second) in itertools.pairwise(curve):
        if sign * first <= sign * metric:
            return before
        if sign * second <= sign * metric:
            return before + (after - before) * (first - metric) / (first - second)
    return curve[-1][0]


def _impact(experiment: Experiment, found: Mapping[str, Any]) -> list[Row]:
    gains = found["gain_by_operation"] or {}

    def row(metric: str, figure: paper.Figure | None, ours: float | None, note: str = "") -> Row:
        return Row(
            metric=metric,
            configuration=experiment.architecture,
            unit="% of gains",
            paper=None if figure is None else figure.value,
            ours=None if ours is None else 100 * ours,
            source="" if figure is None else figure.source,
            note=note if ours is None else "",
        )

    communication = [
        Row(
            metric=f"communication share, {name.partition('-')[0]}, {_RANKS} ranks",
            configuration=experiment.architecture,
            unit="% of the step",
            paper=statistics.fmean(figure.value for figure in paper.COMMUNICATION_SHARE),
            ours=percent,
            source="section I: 30-40 %, whose middle is set here, after its reference 3",
        )
        for name, percent in found["communication_percent"].items()
    ]
    early = found["early_share"]
    none_saved = "no time is saved to divide"
    return [
        row("early half of training", paper.EARLY, early, none_saved),
        row("late half of training", None, None if early is None else 1 - early, none_saved),
        row("forward", None, gains.get("forward"), none_saved),
        row("backward", paper.BACKWARD, gains.get("backward"), none_saved),
        row("optimizer", None, gains.get("optimizer"), none_saved),
        row("communication", paper.COMMUNICATION, gains.get("communication"), none_saved),
        row("memory-bound phases", paper.MEMORY_BOUND, None, "units are whole blocks: their layers are not told apart"),
        *communication,
    ]


def _architecture(experiment: Experiment, document: Mapping[str, Any]) -> list[Row]:
    """Return what single components do for one architecture: each against the configuration before it."""
    arms = {name: summarised(document, name) for name in (ACCUMULATION, PRECISION, SCHEDULE, CHECKPOINTS)}
    transformer = experiment.architecture == TRANSFORMER
    speed = paper.TRANSFORMER_PRECISION if transformer else paper.CONVOLUTION_PRECISION
    memory = paper.TRANSFORMER_CHECKPOINTING if transformer else None
    faster, leaner = _gain(arms[PRECISION], arms[ACCUMULATION]), _saving(arms[CHECKPOINTS], arms[SCHEDULE])
    return [
        Row(
            metric="mixed precision",
            configuration=experiment.architecture,
            unit=speed.unit,
            paper=speed.value,
            ours=faster,
            source=speed.source,
            note="" if faster is not None else arms[PRECISION].problem,
        ),
        Row(
            metric="activation checkpoints",
            configuration=experiment.architecture,
            unit="% less memory",
            paper=None if memory is None else memory.value,
            ours=leaner,
            source="" if memory is None else memory.source,
            note="" if leaner is not None else arms[CHECKPOINTS].problem,
        ),
    ]


def _gain(own: Summary, other: Summary) -> float | None:
    if own.throughput is None or other.throughput is None:
        return None
    return 100 * (own.throughput / other.throughput - 1)


def _saving(own: Summary, other: Summary) -> float | None:
    if own.peak_bytes is None or other.peak_bytes is None:
        return None
    return 100 * (1 - own.peak_bytes / other.peak_bytes)


def _notes(runs: int) -> list[str]:
    return [
        f"{runs} training runs (the paper: 150): five configurations of each architecture on paired seeds",
        "phases: time saved by all components together until the metric that the baseline has at half of its time to "
        "target, and after it; the two add up to 100 %",
        f"operations: seconds saved per batch, of the units' measured pieces, with {_RANKS} ranks' communication "
        "beside them; the four add up to 100 %, and one below 0 costs time. The paper's four shares are of different "
        "kinds (one phase, three operations) and add up to 100 % as well: it does not say how they were told apart",
        "mixed precision and checkpoints: each against the configuration before it, in throughput and in peak memory",
    ]
