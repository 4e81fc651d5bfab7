"""Record and restore the state of a model that passes over a batch may change, and tell how they changed it.

This is what its modules hold: buffers, attributes, lists and dictionaries, tensors, generators, and those weights that
the model itself writes to. Other objects are not looked into, because other threads may use them at the same time: a
loader's queue, or the file of a logger.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autotune.mechanics import devices
from autotune.mechanics.copies import same_bits
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.memory_meter import content_bytes
from autotune.mechanics.seen_state import GENERATORS, Seen, snapshot_of

logger = logging.getLogger(__name__)

# Maximum number of elements of each tensor that are compared.
_COMPARED = 4096
# Tensors among attributes are restored up to this size, and containers up to this many items, to this depth.
_MOST_BYTES, _MOST_ITEMS, _DEPTH = 2**22, 10_000, 3
_MOST_VALUES = 50_000
# Larger copies are made on the host: a step's memory plan has no room for them. Larger buffers are copied only if the
# model was seen to write to them.
_SMALL_BYTES = 2**20
# Words per checksum, few because memory may be scarce.
_PIECE = 2**14
# Whole numbers by their bytes.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Attributes that are not restored: they are not the user's, or are restored by themselves.
_KEPT = frozenset(vars(nn.Module())) | {"forward"}
# Packages whose modules change their attributes in step with other objects, which are not restored.
_WRAPPERS = ("torch.distributed", "torch.nn.parallel", "deepspeed", "accelerate")

Pair = tuple[torch.Tensor, torch.Tensor]


class ModelState:
    """The present state of a model.

    Attributes:
        copied_bytes: bytes of the copies.

    Args:
        model: the model.
        written: names of the weights and large buffers that are restored.
    """

    def __init__(self, model: nn.Module, written: Collection[str] = ()) -> None:
        self._model = model
        self.copied_bytes = 0
        # Dictionaries that are restored as objects, and containers of which the contents are.
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[Seen] = []
        self._generators: list[Seen] = []
        self._tensors: dict[str, Pair] = {}
        # Weights and buffers that are not copied.
        self._left: dict[str, tuple[torch.Tensor, _Mark]] = {}
        self._values = 0
        # Parametrizations and sharding change the class of a module.
        self._kinds: list[tuple[nn.Module, type]] = []
        for name, tensor in _owned(model):
            if _is_copied(name, tensor, written):
                _try(name, functools.partial(self._copy, name, tensor))
            elif _is_marked(tensor):
                _try(name, functools.partial(self._leave, name, tensor))
        spread = any(type(weight.data) is not torch.Tensor for weight in model.parameters())
        for path, part in model.named_modules():
            # Spread weights are replaced by whole ones and back as the model runs.
            tables = [part._buffers, part._modules, *([] if spread else [part._parameters])]
            tables += [table for name, table in vars(part).items() if "_hooks" in name]
            # Those of scripted modules are no dictionaries.
            self._held += [(table, table.copy()) for table in tables if isinstance(table, dict)]
            self._kinds.append((part, type(part)))
            if not type(part).__module__.startswith(_WRAPPERS):
                self._held.append((vars(part), vars(part).copy()))
                for name, value in [*vars(part).items()]:
                    if name not in _KEPT:
                        _try(name, functools.partial(self._record, f"{path}.{name}" if path else name, value, _DEPTH))

    @property
    def drew(self) -> bool:
        """Whether numbers were drawn from the model's own generators."""
        return not all(one.is_same() for one in self._generators)

    @property
    def lost(self) -> list[str]:
        """Names of weights and buffers that were written to and cannot be restored."""
        return [name for name, (tensor, mark) in self._left.items() if mark.differs(tensor)]

    def changes(self) -> dict[str, Pair]:
        """Return some elements of each tensor that was written to, before and now, by name."""
        found: dict[str, Pair] = {}
        present = dict(_owned(self._model))

        def compare(name: str, now: torch.Tensor, copy: torch.Tensor) -> None:
            if not _same(now, copy):
                found[name] = (sampled(copy), sampled(now))

        for name, (tensor, copy) in self._tensors.items():
            # A buffer may have been replaced.
            _try(name, functools.partial(compare, name, present.get(name, tensor), copy))
        return found

    def restore(self) -> None:
        """Restore the state; what cannot be is left as it is, with a warning."""
        for part, kind in self._kinds:
            if type(part) is not kind:
                part.__class__ = kind
        for held, then in self._held:
            for name in held.keys() - then.keys() - _KEPT:
                del held[name]
            held.update((name, value) for name, value in then.items() if name not in _KEPT)
        for one in (*self._containers, *self._generators):
            _try(one.name, functools.partial(_put_back, one))
        for name, (tensor, copy) in self._tensors.items():
            _try(name, functools.partial(_write, tensor, copy))

    def _record(self, name: str, value: Any, depth: int) -> None:
        self._values += 1
        if self._values > _MOST_VALUES or isinstance(value, bool | int | float | str | bytes):
            return
        if isinstance(value, torch.Tensor):
            # Sparse tensors have no `nbytes`.
            if value.is_leaf and value.layout is torch.strided and value.nbytes <= _MOST_BYTES:
                self._copy(name, value)
        elif isinstance(value, np.ndarray):
            self._containers += filter(None, [snapshot_of(name, value) if value.nbytes <= _MOST_BYTES else None])
        elif isinstance(value, GENERATORS):
            self._generators += filter(None, [snapshot_of(name, value)])
        elif isinstance(value, list | deque | dict | set | tuple) and depth and len(value) <= _MOST_ITEMS:
            self._containers += filter(None, [snapshot_of(name, value)])
            for place, item in enumerate(list(value.values() if isinstance(value, dict) else value)):
                self._record(f"{name}[{place}]", item, depth - 1)

    def _leave(self, name: str, tensor: torch.Tensor) -> None:
        self._left[name] = tensor, _Mark(tensor)

    def _copy(self, name: str, tensor: torch.Tensor) -> None:
        # Quantised tensors cannot be compared.
        if tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized:
            large = tensor.nbytes > _SMALL_BYTES
            copy = tensor.detach().to("cpu", copy=True) if large else tensor.detach().clone()
            self._tensors[name] = (tensor, copy)
            self.copied_bytes += copy.nbytes


class Writes:
    """Finds the weights and large buffers that a model writes to itself, such as a momentum encoder or a codebook.

    Args:
        model: the model, before its first step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._then: dict[str, _Mark] = {}
        self._names: set[str] = set()
        for name, tensor in _owned(model):
            if _is_marked(tensor):
                _try(name, functools.partial(self._mark, name, tensor))

    def look(self, *, updated: bool) -> None:
        """Note what has changed.

        Args:
            updated: whether the optimizer has made an update, after which weights that it trains show nothing.
        """
        for name, tensor in _owned(self._model):
            if name not in self._names and not (updated and tensor.requires_grad) and _is_marked(tensor):
                _try(name, functools.partial(self._compare, name, tensor))

    @property
    def names(self) -> frozenset[str]:
        """The names of those that have changed."""
        return frozenset(self._names)

    def _mark(self, name: str, tensor: torch.Tensor) -> None:
        self._then[name] = _Mark(tensor)

    def _compare(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._then or self._then[name].differs(tensor):
            self._names.add(name)


class _Mark:
    """A checksum of a tensor's values and their places, which shows that it was written to.

    Args:
        tensor: the tensor.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape, self._dtype, self._sums = tensor.shape, tensor.dtype, _sums(tensor)

    def differs(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has other values."""
        return tensor.shape != self._shape or tensor.dtype != self._dtype or _sums(tensor) != self._sums


def _sums(tensor: torch.Tensor) -> list[int]:
    """Return a checksum of each piece of a tensor."""
    bits = _bits(tensor)
    if not bits.numel():
        return []
    starts = bits.storage_offset() * bits.itemsize
    wide = bits.view(torch.int64) if starts % 8 == 0 and bits.nbytes % 8 == 0 else bits
    factors = _factors(min(len(wide), _PIECE), wide.device)
    return torch.stack([_sum(piece.to(torch.int64), factors) for piece in wide.split(_PIECE)]).tolist()


def _sum(words: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the sum of whole numbers of 64 bits times factors that depend on their places, modulo 2^64."""
    # Without the shift, flips of two highest bits would cancel: every factor is odd.
    return words.bitwise_right_shift(31).bitwise_xor_(words).mul_(factors[: len(words)]).sum()


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """Return different odd numbers, of which no few add up to 0."""
    spread = torch.arange(1, count + 1, device=device).mul_(-7046029254386353131)  # 2^64 over the golden ratio
    return spread.bitwise_right_shift(29).bitwise_xor_(spread).bitwise_or_(1)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor's elements, in the order of memory where possible, as a row of whole numbers."""
    own = tensor.detach().resolve_neg()
    own = torch.view_as_real(own.resolve_conj()) if own.is_complex() else own
    for dimension, stride in enumerate(own.stride()):
        if stride == 0 and own.shape[dimension]:
            own = own.narrow(dimension, 0, 1)
    # A transposed tensor is not copied.
    own = own.permute(sorted(range(own.dim()), key=own.stride, reverse=True))
    # Torch does not compute with formats of 8 bits and less.
    return own.reshape(-1).view(_WHOLE[own.dtype.itemsize])


def _is_marked(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is only looked at, unless it is seen to change."""
    # Reading a spread weight would need all ranks.
    return _is_large(tensor) and type(tensor.data) is torch.Tensor and not tensor.is_quantized


def _owned(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_buffers()
    yield from model.named_parameters()


def _is_large(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is copied only if it is seen to change: a weight, or a large buffer."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return isinstance(tensor, nn.Parameter) or tensor.nbytes > _SMALL_BYTES


def _is_copied(name: str, tensor: torch.Tensor, written: Collection[str]) -> bool:
    return name in written or not _is_large(tensor)


def _try(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except any_error() as error:  # the others are restored, and the run goes on
        if devices.is_out_of_memory(error):
            raise
        logger.warning("trial passes may have changed %s: %s", name, error)


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return some elements of a tensor, on the host, to leave the device's memory to the passes.

    Of each of equally long parts it is one at another place, because every n-th element may be of the same column. Of a
    tensor that is spread over ranks, they are elements of this rank's part.
    """
    own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    stride = max(-(-own.numel() // _COMPARED), 1)
    numbers = torch.arange(-(-own.numel() // stride), device=own.device)
    # The product with 2^32 over the golden ratio spreads over all remainders.
    places = (numbers * stride + (numbers * 2654435769 >> 8) % stride).clamp_(max=own.numel() - 1)
    if own.is_contiguous():
        return own.reshape(-1)[places].cpu()
    # A transposed or expanded tensor would be copied as a whole.
    return own[torch.unravel_index(places, own.shape)].cpu()


def copied_bytes(model: nn.Module, written: Collection[str]) -> int:
    """Return the bytes of weights and buffers that :class:`ModelState` copies.

    Args:
        model: the model.
        written: names of the weights and large buffers that are copied.
    """
    return content_bytes([tensor for name, tensor in _owned(model) if _is_copied(name, tensor, written)])


def _put_back(one: Seen) -> None:
    if not one.is_same():
        one.put(one.then)


def _same(one: torch.Tensor, copy: torch.Tensor) -> bool:
    alike = one.layout is copy.layout and one.shape == copy.shape and one.dtype == copy.dtype
    return alike and same_bits(one.detach().to(copy.device), copy)


def _write(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    try:
        unchanged = _same(tensor, copy)
    except any_error():  # memory has run out, which writing does not need
        unchanged = False
    if unchanged:
        return
    with torch.no_grad():
        # Through .data, which autograd ignores: a graph of the caller's own may need exactly these values.
        if tensor.shape == copy.shape:
            tensor.data.copy_(copy)
        else:
            tensor.data = copy.to(tensor.device)
