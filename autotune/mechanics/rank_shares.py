"""Division of a step's samples between ranks, so that all ranks together make the update of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.errors import JobError
from autotune.mechanics.cutting import Count, Cutting, Shares, count_items, num_samples, weights

# The micro-batches of each rank, the same number for all.
Grid = list[list[Any]]


def cut_for_ranks(batch: Any, ranks: int, k: int, cutting: Cutting) -> Grid:
    """Cut a batch into shares of consecutive samples, one per rank, and each share into k micro-batches.

    Args:
        batch: any tree of tensors with samples in dimension 0.
        ranks: number of ranks.
        k: accumulation steps; fewer if a share has fewer samples.
        cutting: how the job's batches are cut.

    Raises:
        JobError: if the batch has fewer samples than there are ranks.
    """
    samples = _require_one_each(batch, ranks)
    return [cutting.pieces(part, min(k, samples // ranks)) for part in cutting.dealt(batch, ranks)]


def deal_to_ranks(batches: Sequence[Any], ranks: int, cutting: Cutting) -> Grid:
    """Cut each of several batches, which are the micro-batches of a step, into one share per rank.

    Args:
        batches: trees of tensors with samples in dimension 0.
        ranks: number of ranks.
        cutting: how the job's batches are cut.

    Raises:
        JobError: if a batch has fewer samples than there are ranks.
    """
    for batch in batches:
        _require_one_each(batch, ranks)
    parts = [cutting.dealt(batch, ranks) for batch in batches]
    return [[part[rank] for part in parts] for rank in range(ranks)]


def shares_of(grid: Grid, rank: int, count: Count | None) -> tuple[Shares, list[bool]]:
    """Return a rank's micro-batches of a step, and which micro-batches of all ranks have loss-bearing items.

    Gradients are averaged between ranks. A rank runs a loss-bearing micro-batch of any rank at weight 0 in place of one
    of its own that has no loss-bearing items, because all ranks must run as many.

    Args:
        grid: micro-batches of each rank.
        rank: number of this rank.
        count: the job's own count of loss-bearing items; ``None`` counts samples.

    Raises:
        JobError: if the count is not a whole number >= 0.
    """
    every = [piece for row in grid for piece in row]
    counts = [count_items(piece, count) for piece in every]
    scaled = [weight * len(grid) for weight in weights(counts)]
    bears = [found > 0 for found in counts]
    bearing = [piece for piece, is_bearing in zip(every, bears, strict=True) if is_bearing]
    steps = len(grid[0])
    own = range(rank * steps, (rank + 1) * steps)
    found = Shares(
        here=tuple((every[i] if bears[i] else bearing[0], scaled[i]) for i in own if bearing),
        items=sum(counts),
        samples=tuple(num_samples(piece) for piece in bearing),
        weights=tuple(weight for weight in scaled if weight > 0),
    )
    return found, bears


def _require_one_each(batch: Any, ranks: int) -> int:
    samples = num_samples(batch)
    if samples < ranks:
        raise JobError(f"a batch has {samples} samples for {ranks} ranks", allowed="at least one sample for each rank")
    return samples
