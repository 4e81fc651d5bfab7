"""Floating-point operations of a step, and the device's peak rate of matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autotune.mechanics import devices

# Sizes of the square matrices that are multiplied, and the number of timed products of each size.
_SIDES, _ACCELERATORS_SIDES = (512, 1024, 1536), (4096, 8192)
_REPETITIONS = 6


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
    return max(_rate(side, dtype, device) for side in sides)


def _rate(side: int, dtype: torch.dtype, device: str) -> float:
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    seconds = []
    # The first product warms up, for example by choosing a kernel.
    for _ in range(1 + _REPETITIONS):
        devices.synchronize(device)
        began = time.perf_counter()
        left @ right
        devices.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return 2 * side**3 / min(seconds[1:])
