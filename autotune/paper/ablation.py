"""Repeat table III: each component of the paper's method added in turn to those before it."""

from __future__ import annotations

from typing import Any

from autotune.agents.rules import PAPER_ACCUMULATION, nearest_accumulation, paper_precision, sqrt_recomputed
from autotune.campaign.arms import static_arm
from autotune.paper.experiments import CONVOLUTION, Experiment
from autotune.paper.paper_numbers import TABLE_3, Component
from autotune.paper.rows import Row, over
from autotune.paper.table_comparisons import Campaign, Summary, fp32_notes, summarised, tf32_arms
from autotune.plan import Plan, PlanSpace
from autotune.records.protocol import Arm

BASELINE, ACCUMULATION, PRECISION, SCHEDULE, CHECKPOINTS = (
    "baseline",
    "+ accumulation",
    "+ mixed precision",
    "+ schedule",
    "+ checkpoints",
)
COMPONENTS = (BASELINE, ACCUMULATION, PRECISION, SCHEDULE, CHECKPOINTS)


def component_plans(space: PlanSpace) -> dict[str, Plan]:
    """Return the plan of each configuration; a learning-rate schedule is no part of a plan."""
    k = nearest_accumulation(space, PAPER_ACCUMULATION)
    fp32, low = space.precisions[0], paper_precision(space)
    return {
        BASELINE: space.baseline(),
        ACCUMULATION: space.plan(accumulation_steps=k, precision=fp32),
        PRECISION: space.plan(accumulation_steps=k, precision=low),
        SCHEDULE: space.plan(accumulation_steps=k, precision=low),
        CHECKPOINTS: space.plan(accumulation_steps=k, precision=low, recomputed=sqrt_recomputed(space)),
    }


def component_arms(experiment: Experiment, space: PlanSpace) -> list[Arm]:
    """Return an arm per configuration, the first three at a constant learning rate."""
    arms = []
    for number, (name, plan) in enumerate(component_plans(space).items()):
        scheduled = number >= COMPONENTS.index(SCHEDULE)
        job = experiment.job if scheduled else experiment.constant
        arm = static_arm(name, plan)
        arms.append(Arm(name=name, policy=arm.policy, job=job))
    return arms


def ablation(experiment: Experiment, campaign: Campaign) -> tuple[list[Row], list[str], dict[str, Any]]:
    """Return rows, notes and facts of the ablation of one task."""
    first, *others = component_arms(experiment, campaign.space(experiment.job))
    beside = tf32_arms(experiment)
    document = campaign.race(experiment, [first, *beside, *others], None)
    # The paper's is of its convolution network alone.
    numbers = TABLE_3 if experiment.architecture == CONVOLUTION else [None] * len(COMPONENTS)
    baseline = summarised(document, BASELINE)
    rows: list[Row] = []
    for name, number in [*zip(COMPONENTS, numbers, strict=True), *((arm.name, None) for arm in beside)]:
        rows += _rows(name, number, summarised(document, name), baseline, experiment)
    return rows, _notes(experiment, document), {"comparison": document}


def _rows(name: str, number: Component | None, found: Summary, first: Summary, experiment: Experiment) -> list[Row]:
    paper = None if number is None else (number.minutes, number.memory_gb, number.accuracy_percent)
    base = (TABLE_3[0].minutes, TABLE_3[0].memory_gb, TABLE_3[0].accuracy_percent)
    metrics = (("time to target", "min"), ("peak memory", "GB"), ("final quality", experiment.quality_unit))
    ours, our_base = _numbers(found, experiment), _numbers(first, experiment)
    return [
        Row(
            metric=metric,
            configuration=name,
            unit=unit,
            paper=None if paper is None else paper[index],
            ours=ours[index],
            paper_change=None if paper is None or name == BASELINE else over(paper[index], base[index]),
            our_change=None if name == BASELINE else over(ours[index], our_base[index]),
            source="" if number is None else f"{number.source}, {number.name}",
            note=found.problem if ours[index] is None else "",
        )
        for index, (metric, unit) in enumerate(metrics)
    ]


def _numbers(found: Summary, experiment: Experiment) -> tuple[float | None, float | None, float | None]:
    return (
        None if found.time_s is None else found.time_s / 60,
        None if found.peak_bytes is None else found.peak_bytes / 1e9,
        None if found.metric is None else experiment.quality(found.metric),
    )


def _notes(experiment: Experiment, document: dict[str, Any]) -> list[str]:
    judged = (f"{entry['arm']}: {entry['verdict']}, {entry['reason']}" for entry in document["against_baseline"])
    notes = [*fp32_notes(document), *judged]
    if experiment.job.batching == "adaptive":
        notes.append(
            "k = 4 takes four batches a step here (a network with BatchNorm has another gradient if one batch is cut), "
            "and the learning rate follows: it saves no memory and makes a quarter of the updates"
        )
    return notes
