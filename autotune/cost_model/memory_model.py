"""Peak memory of any plan, predicted from a profile.

At any point of a step, the level is the static bytes, plus what earlier segments keep, plus what the running segment
needs. The peak is the highest level over the forward and backward passes of all segments and the update. With fp32
boundaries, a segment's need depends only on its own choice, so traces with one choice for all units suffice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.cost_model.pipeline_ranks import rank_parts
from autotune.cost_model.profile import FIXED, Boundary, Cost, Profile, Segment, StepTable, choice_name
from autotune.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Bytes allocated on top of the static bytes and the running segment's own, for each running segment.

    Attributes:
        forward: bytes during each segment's forward pass, without gradients.
        backward: bytes during each segment's backward pass, without gradients.
        gradients_before: bytes of gradients throughout later micro-batches.
        gradients_after: bytes of gradients at each segment's backward pass in the first micro-batch.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    gradients_before: int
    gradients_after: tuple[int, ...]


def choices(segments: Sequence[Segment], plan: Plan) -> list[str]:
    """Return the name of each segment's choice under a plan."""
    return [
        FIXED if segment.unit is None else choice_name(plan.precision_of(segment.unit), plan.storage_of(segment.unit))
        for segment in segments
    ]


def is_kept(boundary: Boundary, chosen: Sequence[str]) -> bool:
    """Return whether a boundary stays alive from forward to backward."""
    return boundary.held or any(chosen[segment] in names for segment, names in boundary.keepers.items())


def levels(
    gradients: Sequence[int], saved: Sequence[int], boundaries: Sequence[Boundary], kept: Sequence[bool]
) -> Levels:
    """Return the bytes allocated on top of each running segment's own.

    Args:
        gradients: bytes of parameter gradients, per segment.
        saved: bytes saved, per segment.
        boundaries: tensors that pass between segments.
        kept: whether each boundary stays until its backward pass.
    """
    count = len(saved)
    steady, passing = [0] * (count + 1), [0] * (count + 1)
    for boundary, stays in zip(boundaries, kept, strict=True):
        if stays:
            steady[boundary.born + 1] += boundary.size_bytes
        elif boundary.last_use > boundary.born:
            passing[boundary.born + 1] += boundary.size_bytes
            passing[min(boundary.last_use, count - 1) + 1] -= boundary.size_bytes
    forward, backward, base, moving = [], [], 0, 0
    for index in range(count):
        base += steady[index]
        moving += passing[index]
        forward.append(base + moving)
        backward.append(base)
        base += saved[index]
    after = [0] * count
    for index in range(count - 2, -1, -1):
        after[index] = after[index + 1] + gradients[index + 1]
    return Levels(
        forward=tuple(forward),
        backward=tuple(backward),
        gradients_before=sum(gradients),
        gradients_after=tuple(after),
    )


def peak_bytes(profile: Profile, plan: Plan) -> int:
    """Return the predicted peak of a step under a plan, in bytes; of a pipeline, that of the rank with the most.

    Raises:
        ProfileError: if the plan's k is not in the profile.
    """
    if profile.pipeline:
        parts = itertools.chain.from_iterable(rank_parts(profile, plan.accumulation_steps))
        return max(peak_bytes(part.profile, part.plan(plan)) for part in parts)
    table = profile.table_for(plan)
    return profile.static_bytes + table.batch_bytes + step_peak_bytes(table, choices(table.segments, plan))


def step_peak_bytes(table: StepTable, chosen: Sequence[str]) -> int:
    """Return the predicted peak above the static bytes, given each segment's choice."""
    costs = [segment.cost(name) for segment, name in zip(table.segments, chosen, strict=True)]
    around = levels(
        [segment.gradient_bytes for segment in table.segments],
        [cost.saved_bytes for cost in costs],
        table.boundaries,
        [is_kept(boundary, chosen) for boundary in table.boundaries],
    )
    peak = table.update_peak_bytes
    later = table.accumulation_steps > 1
    for index, cost in enumerate(costs):
        peak = max(peak, _segment_peak(cost, around, index, later=later))
    return peak


def _segment_peak(cost: Cost, around: Levels, index: int, *, later: bool) -> int:
    first = max(
        around.forward[index] + cost.forward_peak_bytes[0],
        around.backward[index] + around.gradients_after[index] + cost.backward_peak_bytes[0],
    )
    if not later:
        return first
    second = around.gradients_before + max(
        around.forward[index] + cost.forward_peak_bytes[1],
        around.backward[index] + cost.backward_peak_bytes[1],
    )
    return max(first, second)
