"""Run a unit in a precision, and find the precisions that a device computes efficiently.

Parameters are never converted: autocast makes 16-bit copies at each use, and gradients arrive in fp32. Under ``fp8``,
linear layers multiply 8-bit numbers and all else runs under bf16 autocast.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from autotune.choices import REDUCED_PRECISIONS
from autotune.mechanics import devices, known_precisions
from autotune.mechanics.float8 import Linears
from autotune.mechanics.trees import tensors
from autotune.plan import Precision

logger = logging.getLogger(__name__)

DTYPES = MappingProxyType({precision: getattr(torch, precision.dtype) for precision in Precision if precision.dtype})
_REDUCED = tuple(DTYPES[precision] for precision in REDUCED_PRECISIONS)

# A format without a native path is emulated: on CPUs, fp16 matrix products can run at a hundredth of fp32's speed, and
# where they are fast, fp16 convolutions may not be. A ratio of 10 is far above any useful format and above noise.
_SLOWEST_USEFUL_RATIO = 10.0
# Why fp16 is not offered beside bf16.
_NO_GAIN = (
    f"bf16 is fast, too, and needs no loss scale; {known_precisions.PRECISIONS_VARIABLE}=fp32,bf16,fp16 offers both"
)
# Measurements of a format before it is excluded: on a busy machine, another process may disturb one of them.
_LOOKS = 4


@contextmanager
def computing_in(precision: Precision, device_type: str) -> Iterator[None]:
    """Run the body in a precision; ``inherit`` changes nothing.

    Autocast's cache of weight copies is off: with recomputation it can reuse one graph's copy in another
    (pytorch#141896), and it made no difference to peak memory.
    """
    if precision is Precision.INHERIT or (precision is Precision.FP32 and not torch.is_autocast_enabled(device_type)):
        yield
        return
    if precision is Precision.FP32:
        with torch.autocast(device_type, enabled=False):
            yield
        return
    layers = nullcontext() if precision.is_16_bit else Linears(DTYPES[precision], device_type)
    with torch.autocast(device_type, dtype=DTYPES[precision], cache_enabled=False), layers:
        yield


@dataclass(frozen=True, slots=True)
class InPrecision:
    """A unit's forward in a fixed precision, which a later switch does not change.

    Attributes:
        module: the unit.
        original: its forward in the precision of its caller.
        precision: the precision, not ``inherit``.
        passes_16_bit: whether 16-bit outputs are returned without a cast to fp32.
    """

    module: nn.Module
    original: Callable[..., Any]
    precision: Precision
    passes_16_bit: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        if self.precision is Precision.FP32:
            # Under the user's own autocast, a unit can receive 16-bit inputs.
            args, kwargs = canonical(args), canonical(kwargs)
        with computing_in(self.precision, _device_type(self.module, args, kwargs)):
            outputs = self.original(*args, **kwargs)
            return outputs if self.passes_16_bit else canonical(outputs)


def canonical(tree: Any) -> Any:
    """Return a tree of tensors with every 16-bit floating tensor cast to fp32."""
    if isinstance(tree, torch.Tensor):
        return tree.float() if tree.dtype in _REDUCED else tree
    return tree_map_only(torch.Tensor, canonical, tree)


def excluded_precisions(device_type: str) -> Mapping[Precision, str]:
    """Return the precisions that a device has no fast path for, each with the reason.

    The environment variable ``AUTOTUNE_PRECISIONS`` decides if it is set: ``bf16`` or ``bf16,fp16`` names the 16-bit
    formats to use, and ``fp32`` alone uses neither. ``fp8`` is considered only if it is named, and excluded even so
    where it is emulated.

    Otherwise, a small matrix product and a small convolution are timed in each format, forward and backward, in some
    tenths of a second overall. Where bf16 is fast, fp16 is excluded: it would lengthen each profile and search, and
    needs a loss scale. The result is kept for this process and for those that it starts.

    Raises:
        InputError: if the environment variable names something else than a precision.
    """
    known = known_precisions.kept(device_type)
    if known is not None:
        return known
    named = known_precisions.named()
    considered = [one for one in REDUCED_PRECISIONS if _is_considered(one, named)]
    reasons = {precision: _reason_against(precision, device_type, named) for precision in considered}
    if named is None and not reasons[Precision.BF16] and not reasons[Precision.FP16]:
        reasons[Precision.FP16] = _NO_GAIN
    known_precisions.keep(device_type, {precision: reason for precision, reason in reasons.items() if reason})
    for precision, reason in reasons.items():
        if precision.asked_only and reason:
            logger.warning("the precision %s is left out: %s", precision, reason)
    return excluded_precisions(device_type)


def useful_precisions(device_type: str) -> tuple[Precision, ...]:
    """Return fp32 and the reduced formats that a device computes efficiently, fp32 first."""
    reasons, named = excluded_precisions(device_type), known_precisions.named()
    return tuple(one for one in DTYPES if one not in reasons and _is_considered(one, named))


def _is_considered(precision: Precision, named: frozenset[Precision] | None) -> bool:
    return not precision.asked_only or (named is not None and precision in named)


def _reason_against(precision: Precision, device_type: str, named: frozenset[Precision] | None) -> str:
    """Return why a device does not compute in a precision; empty if it is useful there."""
    if DTYPES[precision] not in devices.autocast_dtypes(device_type):
        return f"autocast has no {precision} on {device_type}"
    if not precision.is_16_bit:
        return _reason_against_float8(device_type)
    if named is not None:
        return "" if precision in named else f"not among {known_precisions.PRECISIONS_VARIABLE} on {device_type}"
    probes = {"matrix product": _matrix_s, "convolution": _convolution_s}
    try:
        ratios = {name: _ratio(probe, DTYPES[precision], device_type) for name, probe in probes.items()}
    except RuntimeError as error:
        return f"not supported on {device_type}: {error}"
    name, ratio = max(ratios.items(), key=lambda item: item[1])
    return f"a {name} takes {ratio:.0f}x as long as in fp32 on {device_type}" if ratio > _SLOWEST_USEFUL_RATIO else ""


def _reason_against_float8(device_type: str) -> str:
    """Return why a device has no fast path for ``fp8``, and how slow it is there; empty if it has one."""
    lacking = devices.lacks_float8(device_type)
    try:
        ratio = _ratio(_float8_s, DTYPES[Precision.FP8], device_type)
    except RuntimeError as error:
        return f"not supported on {device_type}: {error}"
    slow = f"a linear layer takes {ratio:.1f}x as long as in fp32"
    if lacking:
        return f"{lacking}, where it is emulated and {slow}"
    return f"{slow} on {device_type}" if ratio > _SLOWEST_USEFUL_RATIO else ""


def _ratio(probe: Callable[[torch.dtype, str], float], dtype: torch.dtype, device_type: str) -> float:
    """Return the ratio of a probe's fastest time in a format to that in fp32, measured alternately."""
    own = other = float("inf")
    with _one_thread(), _plain_mode(device_type):
        for look in range(1, _LOOKS + 1):
            own, other = min(own, probe(dtype, device_type)), min(other, probe(torch.float32, device_type))
            if look >= 2 and own / other < _SLOWEST_USEFUL_RATIO / 3:
                break
    return own / other


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run the body on one thread: on busy cores, threads wait for each other longer than the work takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _plain_mode(device_type: str) -> Iterator[None]:
    """Run the body with gradients and without autocast, regardless of the caller's modes."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device_type, enabled=False):
        yield


def _matrix_s(dtype: torch.dtype, device_type: str) -> float:
    factor = torch.ones(256, 256, dtype=dtype, device=device_type, requires_grad=True)
    return _fastest(lambda: torch.nn.functional.linear(factor, factor), device_type)


def _float8_s(dtype: torch.dtype, device_type: str) -> float:
    factor = torch.ones(256, 256, device=device_type, requires_grad=True)
    with nullcontext() if dtype is torch.float32 else Linears(dtype, device_type):
        return _fastest(lambda: torch.nn.functional.linear(factor, factor), device_type)


def _convolution_s(dtype: torch.dtype, device_type: str) -> float:
    image = torch.ones(4, 32, 16, 16, dtype=dtype, device=device_type, requires_grad=True)
    kernel = torch.ones(32, 32, 3, 3, dtype=dtype, device=device_type, requires_grad=True)
    return _fastest(lambda: torch.nn.functional.conv2d(image, kernel, padding=1), device_type)


def _fastest(run: Callable[[], torch.Tensor], device_type: str) -> float:
    """Return the seconds of the fastest of four forward and backward passes."""
    return min(devices.seconds_of(lambda: run().sum().backward(), device_type) for _ in range(4))


def _device_type(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the device type of a unit's parameters or, if it has none, of its arguments."""
    found: torch.Tensor | None = next(module.parameters(), None)
    if found is None:
        found = next(iter(tensors((args, dict(kwargs)))), None)
    return "cpu" if found is None else found.device.type
