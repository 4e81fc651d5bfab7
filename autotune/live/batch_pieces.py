"""Cutting of a live run's batches into micro-batches, and the weight of each.

A batch that cannot be read is passed on whole: the caller's loop may be able to use it.
"""

from __future__ import annotations

from typing import Any

from autotune.errors import AttachError, JobError
from autotune.mechanics import stepping
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.stepping import Count, WholeTensors


def cut(batch: Any, k: int, count: Count | None, whole: WholeTensors) -> list[tuple[Any, float]]:
    """Return a batch in k pieces, each with its share of the batch's items; pieces without items are left out.

    Args:
        batch: any tree of tensors with samples in dimension 0.
        k: number of pieces.
        count: counts the loss-bearing items of a piece; ``None`` counts samples.
        whole: records which tensors are never cut.

    Raises:
        AttachError: if the count is not a whole number, or 0 for the whole batch.
    """
    if k == 1 and count is None:
        return [(batch, 1.0)]
    pieces = _pieces(batch, k, whole)
    counts = [counted(piece, count) for piece in pieces]
    if not sum(counts):
        raise nothing_to_learn()
    weights = [1.0] if len(pieces) == 1 else stepping.weights(counts)
    return [(piece, weight) for piece, weight in zip(pieces, weights, strict=True) if weight > 0]


def nothing_to_learn() -> AttachError:
    """Return the error for a batch without loss-bearing items."""
    return AttachError(
        "count returned 0 for a whole batch", where="micro_batches", allowed="batches with items to learn from"
    )


def _pieces(batch: Any, k: int, whole: WholeTensors) -> list[Any]:
    """Return a batch in k pieces; in one piece if it cannot be cut."""
    try:
        return whole.split(batch, k)
    except any_error():  # see the module's docstring
        return [batch]


def num_samples(batch: Any) -> int:
    """Return the number of samples in a batch; 1 if it cannot be read."""
    try:
        return stepping.num_samples(batch)
    except any_error():  # see the module's docstring
        return 1


def counted(piece: Any, count: Count | None) -> int:
    """Return the number of loss-bearing items in a piece.

    Raises:
        AttachError: if the user's count is not a whole number.
    """
    if count is None:
        return num_samples(piece)
    try:
        return stepping.count_items(piece, count)
    except JobError as error:
        raise AttachError(error.problem, where="micro_batches", allowed=error.allowed) from error
