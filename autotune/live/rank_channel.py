"""Let all ranks agree on one decision, verified by its hash, with a timeout on every wait.

The tuner has a process group of its own, so that its failures cannot disturb the run's own collectives.
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

from autotune.errors import AttachError
from autotune.live.deepspeed_engines import is_engine

# All messages have the same number of values, so that ranks can combine a departing rank's last message with their own
# next message. The first value says whether a rank is leaving.
_WIDTH = 64


def is_spread(model: nn.Module) -> bool:
    """Return whether a model's parameters are spread over ranks, as by ``fully_shard()`` or tensor parallelism."""
    return is_flattened(model) or any(
        hasattr(parameter, "device_mesh") or hasattr(parameter, "_st_info") for parameter in model.parameters()
    )


def is_flattened(model: nn.Module) -> bool:
    """Return whether ``FullyShardedDataParallel`` flattens a model's weights; ``fully_shard()`` does not."""
    return type(model).__name__ == "FullyShardedDataParallel"


def _members_of(model: nn.Module) -> list[int]:
    """Return the ranks that train a model together; none if this one trains it alone."""
    if is_engine(model):
        engine: Any = model
        return dist.get_process_group_ranks(engine.data_parallel_group)
    if not dist.is_available() or not dist.is_initialized():
        return []
    everybody = list(range(dist.get_world_size()))
    if isinstance(model, nn.parallel.DistributedDataParallel):
        # Of ranks that split layers as well, each group has others of its own.
        return everybody if is_spread(model.module) else dist.get_process_group_ranks(model.process_group)
    if not is_spread(model):
        return []
    meshes = {id(mesh): mesh for parameter in model.parameters() if (mesh := getattr(parameter, "device_mesh", None))}
    groups = sorted((set(mesh.mesh.flatten().tolist()) for mesh in meshes.values()), key=len)
    return sorted(groups[-1]) if groups and all(group <= groups[-1] for group in groups) else everybody


class RanksError(Exception):
    """The ranks could not agree; the run goes on without the tuner."""


def _group_of(members: list[int], timeout_s: float) -> Any:
    try:
        # Other ranks may train another model meanwhile.
        return dist.new_group(
            members, backend="gloo", timeout=timedelta(seconds=timeout_s), use_local_synchronization=True
        )
    except RuntimeError as error:
        raise AttachError(
            f"not all of the {len(members)} ranks that train the model have attached within {timeout_s:g} s ({error})",
            where="attach",
            allowed="autotune.attach() on each of them, in the same order of models",
        ) from error


class Ranks:
    """The connection of this rank to the others, if there are any.

    Attributes:
        rank: number of this rank.
        world: number of ranks.

    Args:
        model: the model as the user calls it.
        timeout_s: seconds that a rank waits for the others.

    Raises:
        AttachError: if the others do not attach in time.
    """

    def __init__(self, model: nn.Module, timeout_s: float) -> None:
        self._group: Any = None
        self._timeout_s = timeout_s
        # The handle of the asynchronous message sent on leaving, kept alive until it has been sent.
        self._farewell: Any = None
        self.rank, self.world = 0, 1
        members = _members_of(model)
        if len(members) > 1:
            self.rank, self.world = members.index(dist.get_rank()), len(members)
            self._group = _group_of(members, timeout_s)
            self._first = members[0]

    @property
    def many(self) -> bool:
        """Return whether there are other ranks."""
        return self.world > 1

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return each value's maximum over the ranks.

        Args:
            values: this rank's values.

        Raises:
            RanksError: if the others cannot be reached in time, or one of them has left.
        """
        if not self.many:
            return list(values)
        room = _WIDTH - 1
        return [value for start in range(0, len(values), room) for value in self._largest(values[start : start + room])]

    def _largest(self, values: Sequence[float]) -> list[float]:
        table = torch.zeros(_WIDTH, dtype=torch.float64, device="cpu")
        table[1 : len(values) + 1] = torch.tensor(list(values), dtype=torch.float64, device="cpu")
        try:
            dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            self._group = None
            raise RanksError(self._unheard()) from error
        if table[0]:
            self._group = None
            raise RanksError("another rank has left")
        return [float(value) for value in table[1 : len(values) + 1]]

    def _unheard(self) -> str:
        # The library's own message names files of its build.
        return f"another rank has left, or did not answer within rank_timeout_s ({self._timeout_s:g} s)"

    def from_first(self, document: dict[str, Any] | None) -> dict[str, Any]:
        """Return the first rank's document, checked by its hash.

        Args:
            document: the first rank's document; ignored on the others.

        Raises:
            RanksError: if the document does not arrive or arrives damaged, or if a rank has left.
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
            raise RanksError(self._unheard()) from error
        received = data.numpy().tobytes()
        if hashlib.sha256(received[32:]).digest() != received[:32]:
            raise RanksError("the first rank's decision arrived damaged")
        found: dict[str, Any] = json.loads(received[32:])
        return found

    def close(self) -> None:
        """Leave without waiting; the other ranks notice it the next time they try to agree.

        The process group is not destroyed here but together with the run's own group, because destroying it now could
        abort a collective that another rank is waiting for.
        """
        if self.many and self._group is not None:
            with contextlib.suppress(RuntimeError):
                left = torch.zeros(_WIDTH, dtype=torch.float64, device="cpu")
                left[0] = 1.0
                self._farewell = dist.all_reduce(left, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._group = None
        self.world = 1
