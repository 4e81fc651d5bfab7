"""Let several ranks agree: one decision for all, verified by its hash, and never a wait without end.

The tuner has a process group of its own, so that what goes wrong in it cannot reach the run's own collectives.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autotune.live.deepspeed_engines import is_engine

# Every agreement is of as many numbers, so that one rank's farewell is what the others read at their next one. The
# first number tells whether a rank leaves.
_WIDTH = 16


def is_spread(model: nn.Module) -> bool:
    """Tell whether a model's parameters are spread over ranks: after ``fully_shard()``, or in tensor parallelism."""
    return is_flattened(model) or any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def is_flattened(model: nn.Module) -> bool:
    """Tell whether a model is in ``FullyShardedDataParallel``, which flattens weights; ``fully_shard()`` does not."""
    return type(model).__name__ == "FullyShardedDataParallel"


class RanksError(Exception):
    """Raised when the ranks could not agree; the run goes on without the tuner."""


class Ranks:
    """One rank of several, or the only one.

    Attributes:
        rank: this one.
        world: how many there are.

    Args:
        model: the model as the user calls it.
        timeout_s: seconds that a rank waits for the others.
    """

    def __init__(self, model: nn.Module, timeout_s: float) -> None:
        self._group: Any = None
        # Held on to, as it is sent while the run goes on.
        self._farewell: Any = None
        self.rank, self.world = 0, 1
        theirs: Any = None
        if isinstance(model, nn.parallel.DistributedDataParallel):
            theirs = model.process_group
        elif is_engine(model):
            theirs = model.data_parallel_group
        elif dist.is_available() and dist.is_initialized() and is_spread(model):
            theirs = dist.group.WORLD
        if theirs is not None and dist.is_initialized() and dist.get_world_size(theirs) > 1:
            self.rank, self.world = dist.get_rank(theirs), dist.get_world_size(theirs)
            members = dist.get_process_group_ranks(theirs)
            self._group = dist.new_group(members, backend="gloo", timeout=timedelta(seconds=timeout_s))
            self._first = members[0]

    @property
    def many(self) -> bool:
        """Tell whether there are others."""
        return self.world > 1

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return each value's maximum over the ranks.

        Raises:
            RanksError: if the others cannot be reached in time, or one of them has left.
        """
        if not self.many:
            return list(values)
        table = torch.zeros(_WIDTH, dtype=torch.float64, device="cpu")
        table[1 : len(values) + 1] = torch.tensor(list(values), dtype=torch.float64, device="cpu")
        try:
            dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            self._group = None
            raise RanksError(f"the ranks could not agree: {error}") from error
        if table[0]:
            self._group = None
            raise RanksError("another rank has left")
        return [float(value) for value in table[1 : len(values) + 1]]

    def from_first(self, document: dict[str, Any] | None) -> dict[str, Any]:
        """Return what the first rank hands over, checked by its hash.

        Args:
            document: what it hands over; on other ranks it is not looked at.

        Raises:
            RanksError: if it does not arrive, or not as it was sent, or a rank has left.
        """
        if not self.many:
            return document or {}
        payload = b""
        if self.rank == 0:
            text = json.dumps(document or {}, sort_keys=True).encode()
            payload = hashlib.sha256(text).digest() + text
        size = int(self.largest([len(payload)])[0])
        data = torch.frombuffer(bytearray(payload.ljust(size)), dtype=torch.uint8)
        try:
            dist.broadcast(data, self._first, group=self._group)
        except RuntimeError as error:
            self._group = None
            raise RanksError(f"the first rank's decision did not arrive: {error}") from error
        received = data.numpy().tobytes()
        if hashlib.sha256(received[32:]).digest() != received[:32]:
            raise RanksError("the first rank's decision arrived damaged")
        found: dict[str, Any] = json.loads(received[32:])
        return found

    def close(self) -> None:
        """Agree on nothing any more, and let the others know where they next ask, without waiting for them.

        The group itself goes with the run's own: taken down at once, it could tear off what another rank awaits.
        """
        if self.many and self._group is not None:
            with contextlib.suppress(RuntimeError):
                left = torch.zeros(_WIDTH, dtype=torch.float64, device="cpu")
                left[0] = 1.0
                self._farewell = dist.all_reduce(left, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._group = None
        self.world = 1
