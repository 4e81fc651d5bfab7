"""The fewest bytes from which all saved tensors of a recorded computation can be computed again.

Source: minimum vertex cuts by maximum flow, as in PyTorch's partitioner for compiled functions (``min_cut``).
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

_SOURCE, _SINK = 0, 1
# Capacities are 32-bit numbers.
_NEVER = 2**30
# Bytes of one unit of capacity, at least: allocators round to such blocks.
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A storage at one version, with all of its views.

    Attributes:
        nbytes: its bytes; 0 for one that stays in any case.
        made_from: numbers of the groups that it is computed from; ``None`` if it cannot be computed again.
        is_saved: whether the backward pass needs it.
        can_stay: whether it can be kept.
    """

    nbytes: int
    made_from: tuple[int, ...] | None
    is_saved: bool
    can_stay: bool


@functools.lru_cache(maxsize=1024)
def kept_groups(groups: tuple[GroupFacts, ...]) -> frozenset[int]:
    """Return the groups to keep, of all choices with the fewest bytes the one that computes least again.

    Args:
        groups: the groups; those that one is made from come before it.
    """
    if not any(group.is_saved for group in groups):
        return frozenset()
    block = max(_BLOCK, sum(group.nbytes for group in groups) // 2**28)
    edges: list[tuple[int, int, int]] = []
    for number, group in enumerate(groups):
        enters, leaves = 2 + 2 * number, 3 + 2 * number
        edges.append((enters, leaves, -(-group.nbytes // block) if group.can_stay else _NEVER))
        if group.made_from is None:
            edges.append((_SOURCE, enters, _NEVER))
        else:
            edges += [(3 + 2 * other, enters, _NEVER) for other in group.made_from if other != number]
        if group.is_saved:
            edges.append((leaves, _SINK, _NEVER))
    count = 2 + 2 * len(groups)
    rows, columns, capacities = (np.array(column, dtype=np.int32) for column in zip(*edges, strict=True))
    capacity = csr_array((capacities, (rows, columns)), shape=(count, count), dtype=np.int32)
    capacity.eliminate_zeros()
    flow = maximum_flow(capacity, _SOURCE, _SINK, method="dinic").flow
    reaching = _reaching_sink((capacity - flow).tocoo(), count)
    return frozenset(
        number
        for number, group in enumerate(groups)
        if group.can_stay
        and (
            (3 + 2 * number in reaching and 2 + 2 * number not in reaching)
            or (group.made_from is None and group.nbytes == 0)
        )
    )


def _reaching_sink(residual: object, count: int) -> set[int]:
    """Return the nodes from which some capacity to the sink is left."""
    into: list[list[int]] = [[] for _ in range(count)]
    for one, other, left in zip(residual.row, residual.col, residual.data, strict=True):  # type: ignore[attr-defined]
        if left > 0:
            into[other].append(int(one))
    found, waiting = {_SINK}, deque([_SINK])
    while waiting:
        for node in into[waiting.popleft()]:
            if node not in found:
                found.add(node)
                waiting.append(node)
    return found
