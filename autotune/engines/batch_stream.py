"""An endless stream of a job's batches that can return to an earlier position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from autotune.errors import JobError
from autotune.job import Job
from autotune.mechanics.trees import map_tensors

# Distance between the seeds of epochs, so that the epochs of one seed do not repeat those of a neighbouring seed.
_EPOCH_STRIDE = 1_000_003


class BatchStream:
    """A job's batches on a device.

    Args:
        job: the job.
        seed: random seed for the batches.
        device: the device to which batches are moved.

    Attributes:
        position: number of batches taken so far.
    """

    def __init__(self, job: Job, seed: int, device: torch.device) -> None:
        self._job = job
        self._seed = seed
        self._device = device
        self._epoch = 0
        self._iterator: Iterator[Any] | None = None
        # A batch that was drawn but did not fit on the device.
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
            # A batch that does not fit on the device remains the next one.
            self._kept = [batch]
            raise
        self.position += 1
        return moved

    def seek(self, position: int) -> None:
        """Go to a position; to go back, the stream restarts and skips batches."""
        if position < self.position:
            self._epoch, self._iterator, self._kept, self.position = 0, None, [], 0
        while self.position < position:
            self._next_on_host()
            self.position += 1

    def close(self) -> None:
        """Release the job's iterator, and with it the processes of a loader."""
        self._iterator = None

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
