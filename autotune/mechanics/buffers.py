"""Copy a module's buffers, so that a forward pass can be repeated or undone.

Neither version counters nor ids show whether a pass wrote to a buffer: BatchNorm's kernels do not count their writes,
and a replaced tensor's address is reused. So buffers are copied, and compared by value where a copy is expensive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autotune.mechanics.memory_meter import dense_parts

# Buffers up to this size in bytes (running statistics, a power iteration's vectors) are copied every time. Larger ones
# (masks, tables, frozen weights) are copied until a pass in training mode leaves them unchanged.
_SMALL_BYTES = 2**20
# Larger ones up to this size keep a copy on the host, since a unit may begin to write to them after its warm-up.
_KEPT_BYTES = 2**25


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A large buffer that a pass left unchanged.

    Attributes:
        tensor: the buffer.
        version: its version counter.
        copy: its values, on the host; ``None`` until copied, or if it is too large.
    """

    tensor: weakref.ref[torch.Tensor]
    version: int
    copy: torch.Tensor | None = None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a buffer is the same tensor in the same version."""
        return self.tensor() is tensor and self.version == version_of(tensor)

    def copied(self, tensor: torch.Tensor) -> Constant:
        """Return the constant with a copy of its values, if its size allows one."""
        expensive = _size(tensor) > _KEPT_BYTES or isinstance(tensor, FakeTensor)
        return self if expensive or self.copy is not None else replace(self, copy=tensor.detach().to("cpu", copy=True))


_constants: WeakKeyDictionary[nn.Module, dict[str, Constant]] = WeakKeyDictionary()


def version_of(tensor: torch.Tensor) -> int:
    """Return autograd's count of writes to a tensor."""
    # Tensors of inference mode have no version counter, and cannot be written to in training.
    return 0 if tensor.is_inference() else tensor._version


def copy_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a module's buffers by name, without the large ones that are known to be constant.

    Until any is known, large ones are copied to the host: the step's memory plan has no room for them.
    """
    known = _constants.get(module)
    copies = {}
    for name, value in module.named_buffers():
        if known is not None and name in known and known[name].holds(value):
            continue
        large = known is None and _size(value) > _SMALL_BYTES
        copies[name] = value.detach().to("cpu", copy=True) if large else value.detach().clone()
    return copies


def constants_of(module: nn.Module) -> dict[str, Constant]:
    """Return the large buffers that :func:`copy_buffers` leaves out, with copies in case one changes later."""
    known = _constants.get(module)
    if not known:
        return {}
    current = dict(module.named_buffers())
    found = {name: one.copied(current[name]) for name, one in known.items() if name in current}
    known.update(found)
    return {name: one for name, one in found.items() if one.holds(current[name])}


def forget_constants(module: nn.Module) -> None:
    """Drop the record of a module's large buffers."""
    _constants.pop(module, None)


def forget_copies(module: nn.Module) -> None:
    """Drop the copies of large buffers that :func:`constants_of` has made."""
    known = _constants.get(module, {})
    known.update({name: replace(one, copy=None) for name, one in known.items()})


def fresh_buffers(
    module: nn.Module, copies: Mapping[str, torch.Tensor], constants: Mapping[str, Constant]
) -> dict[str, torch.Tensor]:
    """Return new copies of saved buffers, on the devices of the module's own buffers.

    Args:
        module: the module.
        copies: result of :func:`copy_buffers`.
        constants: result of :func:`constants_of`, of which only changed buffers are returned.
    """
    buffers = dict(module.named_buffers())
    moved = {name: one.copy for name, one in constants.items() if not one.holds(buffers[name])}
    found = {**copies, **{name: copy for name, copy in moved.items() if copy is not None}}
    return {name: copied.to(buffers[name].device, copy=True) for name, copied in found.items()}


def lost_buffer(module: nn.Module, constants: Mapping[str, Constant]) -> str | None:
    """Return the name of a buffer that has changed since and has no copy; ``None`` if there is none."""
    if not constants:
        return None
    buffers = dict(module.named_buffers())
    lost = (name for name, one in constants.items() if one.copy is None and not one.holds(buffers[name]))
    return next(lost, None)


def drop_constants(module: nn.Module, copies: dict[str, torch.Tensor]) -> bool:
    """After a pass in training mode, drop the copies of large buffers that it left unchanged, and stop copying them.

    Returns:
        Whether any large buffer is known to be constant; ``False`` in evaluation mode or without large copies.
    """
    large = [name for name, value in copies.items() if _size(value) > _SMALL_BYTES]
    if not large or not module.training:
        return False
    current = dict(module.named_buffers())
    known = _constants.setdefault(module, {})
    for name in large:
        if name in current and equal_buffers(current[name], copies[name]):
            del copies[name]
            known[name] = Constant(weakref.ref(current[name]), version_of(current[name]))
    return bool(known)


def equal_buffers(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two buffers, maybe on different devices, have the same layout and values."""
    if isinstance(one, FakeTensor):
        # It has no values; a large buffer is nearly always a constant.
        return True
    parts, others = dense_parts(one), dense_parts(two)
    same = one.layout is two.layout and bool(parts)
    return same and all(torch.equal(part.to(other.device), other) for part, other in zip(parts, others, strict=True))


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, and of their indices if it is sparse."""
    return tensor.nbytes if tensor.layout is torch.strided else sum(part.nbytes for part in dense_parts(tensor))


@contextmanager
def replaced_buffers(module: nn.Module, copies: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Run the body on other buffers, so that its writes do not reach the module's own.

    A buffer that is registered several times is replaced everywhere.
    """
    buffers = dict(module.named_buffers())
    others = {id(buffers[name]): copied for name, copied in copies.items()}
    held = [(part._buffers, key, one) for part in module.modules() for key, one in part._buffers.items()]
    replaced = [(owner, key, one) for owner, key, one in held if id(one) in others]
    for owner, key, one in replaced:
        owner[key] = others[id(one)]
    try:
        yield
    finally:
        for owner, key, one in replaced:
            owner[key] = one


def write_buffers(module: nn.Module, copies: Mapping[str, torch.Tensor]) -> None:
    """Write copied values back into a module's buffers."""
    buffers = dict(module.named_buffers())
    with torch.no_grad():
        for name, copied in copies.items():
            buffers[name].copy_(copied)


def undo_writes(module: nn.Module, copies: Mapping[str, torch.Tensor]) -> None:
    """Write copied values back into those buffers of a module that have changed; a buffer may share its elements."""
    buffers = dict(module.named_buffers())
    write_buffers(module, {name: one for name, one in copies.items() if not equal_buffers(buffers[name], one)})
