"""Table III, reproduced: the components of the paper's method, added one after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autotune.agents.rules import PAPER_ACCUMULATION, nearest_accumulation, paper_precision, sqrt_recomputed
from autotune.campaign.arms import static_arm
from autotune.paper.experiments import CONVOLUTION, Experiment
from autotune.paper.paper_numbers import MEMORY, QUALITY, TABLE_3, TIME, AblationRow
from autotune.paper.rows import Table, TableRow
from autotune.paper.table_comparisons import (
    Campaign,
    fp32_notes,
    missed,
    number_of,
    summarised,
    tf32_arms,
    verdict_notes,
)
from autotune.plan import Plan, PlanSpace
from autotune.records.protocol import Arm

BASELINE, ACCUMULATION, PRECISION, SCHEDULE, CHECKPOINTS = (
    "baseline",
    "+ accumulation",
    "+ mixed precision",
    "+ schedule",
    "+ checkpoints",
)
# Runs are lengthened, at most to this multiple of what the baseline needs, until every configuration arrives.
LONGEST = 4
COMPONENTS = (BASELINE, ACCUMULATION, PRECISION, SCHEDULE, CHECKPOINTS)


def component_plans(space: PlanSpace) -> dict[str, Plan]:
    """Return the plan of each configuration; plans do not include the learning-rate schedule."""
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
    return [
        replace(static_arm(name, plan), job=experiment.job if name in (SCHEDULE, CHECKPOINTS) else experiment.constant)
        for name, plan in component_plans(space).items()
    ]


def ablation(experiment: Experiment, campaign: Campaign) -> Table:
    """Measure the ablation of one task.

    Args:
        experiment: the task.
        campaign: the measurement setup.
    """
    first, *others = component_arms(experiment, campaign.space(experiment.job))
    extra = tf32_arms(experiment)
    document = campaign.race(experiment, [first, *extra, *others], None, longest=LONGEST)
    # The paper has an ablation only of its convolution network.
    printed = TABLE_3 if experiment.architecture == CONVOLUTION else [None] * len(COMPONENTS)
    lines = [*zip(COMPONENTS, printed, strict=True), *((arm.name, None) for arm in extra)]
    rows = [row for name, line in lines for row in _rows(name, line, document, experiment)]
    return Table(rows=rows, notes=_notes(experiment, document), facts={"comparison": document})


def _rows(name: str, line: AblationRow | None, document: dict[str, Any], experiment: Experiment) -> Iterator[TableRow]:
    found, first = summarised(document, name), summarised(document, BASELINE)
    capped = (
        f", in runs of {document['horizon_samples']} samples, the longest tried" if name in missed(document) else ""
    )
    metrics = ((TIME, "min"), (MEMORY, "GB"), (QUALITY, experiment.quality_unit))
    for (metric, unit), paper, paper_base in zip(metrics, _printed(line), _printed(TABLE_3[0]), strict=True):
        yield TableRow(
            metric,
            name,
            unit,
            number_of(found, metric, unit, experiment),
            base=None if name == BASELINE else number_of(first, metric, unit, experiment),
            paper=paper,
            paper_base=None if name == BASELINE else paper_base,
            source="" if line is None else f"{line.source}, {line.name}",
            problem=found.problem + capped,
        )


def _length_note(document: dict[str, Any]) -> str:
    """Return how long the runs are, and whether that is the cap."""
    late = missed(document)
    length = f"all runs have {document['horizon_samples']} samples"
    if not late:
        return f"{length}: runs were lengthened until every configuration reached the target on every seed"
    return (
        f"{length}, {LONGEST} times what the baseline needs, which is the cap: {', '.join(late)} did not always arrive"
    )


def _printed(line: AblationRow | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if line is None else (line.minutes, line.memory_gb, line.accuracy_percent)


def _notes(experiment: Experiment, document: dict[str, Any]) -> list[str]:
    notes = [*fp32_notes(document), *verdict_notes(document), _length_note(document)]
    if experiment.job.batching == "adaptive":
        notes.append(
            "k = 4 takes four batches a step here (a network with BatchNorm has a different gradient if a batch is "
            "split), and the learning rate follows: it saves no memory and makes a quarter of the updates"
        )
    return notes
