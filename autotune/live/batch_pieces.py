"""Cutting of a live run's batches into micro-batches, and the weight of each.

A batch that cannot be read is passed on whole: the caller's loop may be able to use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from autotune.errors import AttachError, JobError
from autotune.job import Split
from autotune.mechanics.cutting import Count, Cutting, SampleCost, Trim, WholeTensors, count_items, num_samples, weights
from autotune.mechanics.loop_signals import any_error


@dataclass(frozen=True, slots=True)
class Pieces:
    """Micro-batches of a batch.

    Attributes:
        weighed: each with its share of the batch's items; those without items are left out.
        items: the batch's loss-bearing items; ``None`` if they were not counted.
    """

    weighed: list[tuple[Any, float]]
    items: int | None


def cutting_of(count: Count | None, split: str, sample_cost: SampleCost | None, trim: Trim | None) -> Cutting:
    """Return how a caller's batches are cut.

    Raises:
        AttachError: if the split is unknown, or it needs the tokens of a sample and nothing tells them.
    """
    allowed = "samples; or tokens, with count= or sample_cost="
    if split == "samples" or (split == "tokens" and (count is not None or sample_cost is not None)):
        return Cutting(split=cast("Split", split), count=count, sample_cost=sample_cost, trim=trim)
    raise AttachError(f"split is {split!r}", where="micro_batches", allowed=allowed)


def cut(batch: Any, k: int, cutting: Cutting, whole: WholeTensors) -> Pieces:
    """Return a batch in k pieces.

    Args:
        batch: any tree of tensors with samples in dimension 0.
        k: number of pieces.
        cutting: how to cut it.
        whole: records which tensors are never cut.

    Raises:
        AttachError: if the count is not a whole number, or 0 for the whole batch, or the batch cannot be cut by cost.
    """
    if k == 1 and cutting.count is None:
        return Pieces([(batch, 1.0)], None)
    pieces = _pieces(batch, k, cutting, whole)
    counts = [counted(piece, cutting.count) for piece in pieces]
    if not sum(counts):
        raise nothing_to_learn()
    factors = [1.0] if len(pieces) == 1 else weights(counts)
    weighed = [(piece, factor) for piece, factor in zip(pieces, factors, strict=True) if factor > 0]
    return Pieces(weighed, None if cutting.count is None else sum(counts))


def nothing_to_learn() -> AttachError:
    """Return the error for a batch without loss-bearing items."""
    return AttachError(
        "count returned 0 for a whole batch", where="micro_batches", allowed="batches with items to learn from"
    )


def _pieces(batch: Any, k: int, cutting: Cutting, whole: WholeTensors) -> list[Any]:
    """Return a batch in k pieces; in one piece if it cannot be cut by samples."""
    if cutting.by_cost:
        try:
            return cutting.pieces(batch, k, whole.of(batch))
        except JobError as error:
            raise AttachError(error.problem, where="micro_batches", allowed=error.allowed) from error
    try:
        return whole.split(batch, k)
    except any_error():  # see the module's docstring
        return [batch]


def samples_or_one(batch: Any) -> int:
    """Return the number of samples in a batch; 1 if it cannot be read."""
    try:
        return num_samples(batch)
    except any_error():  # see the module's docstring
        return 1


def counted(piece: Any, count: Count | None) -> int:
    """Return the number of loss-bearing items in a piece.

    Raises:
        AttachError: if the user's count is not a whole number.
    """
    if count is None:
        return samples_or_one(piece)
    try:
        return count_items(piece, count)
    except JobError as error:
        raise AttachError(error.problem, where="micro_batches", allowed=error.allowed) from error
