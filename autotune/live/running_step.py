"""The state of a live run's optimizer step between its first batch and its update."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from autotune.mechanics.loop_signals import any_error
from autotune.profiling.step_signature import Contents, contents_of


@dataclass(slots=True)
class RunningStep:
    """State of the step that is running.

    Attributes:
        began: reading of ``time.perf_counter()`` at its beginning, in seconds.
        own_s: seconds of the step that the tuner took for itself.
        away_s: seconds between its batches, in which the caller loads the next batch or evaluates.
        left: reading of the clock when ``step()`` returned before the last batch; ``None`` while a batch runs.
        wanted: number of batches that the step consumes; more than one under adaptive batching.
        batches: number of batches so far.
        samples: number of samples so far.
        first: contents of its first batch; ``None`` where the batch cannot be read.
        items: loss-bearing items of each batch, if batches are weighted by them.
        num_items: loss-bearing items of all batches so far; ``None`` if they are not counted.
        size: bytes of the largest batch.
        all_bytes: bytes of all batches.
        later: bytes of the largest batch after the first.
        weights: weights of the micro-batches, assuming under adaptive batching that all batches have as many items as
            the first.
        micro_samples: number of samples of each micro-batch.
        losses: weighted losses of the micro-batches, detached.
        norm: 2-norm of the gradient, once it is unscaled.
        pending: whether a gradient has been accumulated.
        left_early: whether the loop over micro-batches ended early, by an exception or a ``break``.
    """

    began: float
    own_s: float = 0.0
    away_s: float = 0.0
    left: float | None = None
    wanted: int = 1
    batches: int = 0
    samples: int = 0
    first: Contents | None = None
    items: list[int] = field(default_factory=list)
    num_items: int | None = None
    size: int = 0
    all_bytes: int = 0
    later: int = 0
    weights: list[float] = field(default_factory=list)
    micro_samples: list[int] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    norm: float | None = None
    pending: bool = False
    left_early: bool = False

    def add(self, batch: Any) -> None:
        """Add a batch."""
        contents = _read(batch)
        size, samples = (1, 1) if contents is None else (contents.num_bytes, contents.samples)
        self.samples += samples
        self.size = max(self.size, size)
        self.all_bytes += size
        if self.batches:
            self.later = max(self.later, size)
        else:
            self.first = contents
        self.batches += 1

    def come_back(self) -> None:
        """Note that the caller is back with the next batch."""
        if self.left is not None:
            self.away_s += time.perf_counter() - self.left
            self.left = None

    @property
    def average(self) -> float:
        """Return the factor on the accumulated gradient; 1 if all batches have as many items as the first."""
        return self.items[0] * self.wanted / sum(self.items) if self.items else 1.0

    @property
    def growth(self) -> float:
        """Return the items of the step divided by those of its first batch."""
        return sum(self.items) / self.items[0] if self.items else 1.0


def _read(batch: Any) -> Contents | None:
    """Return the contents of a batch; ``None`` where the batch cannot be read."""
    try:
        return contents_of(batch)
    except any_error():  # the caller's loop may be able to use it
        return None
