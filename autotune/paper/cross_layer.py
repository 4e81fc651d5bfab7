"""Choices beyond a plan, each compared alone with the baseline: another optimizer, compiled units, ZeRO stages.

The paper names these as future work and gives no numbers. Every optimizer, including the job's own kind, is compared
at the best of three learning rates, chosen by pilot runs on a seed that no comparison uses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from autotune import optimizers
from autotune.campaign import comparison
from autotune.engines.deepspeed_config import STAGES
from autotune.engines.deepspeed_library import imported
from autotune.engines.job_checks import build_model, build_optimizer
from autotune.errors import EngineError, InputError
from autotune.job import Job
from autotune.launching import launched, suffix
from autotune.mechanics.devices import device_kind
from autotune.paper.experiments import Experiment
from autotune.paper.paper_numbers import MEMORY, QUALITY, SAMPLES, THROUGHPUT, TIME
from autotune.paper.rows import Table, TableRow
from autotune.paper.table_4_ranks import measure
from autotune.paper.table_comparisons import Campaign, number_of, rule_arm, samples_needed, summarised, verdict_notes
from autotune.plan import Launch
from autotune.records.run_documents import Run

# Learning rates to try, relative to the rule of thumb's.
_RATES = (1 / 3, 1.0, 3.0)
_PILOT_SEED, _RANKS = 3, 2
_BASELINE = "baseline"


def cross_layer(experiment: Experiment, campaign: Campaign) -> Table:
    """Measure, for one task, the choices that are made once before a run begins.

    Args:
        experiment: the task.
        campaign: the measurement setup.
    """
    job, notes = experiment.constant, []
    arms = [rule_arm(_BASELINE, job)]
    for name in optimizers.KINDS:
        try:
            launch = _best_rate(name, job, campaign)
        except InputError as error:
            notes.append(f"{name}: not measured, {error}")
            continue
        arms.append(rule_arm(_BASELINE, launched(job, launch), f"{_BASELINE}{suffix(launch)}"))
    compiled = Launch(compile=True)
    arms.append(rule_arm(_BASELINE, launched(job, compiled), f"{_BASELINE}{suffix(compiled)}"))
    document = campaign.race(experiment, arms, None, kept="cross-layer")
    rows = [row for arm in arms for row in _rows(arm.name, document, experiment)]
    notes += verdict_notes(document)
    notes += [f"optimizer {name}: not measured, it {reason}" for name, reason in optimizers.REFUSED.items()]
    notes.append("every compiled run includes compilation time, except for what is cached on disk")
    return Table(rows=rows, notes=notes, facts={"cross_layer": document}) + _stages(experiment, campaign)


def _best_rate(name: str, job: Job, campaign: Campaign) -> Launch:
    """Return an optimizer with the learning rate whose pilot run needs the fewest samples to the target.

    If no pilot run reaches the target, the rule of thumb's rate is used.

    Raises:
        InputError: if the optimizer's library is missing.
    """
    optimizers.require(name, where="reproduce")
    rule = optimizers.converted(build_optimizer(job, build_model(job)), name).param_groups[0]["lr"]
    launches = [Launch(optimizer=name, learning_rate=float(f"{rule * factor:.3g}")) for factor in _RATES]
    campaign.reporter.stage(f"{job.name}: pilot runs of {name} at {len(_RATES)} learning rates", len(_RATES))
    needed = []
    for number, launch in enumerate(launches, 1):
        changed = launched(job, launch)
        run = functools.partial(_pilot, changed)
        found = campaign.journal.once({"pilot": changed.name, "seed": _PILOT_SEED}, run, Run)
        needed.append(samples_needed(found) if found["reached"] else math.inf)
        campaign.reporter.advance(number)
    return launches[min(range(len(launches)), key=needed.__getitem__)] if min(needed) < math.inf else launches[1]


def _pilot(job: Job) -> dict[str, Any]:
    return comparison.pilot(job, job.total_samples, seed=_PILOT_SEED).to_json()


def _rows(name: str, document: Mapping[str, Any], experiment: Experiment) -> Iterator[TableRow]:
    found, first = summarised(document, name), summarised(document, _BASELINE)
    for metric, unit in ((TIME, "min"), (SAMPLES, "samples"), (MEMORY, "GB"), (QUALITY, experiment.quality_unit)):
        compared = name != _BASELINE and metric != QUALITY
        yield TableRow(
            f"{metric}, one choice changed",
            name,
            unit,
            number_of(found, metric, unit, experiment),
            base=number_of(first, metric, unit, experiment) if compared else None,
            problem=found.problem,
        )


def _stages(experiment: Experiment, campaign: Campaign) -> Table:
    """Measure the throughput and memory of each ZeRO stage on two ranks."""
    names = {f"ZeRO stage {stage}": (_BASELINE, stage) for stage in STAGES}
    try:
        imported(device_kind(_RANKS))
        found = measure(experiment, campaign, (_RANKS,), names)
    except (InputError, EngineError) as error:
        return Table(notes=[f"ZeRO stages: not measured, {error}"])
    first = found[f"ZeRO stage {STAGES[0]}-{_RANKS}"]
    metrics = (
        (THROUGHPUT, experiment.item_unit, "throughput", experiment.items),
        ("peak memory of a rank", "GB", "peak_bytes", 1e-9),
    )
    rows = [
        TableRow(
            metric,
            f"{name}, {_RANKS} ranks",
            unit,
            seen[key] * factor,
            base=None if seen is first else first[key] * factor,
        )
        for name in names
        for seen in [found[f"{name}-{_RANKS}"]]
        for metric, unit, key, factor in metrics
    ]
    return Table(
        rows=rows, notes=[f"ZeRO's stages: {_RANKS} ranks through DeepSpeed, fp32; the memory is the worst rank's"]
    )
