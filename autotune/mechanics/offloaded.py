"""Keep a unit's activations in the host's memory until its backward pass.

While the unit's forward pass runs, what autograd saves is copied to pinned host memory on a second stream. At its end
the device waits for these copies and frees its own, so that the bytes a unit keeps do not depend on other units. When
the unit's backward pass begins, its activations are copied back, the last first, and then those of the unit before it,
at most one unit ahead: if that one is offloaded, too, and saves the same shapes in the same formats, so that plans that
mix storages or precisions need no more memory than profiles of plans that do not.

A storage is copied once and whole, however many views of it and units save it. What stays on the device: what the unit
received or returns, parameters, buffers, storages below 1 MiB, and tensors other than plain strided ones.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autotune.mechanics import devices
from autotune.mechanics.activations import Recomputation
from autotune.mechanics.compressed import WRITTEN, Kept
from autotune.mechanics.trees import tensors
from autotune.mechanics.watching_hooks import keeps

# Copying fewer bytes takes longer to start than to run, at the tens of GB/s of a PCIe link.
_SMALLEST_BYTES = 2**20


class _Moved:
    """A device's storage with a copy on the host.

    Attributes:
        device: the device.
        uses: saved tensors that have this storage.
        source: reference that keeps the address of the storage from being used again while this object lives.

    Args:
        tensor: a tensor with this storage; the copy begins at once.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._arrival: torch.Event | None = None
        self._allocated_on: torch.Stream | None = None
        storage, self.device = tensor.untyped_storage(), tensor.device
        self.source = StorageWeakRef(storage)
        self.uses = self._left = 0
        self._here: torch.Tensor | None = _flat(storage, self.device)
        self._there: torch.Tensor | None = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        self._copy(self._there, self._here)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the second stream, after what the present stream has been given so far."""
        beside = devices.side_stream(self.device)
        beside.wait_stream(devices.current_stream(self.device))
        with beside:
            target.copy_(source, non_blocking=True)

    def leave(self, returned: frozenset[int]) -> None:
        """Free the device's memory, which the present stream no longer uses; keep what the unit returns instead."""
        if self._here is None:
            return
        if self.source.cdata in returned:
            self._there = None
            keeps([self._here])
        elif self._there is not None:
            self._here = None

    def fetch(self) -> None:
        """Begin to copy the storage back, if it is not on the device."""
        if self._here is not None or self._there is None:
            return
        self._here, self._left = torch.empty_like(self._there, device=self.device, pin_memory=False), self.uses
        self._allocated_on = devices.current_stream(self.device)
        self._copy(self._here, self._there)
        self._arrival = devices.side_stream(self.device).record_event()

    def take(self) -> torch.UntypedStorage:
        """Return the storage on the device; after the last use, this object keeps it on the host alone."""
        self.fetch()
        assert self._here is not None
        self._settle(devices.current_stream(self.device))
        found = self._here.untyped_storage()
        self._left -= 1
        if self._left == 0 and self._there is not None:
            self._here = None
        return found

    def _settle(self, *streams: torch.Stream) -> None:
        """Let streams wait for the copy to the device, that of its allocation included, which may reuse its memory."""
        if self._arrival is not None and self._allocated_on is not None:
            for stream in {self._allocated_on, *streams}:
                stream.wait_event(self._arrival)
            self._arrival = None

    def __del__(self) -> None:
        self._settle()


# The copies that exist, by storage and version, so that no two units copy the same.
_copies: weakref.WeakValueDictionary[tuple[int, int], _Moved] = weakref.WeakValueDictionary()
_latest = threading.local()


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor whose storage is offloaded.

    Attributes:
        moved: its storage.
        counter: an empty tensor that shares the version counter of the saved one.
        version: its version when it was saved.
        offset: its first element in the storage.
        size: its size.
        stride: its strides.
    """

    moved: _Moved
    counter: torch.Tensor
    version: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, moved: _Moved) -> _View:
        """Return the view of a tensor on its storage."""
        counter, moved.uses = tensor.detach(), moved.uses + 1
        # Replacing its data keeps the version counter.
        counter.data = counter.new_empty(0)
        return cls(moved, counter, tensor._version, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def restored(self) -> torch.Tensor:
        """Return the tensor, on the device.

        Raises:
            RuntimeError: if it was written to in place since it was saved.
        """
        if self.counter._version != self.version:
            raise RuntimeError(WRITTEN)
        return self.counter.new_empty(0).set_(self.moved.take(), self.offset, self.size, self.stride)


class _Call:
    """What one call of a unit saves for its backward pass.

    Attributes:
        returned: references to the storages of its outputs.
        saved: dtype and size of each tensor that it offloads, in order.

    Args:
        staying: storages that the unit did not create, by identity.
        before: the offloaded call of whose outputs this call received one; ``None`` if there is none.
    """

    def __init__(self, staying: frozenset[int], before: _Call | None) -> None:
        self.returned: list[StorageWeakRef] = []
        self._staying = staying
        self._before = None if before is None else weakref.ref(before)
        self._moved: dict[tuple[int, int], _Moved] = {}
        self.saved: list[tuple[torch.dtype, torch.Size]] = []
        self._left = 0

    def pack(self, tensor: torch.Tensor) -> Kept | _View:
        """Return what is kept of a tensor."""
        if not self._takes(tensor):
            return Kept.of(tensor.detach())
        key = tensor.untyped_storage()._cdata, tensor._version
        moved = self._moved.get(key) or _copies.get(key)
        if moved is None:
            moved = _copies[key] = _Moved(tensor)
        self._moved[key] = moved
        self.saved.append((tensor.dtype, tensor.size()))
        return _View.of(tensor.detach(), moved)

    def _takes(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        if not devices.is_accelerator(tensor.device) or (tensor.is_leaf and tensor.requires_grad):
            return False
        storage = tensor.untyped_storage()
        as_stored = not tensor.is_conj() and not tensor.is_neg()
        return as_stored and storage.nbytes() >= _SMALLEST_BYTES and storage._cdata not in self._staying

    def close(self, outputs: Any) -> None:
        """Wait, on the device, for the copies to the host, and free what the unit does not return."""
        self.returned = [StorageWeakRef(one.untyped_storage()) for one in _stored(tensors(outputs))]
        returned = frozenset(one.cdata for one in self.returned)
        for device in {moved.device for moved in self._moved.values()}:
            devices.current_stream(device).wait_stream(devices.side_stream(device))
        for moved in self._moved.values():
            moved.leave(returned)

    def unpack(self, kept: Kept | _View) -> torch.Tensor:
        """Return a saved tensor; the first one lets all others follow, and those of the unit before it."""
        if isinstance(kept, _View):
            if self._left == 0:
                self._left = len(self.saved)
                self.fetch()
                before = None if self._before is None else self._before()
                if before is not None and before.saved == self.saved:
                    before.fetch()
            self._left -= 1
        return kept.restored()

    def fetch(self) -> None:
        """Begin to copy all storages back, the last ones first: the order of the backward pass."""
        for moved in reversed(self._moved.values()):
            moved.fetch()


def offloaded(
    unit: Recomputation, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a unit's forward so that its activations wait for the backward pass in the host's memory.

    Args:
        unit: the unit's module.
        forward: its forward.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    given = {one.untyped_storage()._cdata for one in _stored(tensors((args, dict(kwargs))))}
    own = {one.untyped_storage()._cdata for one in _stored([*unit.module.parameters(), *unit.module.buffers()])}
    latest = getattr(_latest, "call", lambda: None)()
    follows = latest is not None and any(one.cdata in given for one in latest.returned)
    call = _Call(frozenset(given | own), latest if follows else None)
    with saved_tensors_hooks(call.pack, call.unpack):
        outputs = forward(*args, **kwargs)
    call.close(outputs)
    _latest.call = weakref.ref(call)
    return outputs


def _stored(found: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors with a storage of their own kind, which wrappers of other tensors lack."""
    return [one for one in found if type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout is torch.strided]


def _flat(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """Return a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
