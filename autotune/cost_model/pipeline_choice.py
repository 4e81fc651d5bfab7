"""Choose the stages and the schedule of a pipeline from the profile of the job on one device, and predict its steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autotune.cost_model.memory_model import choices
from autotune.cost_model.pipeline_ranks import update_share
from autotune.cost_model.profile import Profile
from autotune.errors import InputError, ProfileError
from autotune.pipeline import SCHEDULES, Pipeline, PipelineStep, balanced, divisions, predict
from autotune.plan import Plan, PlanSpace, Storage

# Seconds from the end of a pass to where its result is on the next rank of the same machine.
_SEND_S = 5e-4
# What two parts of a backward pass take longer than the whole, as a share of the second: some operations are run twice,
# and more memory is alive (0.2 to 0.35 in transformer blocks on a CPU).
_IN_PARTS = 0.3
# So many divisions of the units are all predicted.
_FEW = 200


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
        best = [_at(profile, ranks, schedule, k) for k in possible]
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
    divided = pipeline if pipeline.units else _divided(_passes(profile, _saving(profile, ks[-1])), pipeline, ks[-1])
    return replace(
        profile,
        pipeline=str(divided),
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


def _divided(passes: _Passes, pipeline: Pipeline, k: int) -> Pipeline:
    """Return a pipeline with the units of each stage: the fastest of few divisions, or one that no moved unit improves.

    Stages of equal time are not always best: where passes of later stages may wait, earlier stages should be shorter.
    """
    count = len(passes.units)
    if math.comb(count - 1, pipeline.stages - 1) <= _FEW:
        every = (replace(pipeline, units=units) for units in divisions(count, pipeline.stages))
        return min(every, key=lambda one: _step(passes, one, k).seconds)
    costs = [one.total_s for one in passes.units]
    units = balanced(costs, pipeline.stages, first=passes.before.total_s, last=passes.after.total_s)
    best = replace(pipeline, units=units)
    seconds = _step(passes, best, k).seconds
    while True:
        moved = [replace(pipeline, units=units) for units in _moves(best.units)]
        found = min(moved, key=lambda one: _step(passes, one, k).seconds, default=best)
        if (shorter := _step(passes, found, k).seconds) >= seconds:
            return best
        best, seconds = found, shorter


def _moves(units: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the divisions in which one stage has a unit less and another one a unit more."""
    for less, more in itertools.permutations(range(len(units)), 2):
        moved = [count + (stage == more) - (stage == less) for stage, count in enumerate(units)]
        if all(moved):
            yield tuple(moved)


def _at(profile: Profile, ranks: int, schedule: str, k: int) -> ChosenPipeline:
    passes = _passes(profile, _saving(profile, k))
    pipeline = _divided(passes, Pipeline(ranks=ranks, schedule=schedule), k)
    return ChosenPipeline(pipeline, k, _step(passes, pipeline, k))


def _step(passes: _Passes, pipeline: Pipeline, k: int) -> PipelineStep:
    units = iter(passes.units)
    rows = [_sum(itertools.islice(units, count)) for count in pipeline.units]
    # Every rank computes what is before the first unit.
    rows = [replace(one, forward_s=one.forward_s + passes.before.forward_s) for one in rows]
    rows[0] = _sum([rows[0], replace(passes.before, forward_s=0.0)])
    rows[-1] = _sum([rows[-1], passes.after])
    rows = [_in_parts(one) if pipeline.splits(stage) else one for stage, one in enumerate(rows)]
    forward, backward, weights = zip(*((one.forward_s, one.backward_s, one.weights_s) for one in rows), strict=True)
    return predict(pipeline, k, forward, backward, _SEND_S, weights_s=weights)


@dataclass(frozen=True, slots=True)
class _Part:
    """Seconds of a part of the model for a micro-batch.

    Attributes:
        forward_s: its forward pass.
        backward_s: its backward pass.
        weights_s: what of that may wait, where backward passes come in two parts.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    weights_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Both passes."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class _Passes:
    """The passes of a micro-batch in each unit, before them and after them."""

    units: Sequence[_Part]
    before: _Part
    after: _Part


def _passes(profile: Profile, plan: Plan) -> _Passes:
    """Return the seconds of each part under a plan; code between two units counts to the former."""
    table, scale, k = profile.table_for(plan), profile.calibration.scale, plan.accumulation_steps
    parts, after = [_Part()], _Part()
    for segment, choice in zip(table.segments, choices(table.segments, plan), strict=True):
        cost = segment.cost(choice)
        part = _Part(cost.forward_s * scale / k, cost.backward_s * scale / k)
        if segment.unit is None or plan.storage_of(segment.unit) is Storage.SAVE:
            # Of the two products of a layer's backward pass, each takes about as long as that of its forward pass.
            part = replace(part, weights_s=max(part.backward_s - part.forward_s, 0.0))
        if segment.unit is not None:
            parts.append(part)
            after = _Part()
        else:
            parts[-1] = _sum([parts[-1], part])
            after = _sum([after, part])
    before, *units = parts
    # What follows the last unit, such as the loss, is told apart: no other stage can have it.
    last = units[-1]
    units[-1] = _Part(
        last.forward_s - after.forward_s, last.backward_s - after.backward_s, last.weights_s - after.weights_s
    )
    return _Passes(units, before, after)


def _in_parts(one: _Part) -> _Part:
    """Return a part whose backward pass comes in two parts."""
    longer = _IN_PARTS * one.weights_s
    return replace(one, backward_s=one.backward_s + longer, weights_s=one.weights_s + longer)


def _sum(parts: Iterable[_Part]) -> _Part:
    rows = [(one.forward_s, one.backward_s, one.weights_s) for one in parts]
    return _Part(*map(sum, zip(*rows, strict=True)))
