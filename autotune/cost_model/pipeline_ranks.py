"""What each rank of a pipeline has of the profile of a whole job, so that its peak and its plan can be found alone.

A rank has the segments of its stages once for each micro-batch that is between its forward and its backward pass when
most are; a plan's choice for a unit holds for all of them. All else of the memory model stays as it is.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.cost_model.profile import Boundary, Profile, Segment, StepTable
from autotune.pipeline import Pipeline, passes_of, unread
from autotune.plan import Plan


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
        sent: the stage of each gradient that it has sent and that may not have been received yet.
        is_later: whether other micro-batches have ended.
    """

    stages: tuple[int, ...]
    sent: tuple[int, ...]
    is_later: bool

    def covers(self, other: _Underway) -> bool:
        """Return whether memory cannot be higher in the other pass, under no plan."""
        fewer = len(other.stages) < len(self.stages)
        same_pass = self.stages[-1] == other.stages[-1] and Counter(other.stages) <= Counter(self.stages)
        # What a micro-batch was handed is as large as the gradient that is sent for it.
        handed, others = Counter(self.stages + self.sent), Counter(other.stages + other.sent)
        return same_pass and others <= handed and (self.is_later or not other.is_later or fewer)


def _underway(layout: Pipeline, rank: int, micros: int) -> list[_Underway]:
    """Return what a rank has during those of its passes in which memory may be highest."""
    alive: dict[tuple[int, int], None] = {}
    found: dict[_Underway, None] = {}
    ended = False
    step = layout, rank, micros
    for one, late in zip(passes_of(*step), unread(*step), strict=True):
        key = one.stage, one.micro
        alive.pop(key, None)
        stages = (*sorted(stage for stage, _ in alive), one.stage)
        found[_Underway(stages, tuple(sorted(own.stage for own in late)), ended)] = None
        if one.backward:
            ended = True
        else:
            alive[key] = None
    kept: list[_Underway] = []
    for candidate in sorted(found, key=lambda one: (len(one.stages), one.is_later, len(one.sent)), reverse=True):
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
        segments += [_copy(one, copies, _gradient(one, shared) if is_first else 0) for one in table.segments[begin:end]]
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


def _idle(segment: Segment) -> Segment:
    costs = {
        name: replace(cost, saved_bytes=0, forward_peak_bytes=(0, 0), backward_peak_bytes=(0, 0))
        for name, cost in segment.costs.items()
    }
    return replace(segment, costs=costs)


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
