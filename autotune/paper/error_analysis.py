"""The error analysis, reproduced: gains by phase, operation and architecture, and the closing equations."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from autotune.cost_model.profile import Profile
from autotune.cost_model.time_model import seconds_by_operation, seconds_per_step
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.job import Job
from autotune.mechanics.devices import device_kind
from autotune.paper import paper_numbers as paper
from autotune.paper.experiments import TRANSFORMER, Experiment
from autotune.paper.rows import Table, TableRow, over
from autotune.paper.table_3_ablation import (
    ACCUMULATION,
    BASELINE,
    CHECKPOINTS,
    PRECISION,
    SCHEDULE,
    ablation,
    component_plans,
)
from autotune.paper.table_4_ranks import measure
from autotune.paper.table_comparisons import Campaign, summarised
from autotune.paper.table_speedups import NOTES, outlook
from autotune.profiling.job_shape import fixed_shape
from autotune.profiling.operator_kinds import KINDS
from autotune.profiling.operator_times import COMPUTE, MEMORY, Rates, operator_times

_Operators = dict[str, list[dict[str, Any]]]
_WARM_UP = 3
# Number of ranks whose communication is added to the operations of one process.
_RANKS = 2


def error_analysis(experiments: Sequence[Experiment], campaign: Campaign) -> Table:
    """Measure the error analysis of both tasks.

    Args:
        experiments: the tasks.
        campaign: the measurement setup.
    """
    rows: list[TableRow] = []
    facts: dict[str, Any] = {}
    for experiment in experiments:
        profile = campaign.profile(experiment.job)
        document = ablation(experiment, campaign).facts["comparison"]
        ranks = measure(experiment, campaign, (_RANKS,))
        found = _found(document, profile, ranks)
        measure_operators = functools.partial(_operators, experiment.job, profile)
        operators = campaign.journal.once({"operators": experiment.job.name}, measure_operators, _Operators)
        found["operators"], found["gain_by_kind"] = operators, kind_gains(operators, _batches(profile))
        rows += [*_impact(experiment, found), *_architecture(experiment, document)]
        rows += outlook(experiment, document, found["recomputation_overhead"])
        facts[experiment.architecture] = {"job": experiment.reference, "comparison": document, **found}
    runs = sum(len(arm["runs"]) for fact in facts.values() for arm in fact["comparison"]["arms"])
    return Table(rows=rows, notes=[*_notes(runs), *NOTES], facts=facts)


def _found(document: Mapping[str, Any], profile: Profile, ranks: Mapping[str, Any]) -> dict[str, Any]:
    plans = component_plans(profile.space)
    before, after = (seconds_by_operation(profile, plans[name]) for name in (BASELINE, CHECKPOINTS))
    scale = _batches(profile)
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


def _batches(profile: Profile) -> int:
    """Return the batches in a step of the paper's method: times are compared per sample."""
    space = profile.space
    return 1 if space.k_splits else component_plans(space)[CHECKPOINTS].accumulation_steps


def _operators(job: Job, profile: Profile) -> dict[str, list[dict[str, Any]]]:
    """Measure the operators of a step, before and after all components of the paper's method were added."""
    rates = Rates.measured(profile.precisions, device_kind())
    plans = component_plans(profile.space)
    options = EngineOptions(statistics_every=None, meter_memory=False)
    found = {}
    with closing(TorchEngine(fixed_shape(job), seed=0, options=options)) as engine:
        for name, plan in (("baseline", plans[BASELINE]), ("paper", plans[CHECKPOINTS])):
            engine.apply(plan)
            engine.run(_WARM_UP)
            found[name] = [asdict(one) for one in operator_times(engine, rates)]
    return found


def kind_gains(
    operators: Mapping[str, Sequence[Mapping[str, Any]]], batches: int
) -> dict[str, dict[str, float]] | None:
    """Return the share of each kind of operators, and of each bound, in the operators' seconds saved.

    A kind has the bound of most of its time in the baseline, since lower precision and smaller pieces change the bound
    of one and the same operation.

    Args:
        operators: measured operators of ``baseline`` and ``paper``, as ``OperatorTime`` has them.
        batches: batches in a step of ``paper``.

    Returns:
        Shares by kind and by bound, each adding up to 1; ``None`` if no time is saved.
    """
    seconds = {name: dict.fromkeys(KINDS, 0.0) for name in operators}
    memory = dict.fromkeys(KINDS, 0.0)
    for name, cells in operators.items():
        for cell in cells:
            seconds[name][cell["kind"]] += cell["measured_s"] / (batches if name == "paper" else 1)
            if name == "baseline" and cell["bound"] == MEMORY:
                memory[cell["kind"]] += cell["measured_s"]
    before = seconds["baseline"]
    gains = gain_shares(before, seconds["paper"])
    if gains is None:
        return None
    bound = sum(share for kind, share in gains.items() if memory[kind] >= before[kind] / 2)
    return {"kinds": gains, "bounds": {COMPUTE: 1 - bound, MEMORY: bound}}


def gain_shares(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float] | None:
    """Return each operation's share of the seconds saved; ``None`` if none are. A negative share is time added.

    Args:
        before: seconds by operation.
        after: seconds by operation under another plan.
    """
    saved = {name: before[name] - after[name] for name in before}
    total = sum(saved.values())
    return {name: seconds / total for name, seconds in saved.items()} if total > 0 else None


def early_share(document: Mapping[str, Any], arm: str) -> float | None:
    """Return the early half of training's share of the time that an arm saves, over all pairs of runs.

    The early half ends at the metric that the baseline reaches at half its time to target. The times of both runs to
    that metric are interpolated linearly between evaluations.

    Args:
        document: the content of ``comparison.json``.
        arm: name of the arm.

    Returns:
        The share; ``None`` if a run did not reach the target, or no time was saved.
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
    """Return the seconds at which a curve first reaches a metric."""
    sign = 1 if goal == "min" else -1
    for (before, _, first), (after, _, second) in itertools.pairwise(curve):
        if sign * first <= sign * metric:
            return before
        if sign * second <= sign * metric:
            return before + (after - before) * (first - metric) / (first - second)
    return curve[-1][0]


def _impact(experiment: Experiment, found: Mapping[str, Any]) -> list[TableRow]:
    """Return the rows on the sources of gains, and on the share of communication."""
    name, gains, early = experiment.architecture, found["gain_by_operation"] or {}, found["early_share"]
    none_saved = "no time is saved to divide"
    by_kind = found["gain_by_kind"] or {"kinds": {}, "bounds": {}}

    def row(metric: str, figure: paper.PaperFigure | None, ours: float | None, problem: str = none_saved) -> TableRow:
        percent = None if ours is None else 100 * ours
        return TableRow(metric, name, "% of gains", percent, **_printed(figure), problem=problem)

    communication = [
        TableRow(
            f"communication share, {arm.partition('-')[0]}, {_RANKS} ranks",
            name,
            "% of the step",
            percent,
            paper=statistics.fmean(figure.value for figure in paper.COMMUNICATION_SHARE),
            source="section I: 30-40 %, whose middle is set here, after its reference 3",
        )
        for arm, percent in found["communication_percent"].items()
    ]
    return [
        row("early half of training", paper.EARLY, early),
        row("late half of training", None, None if early is None else 1 - early),
        row("forward", None, gains.get("forward")),
        row("backward", paper.BACKWARD, gains.get("backward")),
        row("optimizer", None, gains.get("optimizer")),
        row("communication", paper.COMMUNICATION, gains.get("communication")),
        row("memory-bound operators", paper.MEMORY_BOUND, by_kind["bounds"].get(MEMORY)),
        row("compute-bound operators", None, by_kind["bounds"].get(COMPUTE)),
        *(row(f"operators: {kind}", None, share) for kind, share in by_kind["kinds"].items() if share),
        *communication,
    ]


def _architecture(experiment: Experiment, document: Mapping[str, Any]) -> list[TableRow]:
    """Return the rows on single components for one architecture, each against the configuration before it."""
    name, transformer = experiment.architecture, experiment.architecture == TRANSFORMER
    before, precision, schedule, checkpoints = (
        summarised(document, arm) for arm in (ACCUMULATION, PRECISION, SCHEDULE, CHECKPOINTS)
    )
    speed = paper.TRANSFORMER_PRECISION if transformer else paper.CONVOLUTION_PRECISION
    memory = paper.TRANSFORMER_CHECKPOINTING if transformer else None
    faster = over(precision.throughput, before.throughput)
    leaner = over(checkpoints.peak_bytes, schedule.peak_bytes)
    return [
        TableRow(
            "mixed precision",
            name,
            speed.unit,
            None if faster is None else 100 * (faster - 1),
            **_printed(speed),
            problem=precision.problem,
        ),
        TableRow(
            "activation checkpoints",
            name,
            "% less memory",
            None if leaner is None else 100 * (1 - leaner),
            **_printed(memory),
            problem=checkpoints.problem,
        ),
    ]


def _printed(figure: paper.PaperFigure | None) -> dict[str, Any]:
    return {} if figure is None else {"paper": figure.value, "source": figure.source}


def _notes(runs: int) -> list[str]:
    return [
        f"{runs} training runs (the paper: 150): five configurations of each architecture on paired seeds",
        "phases: time saved by all components together until the metric that the baseline has at half of its time to "
        "target, and after it; the two add up to 100 %",
        f"operations: seconds saved per batch in the measured parts of the units and in the communication of {_RANKS} "
        "ranks; the four shares add up to 100 %, and a negative share costs time. The paper's four shares are of "
        "different kinds (one phase, three operations) and also add up to 100 %; it does not say how it separates them",
        "memory-bound and compute-bound operators, and kinds of operators: seconds saved per batch in real steps, by "
        "torch's profiler; each of the two lists adds up to 100 %. A kind is memory-bound if most of its time in the "
        "baseline is in operators with fewer operations per byte than the machine's measured rate of products over "
        "its measured bandwidth",
        "mixed precision and checkpoints: each compared with the previous configuration, in throughput and peak memory",
    ]
