"""Attribution of a traced step's memory to segments: the bytes that each one keeps, and its peaks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autotune.cost_model.memory_model import levels
from autotune.cost_model.profile import Boundary
from autotune.errors import EngineError
from autotune.mechanics.step_trace import Block, Place, StepTrace

# Identifies a boundary in all traces of one k: the segment that allocates it, and its place among what that returns.
BoundaryKey = tuple[int, int]

# A later micro-batch of less than this share of the first one's samples does not show what one as large needs.
_SMALLER = 0.9


@dataclass(slots=True)
class Passing:
    """A boundary in one trace.

    Attributes:
        size: its bytes.
        last_use: last segment whose forward pass needs it; ``None`` if it stays until backward.
        users: segments that receive it as an input.
        keepers: segments that keep it until backward.
        stays: whether it stays until backward.
        shares: the boundaries that are views of the same block, with this one; empty for a block of its own.
    """

    size: int
    last_use: int | None
    users: set[int] = field(default_factory=set)
    keepers: set[int] = field(default_factory=set)
    stays: bool = False
    shares: tuple[BoundaryKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The memory of each segment in one trace.

    Attributes:
        saved: bytes that each segment keeps until backward, without boundaries.
        gradients: bytes of parameter gradients that each backward pass leaves.
        forward_peaks: peak bytes of each forward pass beyond what earlier segments keep, in the first and in later
            micro-batches.
        backward_peaks: the same for each backward pass.
        boundaries: the boundaries by key.
        update_peak: peak bytes outside forward and backward.
    """

    saved: tuple[int, ...]
    gradients: tuple[int, ...]
    forward_peaks: tuple[tuple[int, int], ...]
    backward_peaks: tuple[tuple[int, int], ...]
    boundaries: dict[BoundaryKey, Passing]
    update_peak: int


def attribute(
    trace: StepTrace,
    recomputed: Collection[str],
    gradients: Sequence[int] | None = None,
    silent: Collection[str] = (),
    later_share: float = 1.0,
) -> Attribution:
    """Attribute the memory of a traced step to its segments.

    Args:
        trace: the trace.
        recomputed: names of the units whose activations were recomputed.
        gradients: gradient bytes of each segment from another trace of the same k, so that a shared parameter's
            gradient counts once, although its segment varies from trace to trace; ``None`` takes this trace's.
        silent: names of the units of which the trace does not tell what they save; they keep what they receive if it
            stays until backward.
        later_share: samples of the largest later micro-batch over those of the first one. The peaks of later
            micro-batches are returned as they would be if these were as large.

    Raises:
        EngineError: if the trace has no backward pass or no update.
    """
    count = 2 * len(trace.calls) + 1
    turn, end = _begin_of(trace, "backward"), _begin_of(trace, "update")
    saved, left = [0] * count, [0] * count
    allocates = {"forward": [False] * count, "backward": [False] * count}
    passing, boundaries = _boundaries(trace, recomputed, silent, turn)
    saved[0] = _kept_from_before(trace, turn)
    for block in (block for lives in trace.blocks.values() for block in lives):
        place = trace.place_at(block.born)
        if place is None or place.micro_batch != 0 or place.phase == "update":
            continue
        allocates[place.phase][place.segment] = True
        if place.phase == "forward" and block.died > turn and block not in passing:
            saved[place.segment] += block.size
        elif place.phase == "backward" and block.died > end:
            left[place.segment] += block.size
    for boundary in boundaries.values():
        last = boundary.last_use
        if last is not None and last % 2 == 0 and not allocates["forward"][last]:
            # It was released on the way to the next segment, so it was last used in the previous one.
            boundary.last_use = last - 1
    left = left if gradients is None else list(gradients)
    keys = sorted(boundaries)
    around = levels(
        left,
        saved,
        [as_boundary(key, [boundaries[key]]) for key in keys],
        [boundaries[key].stays for key in keys],
    )
    peaks = _peaks(trace)
    total = around.gradients_before

    def above(phase: str, index: int, base: int, first_gradients: int) -> tuple[int, int]:
        if not allocates[phase][index]:
            return 0, 0
        first = peaks.get((0, phase, index), 0) - base - first_gradients
        later = peaks.get((1, phase, index))
        if later is None:
            return first, 0
        return first, _as_large(first, later - total, base, later_share, left[index])

    return Attribution(
        saved=tuple(saved),
        gradients=tuple(left),
        forward_peaks=tuple(above("forward", i, around.forward[i], 0) for i in range(count)),
        backward_peaks=tuple(above("backward", i, around.backward[i], around.gradients_after[i]) for i in range(count)),
        boundaries=boundaries,
        update_peak=max((level for (_, phase, _), level in peaks.items() if phase == "update"), default=0),
    )


def _as_large(first: int, needed: int, base: int, share: float, gradient: int) -> int:
    """Return the peak bytes of a later micro-batch as they would be if it were as large as the first one.

    Args:
        first: those of the first micro-batch, beyond what earlier segments keep.
        needed: those of the later one, with what earlier segments keep.
        base: bytes that earlier segments keep of the first one.
        share: samples of the later one over those of the first one.
        gradient: bytes of the segment's gradient, beside which a later one may stand until it is added.
    """
    if _SMALLER <= share <= 1:
        return math.ceil(needed / share) - base
    # What grows in proportion is that of the first one; the rest may not grow with samples.
    rest = needed - share * base
    if share > 1:
        return min(first + max(math.ceil(rest - share * first), gradient), needed - base)
    return max(first, min(math.ceil(needed / share) - base, first + math.ceil(max(rest, 0))))


def as_boundary(key: BoundaryKey, seen: Sequence[Passing]) -> Boundary:
    """Return a boundary, merged from several traces, without its keepers.

    Args:
        key: its key.
        seen: the boundary in each trace.
    """
    uses = [passing.last_use for passing in seen if passing.last_use is not None]
    return Boundary(
        born=key[0],
        last_use=max(uses) if uses else max((user for passing in seen for user in passing.users), default=key[0]),
        size_bytes=max(passing.size for passing in seen),
        held=any(passing.stays and not passing.keepers for passing in seen),
        keepers={},
    )


def _begin_of(trace: StepTrace, phase: str) -> float:
    """Return the time at which a phase of a step begins.

    Raises:
        EngineError: if the trace has no such phase.
    """
    places = zip(trace.times, trace.places, strict=True)
    began = (time for time, place in places if place.phase == phase and place.micro_batch >= 0)
    found = next(began, None)
    if found is None:
        raise EngineError(
            f"the traced step has no phase {phase!r}; a custom loop must name its phases with tell_phase()"
        )
    return found


def _kept_from_before(trace: StepTrace, turn: float) -> int:
    """Return the bytes that code before the forward pass, for example another model, has made and keeps beyond it."""
    begun = next(time for time, place in zip(trace.times, trace.places, strict=True) if place.micro_batch == 0)
    lives = (block for blocks in trace.blocks.values() for block in blocks)
    return sum(block.size for block in lives if block.born < begun and block.died > turn)


def _boundaries(
    trace: StepTrace, recomputed: Collection[str], silent: Collection[str], turn: float
) -> tuple[dict[Block, Passing], dict[BoundaryKey, Passing]]:
    """Return the blocks that pass between segments: all of them by block, and those made in forward passes by key."""
    found: dict[Block, Passing] = {}
    for sighting in trace.sightings:
        block = trace.block_at(sighting.address, sighting.time)
        if sighting.role == "saved" or block is None:
            continue
        passing = found.setdefault(block, _passing(trace, block, turn))
        if sighting.role == "input":
            passing.users.add(sighting.place.segment)
            if trace.calls[sighting.place.segment // 2] in recomputed:
                passing.keepers.add(sighting.place.segment)
    for sighting in trace.sightings:
        block = trace.block_at(sighting.address, sighting.time)
        if sighting.role == "saved" and block in found:
            found[block].keepers.add(sighting.place.segment)
    _keep_silently(trace, silent, found)
    return found, _keyed(trace, found)


def _keyed(trace: StepTrace, found: Mapping[Block, Passing]) -> dict[BoundaryKey, Passing]:
    """Return the blocks made in forward passes by key: their places among what their unit returns.

    The order in which blocks are made differs between precisions, in which a unit casts some of its results; and views
    of one block are several blocks once they are cast. So a block returned several times counts in shares.
    """
    keys: dict[Block, list[BoundaryKey]] = {}
    returned: Counter[int] = Counter()
    for sighting in trace.sightings:
        if sighting.role == "output":
            segment = sighting.place.segment
            block = trace.block_at(sighting.address, sighting.time)
            if block is not None and block in found and _segment_of(trace, block) == segment:
                keys.setdefault(block, []).append((segment, returned[segment]))
            returned[segment] += 1
    others = Counter(returned)
    keyed: dict[BoundaryKey, Passing] = {}
    for block, passing in found.items():
        own = _segment_of(trace, block)
        if own is None:
            continue
        if block not in keys:
            keys[block] = [(own, others[own])]
            others[own] += 1
        parts = len(keys[block])
        for number, key in enumerate(keys[block]):
            size = passing.size // parts + (passing.size % parts if number == 0 else 0)
            keyed[key] = replace(passing, size=size, shares=tuple(keys[block]) if parts > 1 else ())
    return keyed


def _segment_of(trace: StepTrace, block: Block) -> int | None:
    """Return the segment whose forward pass has made a block; ``None`` if none has."""
    place = trace.place_at(block.born)
    return place.segment if place is not None and place.phase == "forward" else None


def _keep_silently(trace: StepTrace, silent: Collection[str], found: Mapping[Block, Passing]) -> None:
    """Count units as keepers of the boundaries that stay, if the trace does not tell anything that the units keep.

    One that receives a boundary keeps it; one that has made it, only if no other one does.
    """
    telling = {sighting.place.segment for sighting in trace.sightings if sighting.role == "saved"}
    for role in ("input", "output"):
        for sighting in trace.sightings:
            passing = found.get(block) if (block := trace.block_at(sighting.address, sighting.time)) else None
            if sighting.role != role or passing is None or not passing.stays:
                continue
            segment = sighting.place.segment
            is_silent = trace.calls[segment // 2] in silent and segment not in telling
            if is_silent and (role == "input" or not passing.keepers):
                passing.keepers.add(segment)


def _passing(trace: StepTrace, block: Block, turn: float) -> Passing:
    if block.died > turn:
        return Passing(size=block.size, last_use=None, stays=True)
    place = trace.place_at(block.died)
    return Passing(size=block.size, last_use=None if place is None else place.segment)


def _peaks(trace: StepTrace) -> dict[tuple[int, str, int], int]:
    """Return the peak bytes by micro-batch (0, or 1 for all later ones), phase and segment."""
    peaks: dict[tuple[int, str, int], int] = {}
    events: list[tuple[float, int, Place | int]] = [
        *((time, 1, size) for time, size in trace.changes),
        *((time, 0, place) for time, place in zip(trace.times, trace.places, strict=True)),
    ]
    events.sort(key=lambda event: event[:2])
    level, key = 0, None
    for _, _, event in events:
        if isinstance(event, Place):
            key = None if event.micro_batch < 0 else (min(event.micro_batch, 1), event.phase, event.segment)
        else:
            level += event
        if key is not None:
            peaks[key] = max(peaks.get(key, -math.inf), level)  # type: ignore[assignment]
    return peaks
