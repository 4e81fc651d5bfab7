"""Keep a unit's activations in few bits until its backward pass.

The forward pass is exact; the backward pass uses rounded activations, so gradients are approximate. Numbers are rounded
in groups, each with its own range. Eight bits round to nearest; four bits round up or down at random so that the
expected value is the number itself, with random numbers that are drawn once per device and leave the run's generators
alone. Everything that is no large tensor of floating-point numbers (masks, indices, means, parameters and the unit's
buffers) is kept as it is, and so is a tensor with infinite or undefined numbers. What autocast makes of weights is
rounded, too.

Where a gradient hangs on the exact value of an activation (the maximum of many, a root near 0, a norm over a few
numbers), the error may be large; a profile measures it. Writing to a compressed activation in place, which torch would
refuse in the backward pass, goes unnoticed: the gradient is that of the former values.

Source: ActNN (Chen et al., 2021) and GACT (Liu et al., 2022), whose group size of 256 this file uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autotune.mechanics.activations import Recomputation
from autotune.mechanics.devices import is_accelerator
from autotune.mechanics.trees import tensors
from autotune.mechanics.watching_hooks import keeps

_GROUP = 256
# Numbers that are rounded at once: few temporary bytes, and on a host they stay in its cache.
_AT_ONCE, _AT_ONCE_ON_ACCELERATOR = 2**17, 2**24
# A tensor with fewer numbers than this share of the unit's largest input is kept as it is: it holds statistics, such as
# means and the normalisers of attention, to which gradients are sensitive.
_SMALL_FRAC = 1 / 8
_SMALL = 1024
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Length of the table of random numbers; a prime, so that successive groups have different ones.
_NOISE = 4_093
# The product of eight bytes of 0 or 1 with the first number has them as bits in its highest byte; the product of a byte
# with it has its bits in the highest bits of eight bytes.
_DIAGONAL, _ONES = 0x8040201008040201 - 2**64, 0x0101010101010101
WRITTEN = "one of the variables needed for gradient computation has been modified by an inplace operation"


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that is kept as it is, with its version at that time."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kept:
        """Keep a tensor without a graph, and tell those who observe it."""
        keeps([tensor])
        return cls(tensor, tensor._version)

    def restored(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: if it was written to in place since then.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(WRITTEN)
        return self.tensor


@dataclass(frozen=True, slots=True)
class Bits:
    """A mask, eight entries per byte.

    Attributes:
        packed: uint8, shape (bytes,).
        like: an empty tensor with the mask's size and strides.
    """

    packed: torch.Tensor
    like: torch.Tensor

    def restored(self) -> torch.Tensor:
        """Return the mask."""
        return mask_from_bits(self.packed, self.like, torch.bool)


@dataclass(frozen=True, slots=True)
class _Rounded:
    """Numbers in few bits.

    Attributes:
        codes: uint8 of shape (groups, 256) or, with two codes per byte, (groups, 128).
        scale: shape (groups, 1), fp32, difference of the numbers of successive codes.
        lowest: shape (groups, 1), fp32, the number with code 0.
        like: an empty tensor with the tensor's size and strides.
        dtype: the tensor's dtype.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    lowest: torch.Tensor
    like: torch.Tensor
    dtype: torch.dtype

    def restored(self) -> torch.Tensor:
        groups, device = len(self.codes), self.codes.device
        flat = torch.empty(groups, _GROUP, dtype=self.dtype, device=device)
        for part in _parts(groups, device):
            codes, scale, lowest = self.codes[part], self.scale[part], self.lowest[part]
            if codes.shape[1] < _GROUP:
                codes, origin = torch.cat((codes & 15, codes >> 4), dim=1), lowest
            else:
                # A number was rounded up, so it lies half a step below its code on average.
                origin = lowest - 0.5 * scale
            flat[part] = torch.maximum(torch.addcmul(origin, codes.float(), scale), lowest)
        return _shaped(flat.flatten()[: self.like.numel()], self.like, self.dtype)


class _Packer:
    """The hooks for one call of a unit, which compress each tensor once even if several operations save it."""

    def __init__(self, bits: int, exact: frozenset[int], smallest: int, number: int) -> None:
        self._bits, self._exact, self._smallest, self._number = bits, exact, smallest, number
        # By identity: the result, and a reference that keeps the storage's address from being used again.
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, Kept | Bits | _Rounded]] = {}

    def pack(self, tensor: torch.Tensor) -> Kept | Bits | _Rounded:
        """Return what is kept of a tensor."""
        is_weight, tensor = isinstance(tensor, torch.nn.Parameter), tensor.detach()
        if is_weight or not self._takes(tensor):
            return Kept.of(tensor)
        storage = tensor.untyped_storage()
        key = (
            storage._cdata,
            tensor._version,
            tensor.dtype,
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )
        if key not in self._known:
            packed = self._packed(tensor) or Kept.of(tensor)
            self._known[key] = StorageWeakRef(storage), packed
        return self._known[key][1]

    def _packed(self, tensor: torch.Tensor) -> Bits | _Rounded | None:
        if tensor.dtype is torch.bool:
            return mask_in_bits(tensor)
        return _rounded(tensor, self._bits, self._number + len(self._known))

    def _takes(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.dtype is not torch.bool and tensor.dtype not in _DTYPES:
            return False
        if tensor.numel() < self._smallest or tensor.untyped_storage()._cdata in self._exact:
            return False
        # Code that broadcasts may save a tensor that has fewer bytes than its compressed form.
        return tensor.untyped_storage().nbytes() > tensor.numel() // 2 or tensor.dtype is torch.bool


def compressed(
    unit: Recomputation, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, bits: int
) -> Any:
    """Call a unit's forward so that autograd keeps rounded activations.

    Args:
        unit: the unit's module.
        forward: its forward.
        args: positional arguments.
        kwargs: keyword arguments.
        bits: bits per number, 8 or 4.
    """
    given = [one.numel() for one in tensors((args, dict(kwargs))) if one.is_floating_point()]
    own = [*unit.module.parameters(), *unit.module.buffers()]
    exact = frozenset(one.untyped_storage()._cdata for one in own if type(one) in (torch.Tensor, torch.nn.Parameter))
    unit.compressions += 1
    packer = _Packer(bits, exact, max(_SMALL, int(max(given, default=0) * _SMALL_FRAC)), 101 * unit.compressions)
    with saved_tensors_hooks(packer.pack, lambda kept: kept.restored()):
        return forward(*args, **kwargs)


def _rounded(tensor: torch.Tensor, bits: int, number: int) -> _Rounded | None:
    """Return a tensor's numbers in few bits; ``None`` if some are infinite or undefined, as in masks of attention.

    Only the lowest number of a group has code 0, so that what is above 0 stays above 0, on which the gradient of ReLU
    depends.

    Args:
        tensor: the tensor, not empty.
        bits: bits per number, 8 (rounded to nearest) or 4 (rounded at random).
        number: number of this compression, which random numbers depend on.
    """
    groups, device = _groups(tensor), tensor.device
    codes = torch.empty(len(groups), _GROUP * bits // 8, dtype=torch.uint8, device=device)
    scale, lowest = torch.empty(2, len(groups), 1, device=device)
    for place, part in enumerate(_parts(len(groups), device)):
        values = groups[part].float()
        least = values.amin(1, keepdim=True)
        # A little more than the range, so that no code exceeds the largest.
        step = (values.amax(1, keepdim=True) - least).div_(2**bits - 1.01)
        scale[part], lowest[part] = step, least
        found = (values - least).mul_(step.clamp_min(1e-38).reciprocal_())
        if bits == 8:
            codes[part] = found.ceil_()
            continue
        found.view(-1).add_(_drawn(_noise(device), number + place, found.numel()))
        whole = torch.maximum(found.floor_(), (values > least).float()).to(torch.uint8)
        codes[part] = whole[:, : _GROUP // 2] | (whole[:, _GROUP // 2 :] << 4)
    if not torch.isfinite(scale).all():
        return None
    return _Rounded(codes, scale, lowest, _like(tensor), tensor.dtype)


def mask_in_bits(mask: torch.Tensor) -> Bits:
    """Return a mask in one bit per entry.

    Args:
        mask: the mask, of dtype bool.
    """
    flat = _flat(mask)
    if len(flat) % 8:
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)])
    eight = flat.view(torch.uint8).view(torch.int64)
    return Bits((eight * _DIAGONAL).bitwise_right_shift_(56).to(torch.uint8), _like(mask))


def mask_from_bits(packed: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask that :func:`mask_in_bits` packed.

    Args:
        packed: its bits.
        like: an empty tensor with its size and strides.
        dtype: the dtype of the result.
    """
    eight = packed.to(torch.int64).mul_(_DIAGONAL).bitwise_right_shift_(7).bitwise_and_(_ONES)
    return _shaped(eight.view(torch.bool)[: like.numel()], like, dtype)


def _groups(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers in groups; the last group repeats the last number."""
    flat = _flat(tensor)
    missing = -len(flat) % _GROUP
    if missing:
        flat = torch.cat([flat, flat[-1:].expand(missing)])
    return flat.view(-1, _GROUP)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers in the order of the memory of its copy."""
    dense = tensor if tensor.stride() == _like(tensor).stride() else tensor.clone()
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without numbers that has the size of a tensor and the strides of its copy."""
    return torch.empty_like(tensor, device="meta")


def _shaped(flat: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers in a tensor's size and strides."""
    return flat.to(dtype).as_strided(like.size(), like.stride())


def _parts(groups: int, device: torch.device) -> list[slice]:
    """Return the groups that are rounded at once."""
    size = (_AT_ONCE_ON_ACCELERATOR if is_accelerator(device) else _AT_ONCE) // _GROUP
    return [slice(start, start + size) for start in range(0, groups, size)]


@functools.cache
def _noise(device: torch.device) -> torch.Tensor:
    """Return random numbers in [0, 1), the same in each process."""
    return torch.rand(_NOISE, generator=torch.Generator().manual_seed(0)).to(device)


def _drawn(noise: torch.Tensor, number: int, count: int) -> torch.Tensor:
    """Return numbers of the table, from a place that depends on a call's number."""
    start = number * 1_009 % _NOISE
    turned = torch.cat([noise[start:], noise[:start]])
    return turned.repeat(-(-count // _NOISE))[:count]
