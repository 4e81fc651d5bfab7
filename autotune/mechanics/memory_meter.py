"""Measure the true peak memory of a step.

On an accelerator the allocator's own statistics are read. On a CPU the resident set is useless (the allocator keeps
pages), so the allocation events of torch's profiler are summed over one step: the peak is the memory before the step
plus the largest running sum within it. Both count model, optimizer, gradients, activations and workspace, but not the
interpreter.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import profile, record_function

from autotune.mechanics import devices
from autotune.mechanics.collectives import settled_collectives
from autotune.mechanics.trees import tensors


class MemoryMeter:
    """Meter of the peak memory of code that runs inside :meth:`metering`.

    Attributes:
        peak_bytes: the largest peak since :meth:`reset`; ``None`` if nothing was metered since.
        reserved_bytes: the same for memory reserved by an accelerator's allocator; ``None`` on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes: int | None = None
        self.reserved_bytes: int | None = None

    @property
    def available(self) -> bool:
        """Return whether the memory of a step can be measured on the device."""
        return not devices.is_accelerator(self._device) or devices.allocated(self._device) is not None

    def reset(self) -> None:
        """Reset the peak."""
        self.peak_bytes = self.reserved_bytes = None

    @contextmanager
    def metering(self, resident: Iterable[torch.Tensor]) -> Iterator[None]:
        """Meter the body, usually one optimizer step.

        Args:
            resident: tensors that are alive during the whole body: parameters, buffers, optimizer state, the batch.
        """
        static = tensor_bytes(resident)
        meter = self._accelerator if devices.is_accelerator(self._device) else self._cpu
        with meter(static):
            yield

    @contextmanager
    def _accelerator(self, _static: int) -> Iterator[None]:
        devices.synchronize(self._device)
        # Segments of other plans must not count.
        devices.release(self._device)
        devices.forget_peaks(self._device)
        yield
        seen = devices.allocated(self._device)
        if seen is not None:
            self._raise_to(seen.peak)
            self.reserved_bytes = max(self.reserved_bytes or 0, seen.reserved_peak)

    @contextmanager
    def _cpu(self, static: int) -> Iterator[None]:
        with (
            collection_paused(),
            settled_collectives(),
            devices.profiled(memory=True, operations=False) as trace,
            record_function("step"),
        ):
            yield
        self._raise_to(static + _largest_running_sum(trace))

    def _raise_to(self, peak: int) -> None:
        self.peak_bytes = peak if self.peak_bytes is None else max(self.peak_bytes, peak)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection: garbage of earlier steps that a step frees would lower its measured memory."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _largest_running_sum(trace: profile) -> int:
    """Return the maximum of the running sum of allocations and frees, in bytes, never below 0."""
    results: Any = trace.kineto_results
    events = results.events()
    changes = sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())
    total = largest = 0
    for change in changes:
        total += change.nbytes()
        largest = max(largest, total)
    return largest


def resident_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, batches: object) -> list[torch.Tensor]:
    """Return the tensors that are alive before a step begins: parameters, buffers, optimizer state and batches."""
    state = optimizer.state.values()
    gradients = [parameter.grad for parameter in model.parameters()]
    return tensors([*model.parameters(), *model.buffers(), *gradients, *state, batches])


def tensor_bytes(values: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages; a storage that several tensors share counts once."""
    return sum(storages(values).values())


def content_bytes(values: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' elements: a slice counts its own, an expanded tensor its storage's."""
    shown: dict[int, int] = {}
    whole: dict[int, int] = {}
    for part in (part for value in values for part in strided(value)):
        address = part.untyped_storage().data_ptr()
        whole[address] = part.untyped_storage().nbytes()
        shown[address] = shown.get(address, 0) + part.numel() * part.element_size()
    return sum(min(size, shown[address]) for address, size in whole.items())


def storages(values: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the tensors' storages on this rank, by address."""
    parts = [part.untyped_storage() for value in values for part in strided(value)]
    return {part.data_ptr(): part.nbytes() for part in parts}


def strided(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors in which a tensor is stored, such as indices and values of a sparse one.

    The list is empty for a tensor whose storage cannot be read.
    """
    if type(value) is torch.Tensor and value.layout is torch.strided:
        return [value] if _is_stored(value) else []
    if hasattr(value, "device_mesh"):
        # This rank holds a part of a DTensor.
        local: Any = value
        value = local.to_local()
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        parts = [getattr(value, name) for name in names]
        return [inner for part in parts if isinstance(part, torch.Tensor) for inner in strided(part)]
    return [part for part in dense_parts(value) if _is_stored(part)]


def dense_parts(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors of which a tensor of any layout consists; empty for a layout that is not known."""
    layout = value.layout
    if layout is torch.strided:
        return [value]
    if layout is torch.sparse_coo:
        return [value._indices(), value._values()]
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    return []


def _is_stored(value: torch.Tensor) -> bool:
    """Return whether a tensor's storage can be read: tensors within torch.func and some wrappers have none."""
    try:
        value.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return False
    return True
