"""Copy a module's buffers, so that a forward pass can be repeated from where it began, or undone.

Neither version counters nor identities tell whether a pass wrote to a buffer: BatchNorm's kernels do not count, and a
replaced tensor's address is used again. So buffers are copied, and compared by value where a copy is dear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

# Up to this size a buffer (running statistics, a power iteration's vectors) is copied every time. Larger ones (masks,
# tables, frozen weights) are copied until a pass in training mode was seen to leave them alone.
_SMALL_BYTES = 2**20
_large_constants: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def copy_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a module's buffers by name, without the large ones that are known to stay as they are.

    Until that is known, copies of large ones are on the host: a step was not planned to have room for them.
    """
    constant = _large_constants.get(module)
    copies = {}
    for name, value in module.named_buffers():
        if constant is None and value.nbytes > _SMALL_BYTES:
            copies[name] = value.detach().to("cpu", copy=True)
        elif constant is None or name not in constant:
            copies[name] = value.detach().clone()
    return copies


def fresh_buffers(module: nn.Module, copies: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of copies, on the devices that the module's own buffers are on."""
    buffers = dict(module.named_buffers())
    return {name: copied.to(buffers[name].device, copy=True) for name, copied in copies.items()}


def drop_constants(module: nn.Module, copies: dict[str, torch.Tensor]) -> None:
    """After a pass in training mode, drop the copies of large buffers that it left alone, and copy them no more."""
    large = [name for name, value in copies.items() if value.nbytes > _SMALL_BYTES]
    if not large or not module.training:
        return
    current = dict(module.named_buffers())
    same = frozenset(name for name in large if name in current and _equal(current[name], copies[name]))
    for name in same:
        del copies[name]
    _large_constants[module] = _large_constants.get(module, frozenset()) | same


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    # A fake tensor has no values; a large buffer is nearly always a constant.
    return isinstance(one, FakeTensor) or torch.equal(one.to(two.device), two)


@contextmanager
def replaced_buffers(module: nn.Module, copies: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Run the body on other buffers; what it writes to them is forgotten."""
    owners = {name: _owner(module, name) for name in copies}
    current = {name: owner._buffers[key] for name, (owner, key) in owners.items()}
    for name, (owner, key) in owners.items():
        owner._buffers[key] = copies[name]
    try:
        yield
    finally:
        for name, (owner, key) in owners.items():
            owner._buffers[key] = current[name]


def write_buffers(module: nn.Module, copies: Mapping[str, torch.Tensor]) -> None:
    """Write copied values back into a module's buffers."""
    buffers = dict(module.named_buffers())
    with torch.no_grad():
        for name, copied in copies.items():
            buffers[name].copy_(copied)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return module.get_submodule(path), key
