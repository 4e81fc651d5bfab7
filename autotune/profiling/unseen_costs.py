"""Costs of what was not run: choices are bounded from above or extrapolated, and steps at other k interpolated."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from autotune.choices import HASTENING_STORAGES, STORAGES
from autotune.cost_model.profile import Boundary, Cost, StepTable
from autotune.plan import PlanSpace, Storage
from autotune.units import Unit

# Factor on bytes that were seen in other units.
_UNSEEN_MARGIN = 1.03

_INEXACT = tuple(storage for storage in STORAGES if not storage.exact)
_RECOMPUTING = tuple(storage for storage in STORAGES if storage.recomputes and not storage.keeps_gathered)

# Units of one kind cost the same: a unit's class, and its number of parameters.
UnitKind = tuple[str, int]


class SizedCost(NamedTuple):
    """A cost, and the bytes of the batch with which it was measured."""

    cost: Cost
    batch_bytes: int


class Ratio(NamedTuple):
    """The bytes that a unit saves, divided by those alive while it is recomputed, and the latter."""

    alive_bytes: int
    saved: float


def kind_of(unit: Unit) -> UnitKind:
    """Return the kind of a unit; units of one kind are assumed to cost the same."""
    return unit.kind, unit.num_parameters


def micro_batch_of(accumulation_steps: int, batch_size: int, space: PlanSpace) -> int:
    """Return the number of samples in the largest micro-batch at a k."""
    return -(-batch_size // accumulation_steps) if space.k_splits else batch_size


# Combinations of costs.


def combined(
    costs: Sequence[Cost], seconds: Callable[[Sequence[float]], float], size: Callable[[Sequence[int]], int]
) -> Cost:
    """Return a cost that combines several.

    Args:
        costs: the costs.
        seconds: combines their seconds.
        size: combines their bytes.
    """

    def peaks(pairs: Sequence[tuple[int, int]]) -> tuple[int, int]:
        return size([first for first, _ in pairs]), size([later for _, later in pairs])

    return Cost(
        forward_s=seconds([cost.forward_s for cost in costs]),
        backward_s=seconds([cost.backward_s for cost in costs]),
        saved_bytes=size([cost.saved_bytes for cost in costs]),
        forward_peak_bytes=peaks([cost.forward_peak_bytes for cost in costs]),
        backward_peak_bytes=peaks([cost.backward_peak_bytes for cost in costs]),
    )


def most(costs: Sequence[Cost]) -> Cost:
    """Return the cost of a piece that was measured several times: median seconds, largest bytes."""
    return combined(costs, statistics.median, max)


def none_faster_than_saving(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """Return the costs with every storage taking at least as long as saving: a shorter time can only be noise.

    Compiled units and those that keep their weights gathered may be faster.
    """
    raised = dict(costs)
    for name, cost in costs.items():
        precision, _, storage = name.partition("/")
        saving = None if storage in HASTENING_STORAGES else costs.get(f"{precision}/{Storage.SAVE}")
        if saving is not None and cost.seconds < saving.seconds:
            raised[name] = replace(cost, backward_s=cost.backward_s + saving.seconds - cost.seconds)
    return raised


# Upper bounds from steps at the same k.


def lowered_by_like_units(
    seen: Sequence[Mapping[str, SizedCost]], units: Sequence[Unit | None]
) -> list[dict[str, Cost]]:
    """Return each segment's costs, with fewer bytes where a unit of its kind was traced with a larger batch.

    Costs from smaller batches were scaled up and are upper bounds; those from a larger batch are more accurate.

    Args:
        seen: costs of each segment by choice.
        units: the unit of each segment; ``None`` for code between units.
    """
    kinds = [None if unit is None else kind_of(unit) for unit in units]
    best: dict[tuple[UnitKind, str], tuple[int, list[Cost]]] = {}
    for kind, own in zip(kinds, seen, strict=True):
        for name, (cost, size) in own.items():
            if kind is None:
                continue
            known = best.get((kind, name))
            if known is None or size > known[0]:
                best[kind, name] = size, [cost]
            elif size == known[0]:
                known[1].append(cost)

    def lowered(kind: UnitKind, name: str, own: SizedCost) -> Cost:
        size, like = best[kind, name]
        if size <= own.batch_bytes:
            return own.cost
        return combined(
            [own.cost, most(like)],
            lambda pair: pair[0],
            lambda pair: min(pair[0], int(pair[1] * _UNSEEN_MARGIN)),
        )

    return [
        {name: lowered(kind, name, one) if kind and _is_usual(name) else one.cost for name, one in own.items()}
        for kind, own in zip(kinds, seen, strict=True)
    ]


def _is_usual(choice: str) -> bool:
    """Return whether a choice saves or recomputes: other storages may do other work in each unit of a kind."""
    return choice.partition("/")[2] in (Storage.SAVE, *_RECOMPUTING)


def saving_ratios(costs: Sequence[Mapping[str, Cost]], units: Sequence[Unit | None]) -> dict[UnitKind, list[Ratio]]:
    """Return, by kind of unit, the ratios of the bytes that units save to those alive while they are recomputed.

    Args:
        costs: costs of each segment by choice; only units with costs of both saving and recomputing count.
        units: the unit of each segment; ``None`` for code between units.
    """
    ratios: dict[UnitKind, list[Ratio]] = {}
    for unit, own in zip(units, costs, strict=True):
        if unit is None:
            continue
        for precision in {name.partition("/")[0] for name in own}:
            save, again = _saved_and_recomputed(own, precision)
            if save is not None and again is not None and (alive := max(again.backward_peak_bytes)) > 0:
                ratios.setdefault(kind_of(unit), []).append(Ratio(alive, save.saved_bytes / alive))
    return ratios


def with_bounds(costs: Mapping[str, Cost], ratios: Sequence[Ratio]) -> dict[str, Cost]:
    """Return a unit's costs with an upper bound for saving or recomputing, if only one of them was run.

    A storage of another kind must have been run in this unit: like units may do other work. If all like units were
    handed less, they tell nothing: what does not depend on that, such as gradients of weights, is a larger share of
    what is alive. Among several calls of a unit it is a smaller one for the call whose gradient of the weights stays.

    Args:
        costs: costs by choice.
        ratios: the result of :func:`saving_ratios` for its kind.
    """
    filled = dict(costs)
    for precision in dict.fromkeys(name.partition("/")[0] for name in costs):
        save, again = _saved_and_recomputed(costs, precision)
        if save is None and again is not None:
            least = max(again.backward_peak_bytes) / _UNSEEN_MARGIN
            is_known = any(one.alive_bytes >= least for one in ratios)
            ratio = min(max(one.saved for one in ratios) * _UNSEEN_MARGIN, 1.0) if is_known else 1.0
            filled[f"{precision}/{Storage.SAVE}"] = _save_bound(again, ratio)
        elif save is not None and again is None:
            filled |= {f"{precision}/{storage}": _recompute_bound(save) for storage in _RECOMPUTING}
    return filled


def _saved_and_recomputed(costs: Mapping[str, Cost], precision: str) -> tuple[Cost | None, Cost | None]:
    """Return the costs of saving and of recomputing in a precision; ``None`` for what was not run."""
    again = (costs.get(f"{precision}/{storage}") for storage in _RECOMPUTING)
    return costs.get(f"{precision}/{Storage.SAVE}"), next(filter(None, again), None)


def _save_bound(again: Cost, ratio: float) -> Cost:
    """Return an upper bound on the cost of saving, from recomputing, when all that would be saved is alive too."""
    alive = again.backward_peak_bytes
    return Cost(
        forward_s=again.forward_s,
        backward_s=max(again.backward_s - again.forward_s, 0.0),
        saved_bytes=int(max(alive) * ratio),
        forward_peak_bytes=_larger(alive, again.forward_peak_bytes),
        backward_peak_bytes=alive,
    )


def _recompute_bound(save: Cost) -> Cost:
    """Return an upper bound on the cost of recomputing, from saving: backward includes another forward pass."""
    return Cost(
        forward_s=save.forward_s,
        backward_s=save.backward_s + save.forward_s,
        saved_bytes=0,
        forward_peak_bytes=save.forward_peak_bytes,
        backward_peak_bytes=_larger(save.forward_peak_bytes, save.backward_peak_bytes),
    )


def _larger(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), max(one[1], other[1])


# Estimates from steps at other k.


def with_missing_choices(tables: Sequence[StepTable]) -> tuple[StepTable, ...]:
    """Return the tables with costs for choices that ran out of memory, from two smaller micro-batches.

    Bytes are nearly linear in the size of the micro-batch, and are extrapolated; seconds are those of the nearest
    table. If fewer than two of them have the choice, it stays without a cost.

    Args:
        tables: tables of all profiled k, ascending.
    """
    together = zip(*(table.segments for table in tables), strict=True)
    names = [{name for segment in segments for name in segment.costs} for segments in together]
    filled = []
    for number, table in enumerate(tables):
        if all(set(segment.costs) == known for segment, known in zip(table.segments, names, strict=True)):
            filled.append(table)
            continue
        segments = []
        for index, segment in enumerate(table.segments):
            costs = dict(segment.costs)
            for name in sorted(names[index] - set(costs)):
                known_at = [
                    (other.micro_batch, other.segments[index].costs[name])
                    for other in tables[number + 1 :]
                    if name in other.segments[index].costs
                ]
                if len(known_at) >= 2:
                    costs[name] = _extrapolated(table.micro_batch, known_at[0], known_at[1])
            segments.append(replace(segment, costs=costs))
        boundaries = _with_keepers_of(table, tables[number + 1 :])
        filled.append(replace(table, segments=tuple(segments), boundaries=boundaries))
    return tuple(filled)


def _extrapolated(micro_batch: int, near: tuple[int, Cost], far: tuple[int, Cost]) -> Cost:
    (near_size, one), (far_size, two) = near, far
    if near_size == far_size:
        return one
    share = (micro_batch - near_size) / (near_size - far_size)
    return combined([one, two], lambda pair: pair[0], lambda pair: round(pair[0] + (pair[0] - pair[1]) * share))


def with_all_ks(tables: Sequence[StepTable], batch_size: int, space: PlanSpace) -> tuple[StepTable, ...]:
    """Return the tables and interpolated ones for every k between two of them.

    Bytes are interpolated in the size of the micro-batch, and seconds in k, since a step takes some time for its batch
    and some for each micro-batch. A peak is the maximum of several linear functions, so interpolation never yields too
    little; but an inexact storage's temporary bytes have a limit, so that its peaks are bounded from above instead.

    Args:
        tables: tables of the profiled k, ascending.
        batch_size: samples in a batch.
        space: the plans that are allowed, with all k.
    """
    known_ks = [table.accumulation_steps for table in tables]
    found = {table.accumulation_steps: table for table in tables}
    for k in space.accumulation_choices:
        low = max((number for number, own in enumerate(known_ks) if own < k), default=None)
        if k in found or low is None or low + 1 == len(tables):
            continue
        table = _between(tables[low], tables[low + 1], k, micro_batch_of(k, batch_size, space))
        if table is not None:
            found[k] = table
    return tuple(found[k] for k in sorted(found))


def _between(low: StepTable, high: StepTable, k: int, micro_batch: int) -> StepTable | None:
    """Return the table of a k between two others; ``None`` if these have different segments or boundaries."""
    if _shape(low) != _shape(high):
        return None
    of_k = (k - low.accumulation_steps) / (high.accumulation_steps - low.accumulation_steps)
    narrower = low.micro_batch - high.micro_batch
    of_size = (low.micro_batch - micro_batch) / narrower if narrower else of_k

    def line(pair: Sequence[int]) -> int:
        return math.ceil(pair[0] + (pair[1] - pair[0]) * of_size)

    def limited(pair: Sequence[int]) -> int:
        """Return at least a peak that grows with the size, but less than in proportion to it."""
        return max(line(pair), min(pair[0], math.ceil(pair[1] * micro_batch / high.micro_batch)))

    def seconds(pair: Sequence[float]) -> float:
        return pair[0] + (pair[1] - pair[0]) * of_k

    def later(own: int, second: tuple[int, int]) -> tuple[int, int]:
        """Return a peak in the first and in later micro-batches, which differ as in the second table."""
        return own, max(0, second[1] + own - second[0])

    def between(name: str, first: Cost, second: Cost) -> Cost:
        cost = combined([first, second], seconds, line)
        if name.partition("/")[2] in _INEXACT:
            cost = replace(combined([first, second], seconds, limited), saved_bytes=cost.saved_bytes)
        if low.accumulation_steps > 1:
            return cost
        # At k = 1 there are no later micro-batches. Their difference does not depend on their size.
        return replace(
            cost,
            forward_peak_bytes=later(cost.forward_peak_bytes[0], second.forward_peak_bytes),
            backward_peak_bytes=later(cost.backward_peak_bytes[0], second.backward_peak_bytes),
        )

    # Gradient bytes come from the second table: at k = 1, ranks shard gradients at once, so none may remain.
    segments = [
        replace(other, costs={name: between(name, cost, other.costs[name]) for name, cost in one.costs.items()})
        for one, other in zip(low.segments, high.segments, strict=True)
    ]
    boundaries = [
        replace(
            one,
            last_use=max(one.last_use, other.last_use),
            size_bytes=line([one.size_bytes, other.size_bytes]),
            held=one.held or other.held,
        )
        for one, other in zip(_with_keepers_of(low, [high]), high.boundaries, strict=True)
    ]
    return StepTable(
        accumulation_steps=k,
        micro_batch=micro_batch,
        segments=tuple(segments),
        boundaries=tuple(boundaries),
        update_peak_bytes=math.ceil(seconds([low.update_peak_bytes, high.update_peak_bytes])),
        update_s=seconds([low.update_s, high.update_s]),
        batch_bytes=math.ceil(seconds([low.batch_bytes, high.batch_bytes])),
    )


def _shape(table: StepTable) -> tuple[object, object]:
    segments = [(segment.unit, set(segment.costs)) for segment in table.segments]
    return segments, [boundary.born for boundary in table.boundaries]


def _with_keepers_of(table: StepTable, others: Sequence[StepTable]) -> tuple[Boundary, ...]:
    """Return a table's boundaries, with the keepers in other tables added."""
    boundaries = list(table.boundaries)
    for other in others:
        if len(other.boundaries) != len(boundaries):
            continue
        for index, (own, seen) in enumerate(zip(boundaries, other.boundaries, strict=True)):
            keepers = {
                segment: tuple(dict.fromkeys((*own.keepers.get(segment, ()), *seen.keepers.get(segment, ()))))
                for segment in {**own.keepers, **seen.keepers}
            }
            boundaries[index] = replace(own, keepers=keepers)
    return tuple(boundaries)
