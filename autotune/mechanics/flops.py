"""Floating-point operations of a step, and the device's peak rate of matrix products, published or measured."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autotune.choices import Precision
from autotune.cost_model.device_table import find_device
from autotune.errors import InputError
from autotune.mechanics import devices, randomness
from autotune.mechanics.precision import DTYPES, useful_precisions
from autotune.mechanics.trees import map_tensors, tensors

logger = logging.getLogger(__name__)

# Sizes of the square matrices that are multiplied, and the number of timed products of each size.
_SIDES, _ACCELERATORS_SIDES = (512, 1024, 1536), (4096, 8192)
_REPETITIONS = 6
# Seconds of a product after which no larger one is tried.
_LONG_S = 0.3

# Shapes of a model's parameters and of a batch determine the operations of a step of a job.
_Shapes = tuple[Any, ...]
# Operations that were counted before, and peaks that were measured, in this process.
_counted: dict[_Shapes, int | None] = {}
_measured: dict[tuple[Precision, int], float] = {}


@dataclass(frozen=True, slots=True)
class Peak:
    """A device's peak rate.

    Attributes:
        rate: floating-point operations per second.
        source: where it is published, or how it was measured.
    """

    rate: float
    source: str


def peak_of(device: devices.AnyDevice, precisions: Collection[Precision]) -> Peak | None:
    """Return the peak rate of a device at the fastest of the precisions that a plan computes in; ``None`` if unknown.

    That of an accelerator is published (:mod:`autotune.cost_model.device_table`); that of a CPU is known once
    :func:`measure_peaks` was called with the same number of threads.

    Args:
        device: the device.
        precisions: the precisions; the user's own counts as fp32, which may be rounded to TF32.
    """
    own = {Precision.FP32 if one is Precision.INHERIT else one for one in precisions} or {Precision.FP32}
    if not devices.is_accelerator(device):
        threads = torch.get_num_threads()
        rates = [_measured.get((one, threads)) for one in own]
        source = f"the fastest square matrix product that was measured here on {threads} thread(s)"
    else:
        try:
            spec = find_device(devices.device_name(device))
        except InputError:
            return None
        rounds = devices.fp32_arithmetic(device)["matrix products"] == "tf32"
        rates = [spec.tf32 if one is Precision.FP32 and rounds else spec.flops.get(one) for one in own]
        source = spec.source
    known = [rate for rate in rates if rate is not None]
    return Peak(max(known), source) if len(known) == len(rates) else None


def measure_peaks(device: devices.AnyDevice) -> None:
    """Measure a CPU's peak rates in its useful precisions with this process's threads, unless they are known.

    It takes about a second. Nothing is measured for an accelerator, whose rates are published.
    """
    for one in () if devices.is_accelerator(device) else useful_precisions(torch.device(device).type):
        key = (one, torch.get_num_threads())
        if one in DTYPES and key not in _measured:
            _measured[key] = matmul_peak(DTYPES[one])


def model_flops(name: str, model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor], batch: Any) -> int | None:
    """Return :func:`step_flops` without computing anything, or changing the model; ``None`` if that is not possible.

    A copy of the model without values is traced, so that a loss that depends on values cannot be counted.

    Args:
        name: the job, whose counts are remembered by the shapes of its parameters and batches.
        model: the model, without a plan.
        loss: ``(model, batch) -> scalar tensor``.
        batch: a batch on the model's device.
    """
    shapes = [tuple(tensor.shape) for tensor in (*model.parameters(), *tensors(batch))]
    key = (name, *shapes)
    if key not in _counted:
        try:
            with randomness.isolated(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
                memo = {id(one): _without_values(one, mode) for one in (*model.parameters(), *model.buffers())}
                twin = copy.deepcopy(model, memo)
                _counted[key] = step_flops(twin, loss, map_tensors(lambda leaf: _without_values(leaf, mode), batch))
        except Exception as error:  # noqa: BLE001 - whatever a model does with values that are not there
            logger.debug("operations of %s cannot be counted: %s", name, error)
            _counted[key] = None
    return _counted[key]


def _without_values(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    made: torch.Tensor = mode.from_tensor(tensor)
    return made


def step_flops(model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor], batch: Any) -> int:
    """Return the floating-point operations of a forward and a backward pass of a model without a plan.

    Matrix products, convolutions and attention are counted, two operations per multiplication and addition; elementwise
    operations (normalisation, activations, the optimizer) are not. Parameters' gradients are not changed.

    Args:
        model: the model, in training mode.
        loss: ``(model, batch) -> scalar tensor``.
        batch: a batch on the model's device.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    counter = FlopCounterMode(display=False)
    # The counter does not support a CPU's fused attention; the unfused one computes the same products.
    with sdpa_kernel(SDPBackend.MATH), counter:
        torch.autograd.grad(loss(model, batch), parameters, allow_unused=True)
    return int(counter.get_total_flops())


def matmul_peak(dtype: torch.dtype, device: str = "cpu") -> float:
    """Return the highest measured rate of a product of two square matrices, in operations per second.

    Args:
        dtype: data type of both matrices.
        device: device to compute on; a CPU uses this process's threads.
    """
    sides = _ACCELERATORS_SIDES if devices.is_accelerator(device) else _SIDES
    highest = 0.0
    for side in sorted(sides):
        seconds = _product_s(side, dtype, device)
        highest = max(highest, 2 * side**3 / seconds)
        if seconds > _LONG_S:
            # A format that is emulated: a product of twice the side takes eight times as long, at the same rate.
            break
    return highest


def _product_s(side: int, dtype: torch.dtype, device: str) -> float:
    """Return the seconds of a product of two square matrices."""
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    # The first product warms up, for example by choosing a kernel.
    _, second = (devices.seconds_of(lambda: left @ right, device) for _ in range(2))
    if second > _LONG_S:
        return second
    return min(second, *(devices.seconds_of(lambda: left @ right, device) for _ in range(_REPETITIONS - 1)))
