"""Steps that take turns: they call different units beside common ones, such as the heads of several tasks.

All kinds of steps are counted as parts of one longer step, which calls the units of all. A unit that a kind leaves out
costs nothing in it, and the most that a segment needs in any kind counts: that is an upper bound for every kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import reduce
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import TypeVar

from autotune.mechanics.step_trace import Phase
from autotune.profiling.attribution import Attribution, BoundaryKey, Passing

Calls = tuple[str, ...]
T = TypeVar("T")


def joined(one: Calls, other: Calls) -> Calls | None:
    """Return an order of calls in which those of two kinds of steps are contained.

    Args:
        one: the units that the steps of one kind call, in order.
        other: the same for another kind.

    Returns:
        The calls; ``None`` if the kinds have no unit in common, or call the common ones in different orders.
    """
    found: list[str] = []
    for kind, begin, end, its_begin, its_end in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        found += one[begin:end]
        found += other[its_begin:its_end] if kind != "equal" else ()
    once = Counter(found) == Counter(one) | Counter(other)
    return tuple(found) if once and set(one) & set(other) else None


def common_order(kinds: Sequence[Calls]) -> Calls | None:
    """Return an order of calls in which those of all kinds of steps are contained, as :func:`joined` does for two.

    Args:
        kinds: the units that steps of each kind call, in order.
    """
    if any(len(set(calls)) < len(calls) for calls in kinds):
        found = reduce(lambda one, other: one and (joined(one, other) or ()), kinds)
        return found or None
    ranks: dict[str, int] = {}
    sorter = TopologicalSorter[str]()
    for calls in kinds:
        if ranks and not ranks.keys() & set(calls):
            return None
        for name in calls:
            ranks.setdefault(name, len(ranks))
            sorter.add(name)
        for one, following in pairwise(calls):
            sorter.add(following, one)
    try:
        sorter.prepare()
    except CycleError:
        return None
    order: list[str] = []
    ready: list[str] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()], key=ranks.__getitem__)
        order.append(ready.pop(0))
        sorter.done(order[-1])
    return tuple(order)


def places_in(order: Calls, calls: Calls) -> list[int]:
    """Return the number that each segment of a step has in a longer one.

    Args:
        order: the calls of the longer step.
        calls: the calls of the step, which the others contain in the same order.
    """
    places, begin = [], 0
    for name in calls:
        begin = order.index(name, begin) + 1
        places += [2 * begin - 2, 2 * begin - 1]
    return [*places, 2 * len(order)]


def moved_seconds(seconds: Mapping[tuple[Phase, int], float], places: Sequence[int]) -> dict[tuple[Phase, int], float]:
    """Return the seconds of a step by phase and segment of a longer step.

    Args:
        seconds: the seconds by phase and segment of the step.
        places: the result of :func:`places_in`.
    """
    return {(phase, places[segment] if segment >= 0 else segment): own for (phase, segment), own in seconds.items()}


def moved(seen: Attribution, places: Sequence[int]) -> Attribution:
    """Return the memory of a step by segment of a longer step.

    Args:
        seen: the memory by segment of the step.
        places: the result of :func:`places_in`.
    """

    def spread(values: Sequence[T], nothing: T) -> tuple[T, ...]:
        found = [nothing] * (places[-1] + 1)
        for place, value in zip(places, values, strict=True):
            found[place] = value
        return tuple(found)

    def key(one: BoundaryKey) -> BoundaryKey:
        return places[one[0]], one[1]

    def passing(one: Passing) -> Passing:
        return replace(
            one,
            last_use=None if one.last_use is None else places[one.last_use],
            users={places[segment] for segment in one.users},
            keepers={places[segment] for segment in one.keepers},
            shares=tuple(map(key, one.shares)),
        )

    return replace(
        seen,
        saved=spread(seen.saved, 0),
        gradients=spread(seen.gradients, 0),
        forward_peaks=spread(seen.forward_peaks, (0, 0)),
        backward_peaks=spread(seen.backward_peaks, (0, 0)),
        boundaries={key(own): passing(one) for own, one in seen.boundaries.items()},
    )
