"""Measure what lies beyond a plan, each alone against the baseline: another optimizer, compiled units, ZeRO's stages.

The paper and the review name these as future work and give no numbers. Every optimizer, the job's own kind among them,
is raced at the best of three learning rates, chosen by pilot runs on a seed that no race uses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from autotune import optimizers
from autotune.agents.rules import rule_policy
from autotune.campaign import comparison
from autotune.engines.deepspeed_config import STAGES
from autotune.engines.deepspeed_library import imported
from autotune.engines.job_checks import build_model, build_optimizer
from autotune.errors import EngineError, InputError
from autotune.job import Job
from autotune.launching import launched, suffix
from autotune.mechanics.devices import device_kind
from autotune.paper.experiments import Experiment
from autotune.paper.rows import Row, over
from autotune.paper.scaling import measure
from autotune.paper.table_comparisons import Campaign, Summary, samples_needed, summarised
from autotune.plan import Launch
from autotune.records.protocol import Arm
from autotune.records.run_documents import Run

# Over the rate that the rule of thumb gives.
_RATES = (1 / 3, 1.0, 3.0)
_PILOT_SEED, _RANKS = 3, 2
_BASELINE = "baseline"


def cross_layer(experiment: Experiment, campaign: Campaign) -> tuple[list[Row], list[str], dict[str, Any]]:
    """Return rows, notes and facts of one task's choices that are made once, before a run begins."""
    job, notes = experiment.constant, []
    arms = [_arm(_BASELINE, job)]
    for name in optimizers.KINDS:
        try:
            launch = _best_rate(name, job, campaign)
        except InputError as error:
            notes.append(f"{name}: not measured, {error}")
            continue
        arms.append(_arm(f"{_BASELINE}{suffix(launch)}", launched(job, launch)))
    compiled = Launch(compile=True)
    arms.append(_arm(f"{_BASELINE}{suffix(compiled)}", launched(job, compiled)))
    document = campaign.race(experiment, arms, None, kept="cross-layer")
    first = summarised(document, _BASELINE)
    rows = [row for arm in arms for row in _rows(arm.name, summarised(document, arm.name), first, experiment)]
    stages, told = _stages(experiment, campaign)
    notes += [f"{entry['arm']}: {entry['verdict']}, {entry['reason']}" for entry in document["against_baseline"]]
    notes += [f"optimizer {name}: not measured, it {reason}" for name, reason in optimizers.REFUSED.items()]
    notes.append("every compiled run pays for compiling, but for what the compiler keeps on the disk")
    return [*rows, *stages], [*notes, *told], {"cross_layer": document}


def _arm(name: str, job: Job) -> Arm:
    return Arm(name=name, policy=lambda space: rule_policy(_BASELINE, space, job), job=job)


def _best_rate(name: str, job: Job, campaign: Campaign) -> Launch:
    """Return an optimizer at the rate with which a pilot run arrives after fewest samples.

    Raises:
        InputError: if its library is missing.
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


def _rows(name: str, found: Summary, first: Summary, experiment: Experiment) -> list[Row]:
    values = (
        ("time to target", "min", found.time_s, first.time_s, 1 / 60),
        ("samples to target", "samples", found.samples, first.samples, 1),
        ("peak memory", "GB", found.peak_bytes, first.peak_bytes, 1e-9),
    )
    rows = [
        Row(
            metric=f"{metric}, one choice changed",
            configuration=name,
            unit=unit,
            ours=None if ours is None else ours * factor,
            our_change=None if name == _BASELINE else over(ours, base),
            note=found.problem if ours is None else "",
        )
        for metric, unit, ours, base, factor in values
    ]
    quality = Row(
        metric="final quality, one choice changed",
        configuration=name,
        unit=experiment.quality_unit,
        ours=None if found.metric is None else experiment.quality(found.metric),
    )
    return [*rows, quality]


def _stages(experiment: Experiment, campaign: Campaign) -> tuple[list[Row], list[str]]:
    """Return what ZeRO's stages cost and save on two ranks."""
    try:
        imported(device_kind(_RANKS))
        names = {f"ZeRO stage {stage}": (_BASELINE, stage) for stage in STAGES}
        found = measure(experiment, campaign, (_RANKS,), names)
    except (InputError, EngineError) as error:
        return [], [f"ZeRO stages: not measured, {error}"]
    first = found[f"ZeRO stage {STAGES[0]}-{_RANKS}"]
    rows = [row for name in names for row in _stage_rows(name, found[f"{name}-{_RANKS}"], first, experiment)]
    return rows, [f"ZeRO's stages: {_RANKS} ranks through DeepSpeed, fp32; the memory is the worst rank's"]


def _stage_rows(name: str, seen: Mapping[str, Any], first: Mapping[str, Any], experiment: Experiment) -> list[Row]:
    configuration = f"{name}, {_RANKS} ranks"
    values = (
        ("throughput", experiment.item_unit, "throughput", experiment.items),
        ("peak memory of a rank", "GB", "peak_bytes", 1e-9),
    )
    return [
        Row(
            metric=metric,
            configuration=configuration,
            unit=unit,
            ours=seen[key] * factor,
            our_change=None if seen is first else seen[key] / first[key],
        )
        for metric, unit, key, factor in values
    ]
