"""Hand out a job's batches one after another, without end, from a position that can be returned to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from autotune.errors import JobError
from autotune.job import Job
from autotune.mechanics.trees import map_tensors

# Epochs of one seed must not repeat those of its neighbours.
_EPOCH_STRIDE = 1_000_003


class BatchStream:
    """Iterate over a job's batches on a device.

    Attributes:
        position: batches handed out so far.
    """

    def __init__(self, job: Job, seed: int, device: torch.device) -> None:
        self._job = job
        self._seed = seed
        self._device = device
        self._epoch = 0
        self._iterator: Iterator[Any] | None = None
        # A batch that was drawn and could not be handed out.
        self._kept: list[Any] = []
        self.position = 0

    def take(self) -> Any:
        """Return the next batch.

        Raises:
            JobError: if the job has no batches at all.
        """
        batch = self._next_on_host()
        try:
            moved = map_tensors(lambda leaf: leaf.to(self._device, non_blocking=True), batch)
        except BaseException:
            # Where the device has no room for it now, it is the next one still.
            self._kept = [batch]
            raise
        self.position += 1
        return moved

    def seek(self, position: int) -> None:
        """Go to a position; going back begins anew and skips."""
        if position < self.position:
            self._epoch, self._iterator, self._kept, self.position = 0, None, [], 0
        while self.position < position:
            self._next_on_host()
            self.position += 1

    def _next_on_host(self) -> Any:
        if self._kept:
            return self._kept.pop()
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._job.batches(self._seed + self._epoch * _EPOCH_STRIDE))
                self._epoch += 1
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
        raise JobError("batches yields nothing", where=f"job {self._job.name!r}", allowed="at least one batch")
