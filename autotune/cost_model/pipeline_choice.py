"""Choose the stages and the schedule of a pipeline from the profile of the job on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.cost_model.memory_model import choices
from autotune.cost_model.profile import Profile
from autotune.errors import InputError
from autotune.pipeline import SCHEDULES, Pipeline, PipelineStep, balanced, predict

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
    return _step(_passes(profile, k), pipeline, k)


def _at(profile: Profile, ranks: int, schedule: str, stages: int, k: int) -> ChosenPipeline:
    passes = _passes(profile, k)
    pipeline = Pipeline(
        ranks=ranks,
        schedule=schedule,
        units=balanced([sum(one) for one in passes.units], stages, first=sum(passes.before), last=sum(passes.after)),
    )
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


def _passes(profile: Profile, k: int) -> _Passes:
    """Return the seconds of each part; code between two units counts to the former."""
    plan = profile.space.baseline().changed(accumulation_steps=k)
    table, scale = profile.table_for(plan), profile.calibration.scale
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
