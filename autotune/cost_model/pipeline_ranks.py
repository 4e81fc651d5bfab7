"""What each rank of a pipeline has of the profile of a whole job, so that its peak and its plan can be found alone.

A rank has the segments of its stages once for each micro-batch that is between its forward and its backward pass when
most are; a plan's choice for a unit holds for all of them. All else of the memory model stays as it is.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.cost_model.profile import Boundary, Cost, Profile, Segment, StepTable
from autotune.pipeline import Pipeline, last_parts, passes_of, unread
from autotune.plan import Plan, Precision, Storage


@dataclass(frozen=True, slots=True)
class RankPart:
    """A profile of one rank's units at one k.

    Attributes:
        profile: the profile, whose only k is 1 if all micro-batches are under way at once, and 2 otherwise: after the
            first backward pass, gradients are there as well.
    """

    profile: Profile

    def plan(self, plan: Plan) -> Plan:
        """Return the part of a plan for all units that concerns this rank's."""
        own = {unit.name for unit in self.profile.units}
        return plan.changed(
            accumulation_steps=self.profile.accumulation_choices[0],
            precision={name: one for name, one in plan.precision.items() if name in own},
            storage={name: one for name, one in plan.storage.items() if name in own},
        )


def stages_of(profile: Profile, segments: Sequence[Segment]) -> list[int]:
    """Return the stage of each segment; code between two stages belongs to the former one."""
    layout, stage_of = Pipeline.parse(profile.pipeline), dict[str, int]()
    names = iter(unit.name for unit in profile.units)
    for stage, count in enumerate(layout.units):
        stage_of |= {next(names): stage for _ in range(count)}
    found, running = [], 0
    for segment in segments:
        running = running if segment.unit is None else stage_of[segment.unit]
        found.append(running)
    return found


def rank_parts(profile: Profile, accumulation_steps: int) -> list[list[RankPart]]:
    """Return for each rank the profiles of its part at one k, of which the one with the highest peak tells its peak.

    There are several where stages are interleaved, since each plan makes another point of the step the fullest.

    Args:
        profile: one of a pipeline.
        accumulation_steps: k.

    Raises:
        ProfileError: if that k is not in the profile.
    """
    layout, table = Pipeline.parse(profile.pipeline), profile.table(accumulation_steps)
    return [
        [RankPart(_part(profile, one, table)) for one in _underway(layout, rank, accumulation_steps)]
        for rank in range(layout.ranks)
    ]


@dataclass(frozen=True, slots=True)
class _Underway:
    """What a rank has during one of its passes.

    Attributes:
        stages: the stage of each micro-batch that is under way, that of the pass last.
        waits: for each of them, whether its backward pass has begun, so that what operations with weights have returned
            has gradients, and what they saved stays for the second part.
        sent: the stage of each gradient that it has sent and that may not have been received yet.
        is_later: whether other micro-batches have ended.
    """

    stages: tuple[int, ...]
    waits: tuple[bool, ...]
    sent: tuple[int, ...]
    is_later: bool

    def size(self) -> tuple[int, int, bool, int]:
        """Return by what the one with most memory comes last, as far as it can be told without a plan."""
        return len(self.stages), sum(self.waits), self.is_later, len(self.sent)

    def covers(self, other: _Underway) -> bool:
        """Return whether memory cannot be higher in the other pass, under no plan."""
        fewer = len(other.stages) < len(self.stages)
        same_pass = self.stages[-1] == other.stages[-1] and Counter(other.stages) <= Counter(self.stages)
        # What a micro-batch was handed is as large as the gradient that is sent for it.
        handed, others = Counter(self.stages + self.sent), Counter(other.stages + other.sent)
        fuller = others <= handed and sum(other.waits) <= sum(self.waits)
        return same_pass and fuller and (self.is_later or not other.is_later or fewer)


def _underway(layout: Pipeline, rank: int, micros: int) -> list[_Underway]:
    """Return what a rank has during those of its passes in which memory may be highest."""
    # For each micro-batch that is under way, by stage, whether its backward pass has begun.
    alive: dict[tuple[int, int], bool] = {}
    found: dict[_Underway, None] = {}
    ended = False
    step = layout, rank, micros
    order = passes_of(*step)
    for one, late, is_last in zip(order, unread(*step), last_parts(layout, order), strict=True):
        key = one.stage, one.micro
        alive.pop(key, None)
        waits = one.backward and layout.splits(one.stage)
        under = [*sorted((stage, begun) for (stage, _), begun in alive.items()), (one.stage, waits)]
        stages, waiting = zip(*under, strict=True)
        found[_Underway(stages, waiting, tuple(sorted(own.stage for own in late)), ended)] = None
        ended |= one.backward
        if not is_last:
            alive[key] = waits
    kept: list[_Underway] = []
    for candidate in sorted(
        found, key=lambda one: (len(one.stages), sum(one.waits), one.is_later, len(one.sent)), reverse=True
    ):
        if not any(one.covers(candidate) for one in kept):
            kept.append(candidate)
    return kept


def _part(profile: Profile, underway: _Underway, table: StepTable) -> Profile:
    ranks = Pipeline.parse(profile.pipeline).ranks
    rank, stages = underway.stages[-1] % ranks, stages_of(profile, table.segments)
    own = {part.unit for stage, part in zip(stages, table.segments, strict=True) if stage % ranks == rank}
    elsewhere = sum(size for name, size in profile.unit_bytes.items() if name not in own)
    k = 2 if underway.is_later else 1
    return replace(
        profile,
        pipeline="",
        units=tuple(unit for unit in profile.units if unit.name in own),
        accumulation_choices=(k,),
        static_bytes=max(profile.static_bytes - elsewhere, 0),
        tables=(_table(profile, stages, underway, table, k),),
        locked={name: one for name, one in profile.locked.items() if name in own},
    )


def _table(profile: Profile, stages: Sequence[int], underway: _Underway, table: StepTable, k: int) -> StepTable:
    """Return the table of a rank: the segments of each micro-batch that is under way, one after another.

    Args:
        profile: the profile of the whole job.
        stages: the stage of each segment.
        underway: the micro-batches.
        table: the table of the whole job.
        k: the k of the result.
    """
    segments: list[Segment] = []
    boundaries: list[Boundary] = []
    shared, ranks = profile.shared_bytes, Pipeline.parse(profile.pipeline).ranks
    for place, stage in enumerate(underway.stages):
        begin = stages.index(stage)
        end = begin + stages.count(stage)
        # The stage's last micro-batch is the first whose gradient is there.
        is_first = stage not in underway.stages[place + 1 :]
        found = [_moved(one, begin, end, len(segments)) for one in table.boundaries]
        boundaries += [one for one in found if one is not None]
        copies = underway.stages.count(stage)
        own = [_copy(one, copies, _gradient(one, shared) if is_first else 0) for one in table.segments[begin:end]]
        if underway.waits[place]:
            segments += [_waiting(profile, table, one) for one in own]
            own = [_in_parts(one) for one in own] if is_first else []
        segments += own
    # What is not under way takes time alone.
    others = (stage % ranks == underway.stages[-1] % ranks and stage not in underway.stages for stage in stages)
    segments += [_idle(one) for one in itertools.compress(table.segments, others)]
    # Each micro-batch keeps what its stage was handed.
    handed = sum(_handed(table, stages, stage) for stage in underway.stages)
    handed += sum(_handed(table, stages, stage) for stage in underway.sent if _is_trained_before(table, stages, stage))
    common = sum(one.gradient_bytes for one in table.segments if one.unit is None)
    if not any(one.unit in shared for one in segments):
        # In the update, all ranks have the gradients of what several stages share.
        common += max(shared.values(), default=0)
    gradients = common + sum(one.gradient_bytes for one in segments if one.unit is not None)
    update = table.update_peak_bytes - sum(one.gradient_bytes for one in table.segments)
    return replace(
        table,
        accumulation_steps=k,
        segments=tuple(segments),
        boundaries=tuple(boundaries),
        update_peak_bytes=gradients + min(max(update, 0), gradients),
        batch_bytes=table.batch_bytes + handed,
    )


def _gradient(segment: Segment, shared: Mapping[str, int]) -> int:
    """Return the bytes of gradients of a segment on its own rank; one process has shared ones once."""
    own = shared.get(segment.unit or "", 0)
    return segment.gradient_bytes + (own if segment.gradient_bytes < own else 0)


def _is_trained_before(table: StepTable, stages: Sequence[int], stage: int) -> bool:
    """Return whether a stage has to send gradients."""
    return any(one.gradient_bytes for one in table.segments[: stages.index(stage)])


def _copy(segment: Segment, copies: int, gradient_bytes: int) -> Segment:
    """Return one of several copies of a segment, among which its time is divided."""
    costs = {
        name: replace(cost, forward_s=cost.forward_s / copies, backward_s=cost.backward_s / copies)
        for name, cost in segment.costs.items()
    }
    return replace(segment, costs=costs, gradient_bytes=gradient_bytes)


def _waiting(profile: Profile, table: StepTable, segment: Segment) -> Segment:
    """Return a segment between the two parts of its backward pass, without its gradient.

    What its operations with weights are given stays beside what it saves; if that is not known, it is taken to be as
    much. A unit that recomputes has its whole backward pass in the first part.
    """
    given = profile.given_bytes.get(segment.unit or "", {})
    pieces = table.accumulation_steps if profile.batching == "fixed" else 1

    def kept(name: str, cost: Cost) -> int:
        precision, _, storage = name.partition("/")
        if storage != Storage.SAVE:
            return cost.saved_bytes
        known = given.get(Precision(precision))
        return cost.saved_bytes + (cost.saved_bytes if known is None else math.ceil(known / pieces))

    costs = {name: _keeping(cost, kept(name, cost)) for name, cost in segment.costs.items()}
    return replace(segment, costs=costs, gradient_bytes=0)


def _in_parts(segment: Segment) -> Segment:
    """Return what a segment needs in its backward pass beyond :func:`_waiting`."""

    def beyond(cost: Cost) -> Cost:
        first, later = (max(peak - cost.saved_bytes, 0) for peak in cost.backward_peak_bytes)
        return replace(_keeping(cost, 0), backward_peak_bytes=(first, later), forward_s=0.0, backward_s=0.0)

    return replace(segment, costs={name: beyond(cost) for name, cost in segment.costs.items()})


def _keeping(cost: Cost, saved_bytes: int) -> Cost:
    """Return the cost of a segment that keeps some bytes and needs no more."""
    return replace(cost, saved_bytes=saved_bytes, forward_peak_bytes=(0, 0), backward_peak_bytes=(0, 0))


def _idle(segment: Segment) -> Segment:
    return replace(segment, costs={name: _keeping(cost, 0) for name, cost in segment.costs.items()})


def _handed(table: StepTable, stages: Sequence[int], stage: int) -> int:
    """Return the bytes of what a stage is handed, as large as the gradient that it sends.

    That is one tensor, beside what is computed before the first unit, which each rank computes for itself.
    """
    begin = stages.index(stage)
    first = next(place for place, one in enumerate(table.segments) if one.unit is not None)
    crossing = [one for one in table.boundaries if one.born < begin <= one.last_use]
    sent = max((one.size_bytes for one in crossing if one.born >= first), default=0)
    return sent + sum(one.size_bytes for one in crossing if one.born < first)


def _moved(boundary: Boundary, begin: int, end: int, offset: int) -> Boundary | None:
    """Return a boundary that is born in a stage where its segments now are; ``None`` for one of other stages."""
    if not begin <= boundary.born < end:
        return None
    move = offset - begin
    return replace(
        boundary,
        born=boundary.born + move,
        last_use=min(boundary.last_use, end - 1) + move,
        # What is sent stays until its gradient comes back.
        held=boundary.held or boundary.last_use >= end,
        keepers={key + move: names for key, names in boundary.keepers.items() if begin <= key < end},
    )


def update_share(profile: Profile, table: StepTable) -> float:
    """Return the largest share of all trained parameters that a rank updates."""
    layout, whole = Pipeline.parse(profile.pipeline), sum(one.gradient_bytes for one in table.segments)
    shared = sum(one.gradient_bytes for one in table.segments if one.unit is None)
    own = [0] * layout.ranks
    for stage, segment in zip(stages_of(profile, table.segments), table.segments, strict=True):
        own[stage % layout.ranks] += 0 if segment.unit is None else segment.gradient_bytes
    return (shared + max(own)) / whole if whole else 1.0
