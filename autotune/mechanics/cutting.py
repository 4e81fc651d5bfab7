"""Cutting of batches into micro-batches, and their weights: by samples in their order, or to about equal cost.

The update is the same either way, up to rounding: micro-batches are weighed by their loss-bearing items. Cutting by
cost changes the order of samples, so that random operations such as dropout draw other numbers for each of them, and
operations over samples such as BatchNorm see others together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autotune.errors import JobError
from autotune.job import Job, Split
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.trees import map_tensors, tensors

Count = Callable[[Any], int]
SampleCost = Callable[[Any], Any]
Trim = Callable[[Any], Any]
# Bisections of the largest cost of a micro-batch, which then is known to a millionth.
_BISECTIONS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """How a batch is cut.

    Attributes:
        split: ``samples``: consecutive samples, as many in each micro-batch; ``tokens``: about equal cost in each.
        count: counts a batch's loss-bearing items; ``None`` counts samples.
        sample_cost: ``(batch) -> one number >= 0 per sample`` that tokens are to be balanced by; ``None`` counts the
            loss-bearing items of each sample. Where attention takes a large part, give the cost of a sequence of each
            length, such as ``length + length**2 / (12 * width)``.
        trim: ``(micro-batch) -> micro-batch`` without padding that none of its samples needs; ``None`` leaves padding.
    """

    split: Split = "samples"
    count: Count | None = None
    sample_cost: SampleCost | None = None
    trim: Trim | None = None

    @classmethod
    def of(cls, job: Job) -> Cutting:
        """Return how a job's batches are cut."""
        return cls(split=job.split, count=job.count, sample_cost=job.sample_cost, trim=job.trim)

    @property
    def by_cost(self) -> bool:
        """Return whether micro-batches are to cost about the same."""
        return self.split == "tokens"

    def pieces(self, batch: Any, pieces: int, whole: Collection[int] = ()) -> list[Any]:
        """Cut a batch into micro-batches; a batch that stays whole is not changed.

        By cost, samples of like cost are put together if there is a trim, since their padding then goes. Otherwise each
        micro-batch gets as many samples, to within one, and about the same cost.

        Args:
            batch: any tree of tensors with samples in dimension 0.
            pieces: how many, at least 1; a batch of fewer samples gives as many as it has samples.
            whole: indices, among the batch's tensors, of those that are never cut.

        Raises:
            JobError: if the batch has no samples, a cost is no number >= 0, or trimming dropped a sample or an item.
        """
        found = self.padded(batch, pieces, whole)
        return found if len(found) == 1 or not self.by_cost else [self.trimmed(piece) for piece in found]

    def padded(self, batch: Any, pieces: int, whole: Collection[int] = ()) -> list[Any]:
        """Cut a batch as :meth:`pieces` does, and leave all padding; by cost, the shortest samples come last."""
        pieces = min(pieces, num_samples(batch))
        if pieces == 1 or not self.by_cost:
            return split(batch, pieces, whole)
        partition = even if self.trim is None else alike
        return [_taken(batch, rows, whole) for rows in partition(self.costs(batch, whole), pieces)]

    def dealt(self, batch: Any, ranks: int) -> list[Any]:
        """Cut a batch between ranks: by cost, each gets as many samples, to within one, and about the same cost."""
        ranks = min(ranks, num_samples(batch))
        if ranks == 1 or not self.by_cost:
            return split(batch, ranks)
        return [_taken(batch, rows, ()) for rows in even(self.costs(batch), ranks)]

    def costs(self, batch: Any, whole: Collection[int] = ()) -> list[float]:
        """Return the cost of each sample.

        Raises:
            JobError: if there is not one number >= 0 per sample.
        """
        samples = num_samples(batch)
        if self.sample_cost is None:
            alone = (_taken(batch, slice(row, row + 1), whole) for row in range(samples))
            return [float(count_items(one, self.count)) for one in alone]
        found = self.sample_cost(batch)
        values = found.tolist() if hasattr(found, "tolist") else found
        good = isinstance(values, Sequence) and len(values) == samples
        good = good and all(isinstance(value, int | float) and 0 <= value < math.inf for value in values)
        if not good:
            shown = f"sample_cost returned {str(values)[:80]} for {samples} samples"
            raise JobError(shown, where="sample_cost", allowed="one number >= 0 per sample")
        return [float(value) for value in values]

    def trimmed(self, piece: Any) -> Any:
        """Return a micro-batch without its padding.

        Raises:
            JobError: if that dropped a sample or an item.
        """
        if self.trim is None:
            return piece
        trimmed = self.trim(piece)
        for what, count in (("samples", num_samples), ("items", self._items)):
            if (left := count(trimmed)) != (had := count(piece)):
                raise JobError(f"trim left {left} of {had} {what}", where="trim", allowed="all of them")
        return trimmed

    def _items(self, piece: Any) -> int:
        return count_items(piece, self.count)


def even(costs: Sequence[float], pieces: int) -> list[list[int]]:
    """Return the samples of each of several micro-batches with as many samples, to within one, and about equal cost.

    The most costly sample left goes to the micro-batch that costs least so far and still takes samples.

    Args:
        costs: cost of each sample, >= 0.
        pieces: how many micro-batches, at least 1 and at most as many as there are samples.

    Returns:
        For each micro-batch its samples, in ascending order.

    Source: longest-processing-time-first rule, Graham 1969 (doi:10.1137/0117039), with equal numbers.
    """
    least, more = divmod(len(costs), pieces)
    rows: list[list[int]] = [[] for _ in range(pieces)]
    sums = [0.0] * pieces
    for row in sorted(range(len(costs)), key=lambda one: -costs[one]):
        full = sum(len(one) > least for one in rows) >= more
        free = [n for n in range(pieces) if len(rows[n]) < least + (not full)]
        chosen = min(free, key=lambda n: (sums[n], len(rows[n]), n))
        rows[chosen].append(row)
        sums[chosen] += costs[row]
    return [sorted(one) for one in rows]


def alike(costs: Sequence[float], pieces: int) -> list[list[int]]:
    """Return the samples of each of several micro-batches whose samples cost alike; the most costly ones come first.

    A micro-batch is taken to cost its number of samples times its most costly sample, since the others are padded to
    that; the largest of these costs is as small as it can be.

    Args:
        costs: cost of each sample, >= 0.
        pieces: how many micro-batches, at least 1 and at most as many as there are samples.

    Returns:
        For each micro-batch its samples, in ascending order.
    """
    order = sorted(range(len(costs)), key=lambda one: -costs[one])
    ordered = [costs[row] for row in order]
    low, high = 0.0, max(ordered) * len(ordered)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_starts(ordered, middle)) <= pieces else (middle, high)
    starts = _starts(ordered, high)
    while len(starts) < pieces:
        starts = _halved(ordered, starts)
    return [sorted(order[begin:end]) for begin, end in itertools.pairwise([*starts, len(order)])]


def _starts(ordered: Sequence[float], most: float) -> list[int]:
    """Return where each micro-batch begins if each takes as many samples as cost at most so much, and at least one."""
    starts, at = [], 0
    while at < len(ordered):
        starts.append(at)
        cost = ordered[at]
        at += max(int(most / cost), 1) if cost > 0 else len(ordered)
    return starts


def _halved(ordered: Sequence[float], starts: list[int]) -> list[int]:
    """Return the beginnings with the most costly micro-batch of at least two samples cut into halves."""
    spans = [(begin, end) for begin, end in itertools.pairwise([*starts, len(ordered)]) if end - begin > 1]
    begin, end = max(spans, key=lambda span: ((span[1] - span[0]) * ordered[span[0]], span[1] - span[0]))
    return sorted([*starts, (begin + end + 1) // 2])


def _taken(batch: Any, rows: Sequence[int] | slice, whole: Collection[int]) -> Any:
    """Return some samples of a batch, copies unless they are a slice; others' tensors, and those named, stay whole."""
    samples, numbers = num_samples(batch), itertools.count()

    def take(leaf: torch.Tensor) -> torch.Tensor:
        has_samples = next(numbers) not in whole and leaf.dim() > 0 and leaf.shape[0] == samples
        if not has_samples:
            return leaf
        return leaf[rows if isinstance(rows, slice) else torch.tensor(rows, device=leaf.device)]

    return map_tensors(take, batch)


def num_samples(batch: Any) -> int:
    """Return a batch's sample count: the first dimension of its first tensor that has one.

    Raises:
        JobError: if the batch holds no such tensor, or no sample.
    """
    samples = next((leaf.shape[0] for leaf in tensors(batch) if leaf.dim() > 0), 0)
    if samples == 0:
        raise JobError("a batch has no samples", where="batches", allowed="tensors with samples in dimension 0")
    return int(samples)


def split(batch: Any, pieces: int, whole: Collection[int] = ()) -> list[Any]:
    """Cut a batch into micro-batches whose sizes differ by at most one sample.

    Tensors whose first dimension is the batch's sample count are cut; everything else is passed whole to each piece. A
    batch of fewer samples than ``pieces`` gives as many pieces as it has samples.

    Args:
        batch: any tree of tensors with samples in dimension 0.
        pieces: how many micro-batches, at least 1.
        whole: indices, among the batch's tensors, of those that are never cut.

    Returns:
        The micro-batches, in order; views, not copies.

    Raises:
        JobError: if the batch has no samples.
    """
    samples = num_samples(batch)
    pieces = min(pieces, samples)
    if pieces == 1:
        return [batch]

    def piece(index: int) -> Any:
        numbers = itertools.count()

        def cut(leaf: torch.Tensor) -> torch.Tensor:
            has_samples = next(numbers) not in whole and leaf.dim() > 0 and leaf.shape[0] == samples
            return leaf.tensor_split(pieces)[index] if has_samples else leaf

        return map_tensors(cut, batch)

    return [piece(index) for index in range(pieces)]


def unevenness(samples: int, pieces: int, *, later: bool = False) -> float:
    """Return the size of the largest piece of a batch over that of an equal share: 16/9 for 9 samples in 8 pieces.

    Args:
        samples: samples in the batch; 0 for equal pieces.
        pieces: how many pieces :func:`split` is asked for, at least 1.
        later: whether the largest is wanted of all pieces but the first; 8/9 in the example.
    """
    if not samples:
        return 1.0
    cut = min(pieces, samples)
    largest = samples // cut + (samples % cut > (later and cut > 1))
    return largest * pieces / samples


class WholeTensors:
    """Record of a run's tensors whose first dimension is not their batch's number of samples.

    Such a tensor, for example class weights, is never cut, even if the two numbers are equal by chance.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], set[int]] = {}

    def note(self, batch: Any) -> None:
        """Add a batch; one without samples is ignored."""
        try:
            samples = num_samples(batch)
        except any_error():  # the loop may know what to do with a batch that nothing here can walk over
            return
        leaves = enumerate(tensors(batch))
        self.of(batch).update(n for n, leaf in leaves if leaf.dim() == 0 or leaf.shape[0] != samples)

    def split(self, batch: Any, pieces: int) -> list[Any]:
        """Cut a batch as :func:`split` does, except for recorded tensors."""
        return split(batch, pieces, self.of(batch))

    def of(self, batch: Any) -> set[int]:
        """Return the recorded indices, which batches share whose tensors have the same dtypes and dimensions."""
        return self._found.setdefault(tuple((leaf.dtype, leaf.dim()) for leaf in tensors(batch)), set())


def count_items(batch: Any, count: Count | None) -> int:
    """Return the number of a batch's loss-bearing items by the job's own count, or of its samples.

    Raises:
        JobError: if the count is not a whole number >= 0.
    """
    if count is None:
        return num_samples(batch)
    items: Any = count(batch)
    if isinstance(items, torch.Tensor) and items.numel() == 1:
        items = items.item()
    whole = isinstance(items, int | float | np.integer) and not isinstance(items, bool) and float(items).is_integer()
    if not whole or items < 0:
        raise JobError(f"count returned {items!r}", where="count", allowed="a whole number >= 0")
    return int(items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The micro-batches of a step that run in this process.

    Attributes:
        here: micro-batches that run in this process, each with the factor on its mean loss.
        items: loss-bearing items of the whole step.
        samples: samples of each loss-bearing micro-batch of the step, in any process.
        weights: the factor on the mean loss of each of these micro-batches.
    """

    here: tuple[tuple[Any, float], ...]
    items: int
    samples: tuple[int, ...]
    weights: tuple[float, ...]


def shares(pieces: Sequence[Any], count: Count | None) -> Shares:
    """Return the shares of a step whose micro-batches all run in this process.

    A micro-batch without loss-bearing items has weight 0 and no mean loss; it is left out.

    Args:
        pieces: the step's micro-batches.
        count: the job's own count of loss-bearing items; ``None`` counts samples.

    Raises:
        JobError: if the count is not a whole number >= 0.
    """
    counts = [count_items(piece, count) for piece in pieces]
    here = [(piece, weight) for piece, weight in zip(pieces, weights(counts), strict=True) if weight > 0]
    return Shares(
        here=tuple(here),
        items=sum(counts),
        samples=tuple(num_samples(piece) for piece, _ in here),
        weights=tuple(weight for _, weight in here),
    )


def weights(counts: Sequence[int]) -> list[float]:
    """Return each micro-batch's share of the loss-bearing items; zeros if there are none.

    Source: eq. 4 of the paper for equal counts; weighting by items keeps it exact for unequal ones
    (transformers#34191).
    """
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]
