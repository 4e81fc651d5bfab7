"""Choose the stages and the schedule of a pipeline from the profile of the job on one device, and predict its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.cost_model.memory_model import choices
from autotune.cost_model.pipeline_ranks import update_share
from autotune.cost_model.profile import Profile
from autotune.errors import InputError, ProfileError
from autotune.pipeline import SCHEDULES, Pipeline, PipelineStep, balanced, predict
from autotune.plan import Plan, PlanSpace

# Seconds from the end of a pass to where its result is on the next rank of the same machine.
_SEND_S = 5e-4


@dataclass(frozen=True, slots=True)
class ChosenPipeline:
    """A layout with the number of micro-batches for which it is fastest.

    Attributes:
        pipeline: the layout, with the units of each stage.
        accumulation_steps: k.
        step: the predicted course of a step, without the update.
    """

    pipeline: Pipeline
    accumulation_steps: int
    step: PipelineStep


def chosen_pipelines(profile: Profile, ranks: int) -> list[ChosenPipeline]:
    """Return the predicted best division of the units under each schedule, the fastest first.

    Costs are those of the profile's baseline, in which all is saved: a division that is balanced then is nearly so
    under other plans, which change all stages alike.

    Args:
        profile: the profile of the job on one device.
        ranks: number of ranks.

    Raises:
        InputError: if there are more ranks than units.
    """
    if ranks > len(profile.units):
        problem = f"there are {ranks} ranks, and the model has {len(profile.units)} units"
        raise InputError(problem, where="--ranks", allowed=f"at most {len(profile.units)}")
    found = []
    for schedule in SCHEDULES:
        stages = Pipeline(ranks=ranks, schedule=schedule).stages
        if stages > len(profile.units) or ranks == 1 < stages:
            continue
        possible = [k for k in profile.accumulation_choices if stages == ranks or k % ranks == 0]
        best = [_at(profile, ranks, schedule, stages, k) for k in possible]
        found += sorted(best, key=_seconds)[:1]
    return sorted(found, key=_seconds)


def _seconds(one: ChosenPipeline) -> float:
    return one.step.seconds


def predicted_step(profile: Profile, pipeline: Pipeline, k: int) -> PipelineStep:
    """Return the predicted course of a step in k micro-batches, in which all is saved, without the update.

    Args:
        profile: the profile of the job on one device.
        pipeline: a layout with the units of each stage.
        k: the number of micro-batches, one of the profile's.

    Raises:
        ValueError: if k micro-batches cannot be interleaved.
    """
    return _step(_passes(profile, _saving(profile, k)), pipeline, k)


def pipeline_seconds(profile: Profile, plan: Plan) -> float:
    """Return the predicted seconds of a step under a plan.

    Args:
        profile: a result of :func:`pipelined`.
        plan: a plan for all units.

    Raises:
        ProfileError: if the plan's k is not in the profile.
    """
    table, pipeline = profile.table_for(plan), Pipeline.parse(profile.pipeline)
    step = _step(_passes(profile, plan), pipeline, plan.accumulation_steps)
    return step.seconds + profile.calibration.scale * table.update_s * update_share(profile, table)


def pipelined(profile: Profile, pipeline: Pipeline) -> Profile:
    """Return the profile of a job in a pipeline, from which peaks, times and plans of the pipeline are predicted.

    Args:
        profile: the profile of the job in one process.
        pipeline: the layout; if it names no units, they are divided by their times where all is saved.

    Raises:
        InputError: if the units cannot be divided so, or no k of the profile can be interleaved.
        ProfileError: if the profile is of an earlier version, which does not tell units' bytes apart.
    """
    if not profile.unit_bytes:
        problem, allowed = "does not tell the bytes of units", "a new one: autotune profile --fresh"
        raise ProfileError(problem, where=f"profile of {profile.job}", allowed=allowed)
    stages, units = pipeline.stages, len(profile.units)
    if stages > units or (pipeline.units and sum(pipeline.units) != units):
        problem = f"{pipeline} does not divide the model's {units} units"
        raise InputError(problem, where="--mesh", allowed="each unit of the model in one stage")
    ks = tuple(k for k in profile.accumulation_choices if stages == pipeline.ranks or k % pipeline.ranks == 0)
    if not ks:
        problem = f"no k of {list(profile.accumulation_choices)} can be interleaved on {pipeline.ranks} ranks"
        raise InputError(problem, where="--mesh", allowed=f"an accumulation choice that {pipeline.ranks} divides")
    divided = pipeline.units or _balanced(_passes(profile, _saving(profile, ks[-1])), stages)
    return replace(
        profile,
        pipeline=str(replace(pipeline, units=divided)),
        accumulation_choices=ks,
        tables=tuple(table for table in profile.tables if table.accumulation_steps in ks),
        # Units of a pipeline hand on fp32 under every plan.
        uniform_tables={},
    )


def within(profile: Profile, space: PlanSpace) -> Profile:
    """Return the profile of a pipeline without the precisions and storages that its engine does not have."""

    def kept(_unit: str, choice: str) -> bool:
        precision, _, storage = choice.partition("/")
        return precision in space.precisions and storage in space.storages

    return replace(
        profile.offering(kept),
        precisions=tuple(one for one in profile.precisions if one in space.precisions),
    )


def _saving(profile: Profile, k: int) -> Plan:
    return profile.space.baseline().changed(accumulation_steps=k)


def _balanced(passes: _Passes, stages: int) -> tuple[int, ...]:
    costs = [sum(one) for one in passes.units]
    return balanced(costs, stages, first=sum(passes.before), last=sum(passes.after))


def _at(profile: Profile, ranks: int, schedule: str, stages: int, k: int) -> ChosenPipeline:
    passes = _passes(profile, _saving(profile, k))
    pipeline = Pipeline(ranks=ranks, schedule=schedule, units=_balanced(passes, stages))
    return ChosenPipeline(pipeline, k, _step(passes, pipeline, k))


def _step(passes: _Passes, pipeline: Pipeline, k: int) -> PipelineStep:
    stages = len(pipeline.units)
    forward, backward = [0.0] * stages, [0.0] * stages
    rest = iter(passes.units)
    for stage, count in enumerate(pipeline.units):
        for _ in range(count):
            one = next(rest)
            forward[stage] += one[0]
            backward[stage] += one[1]
    # Every rank computes what is before the first unit.
    forward = [seconds + passes.before[0] for seconds in forward]
    backward[0] += passes.before[1]
    forward[-1] += passes.after[0]
    backward[-1] += passes.after[1]
    return predict(pipeline, k, forward, backward, _SEND_S)


@dataclass(frozen=True, slots=True)
class _Passes:
    """Seconds of the forward and the backward pass of a micro-batch, in each unit, before them and after them."""

    units: Sequence[tuple[float, float]]
    before: tuple[float, float]
    after: tuple[float, float]


def _passes(profile: Profile, plan: Plan) -> _Passes:
    """Return the seconds of each part under a plan; code between two units counts to the former."""
    table, scale, k = profile.table_for(plan), profile.calibration.scale, plan.accumulation_steps
    parts: list[tuple[float, float]] = [(0.0, 0.0)]
    after = (0.0, 0.0)
    for segment, choice in zip(table.segments, choices(table.segments, plan), strict=True):
        cost = segment.cost(choice)
        seconds = cost.forward_s * scale / k, cost.backward_s * scale / k
        if segment.unit is not None:
            parts.append(seconds)
            after = (0.0, 0.0)
        else:
            parts[-1] = _sum(parts[-1], seconds)
            after = _sum(after, seconds)
    before, *units = parts
    # What follows the last unit, such as the loss, is told apart: no other stage can have it.
    units[-1] = units[-1][0] - after[0], units[-1][1] - after[1]
    return _Passes(units, before, after)


def _sum(one: tuple[float, float], two: tuple[float, float]) -> tuple[float, float]:
    return one[0] + two[0], one[1] + two[1]
