"""The floating-point operations of a step, and the device's rate of matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autotune.mechanics import devices

# Sides of the square matrices that are multiplied, and the number of products of each.
_SIDES, _ACCELERATORS_SIDES = (512, 1024, 1536), (4096, 8192)
_REPETITIONS = 6


def step_flops(model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor], batch: Any) -> int:
    """Return the floating-point operations of a forward and a backward pass, in fp32 and without recomputation.

    Matrix products, convolutions and attention are counted, two operations per multiplication and addition; elementwise
    operations (normalisation, activations, the optimizer) are not. Gradients are left as they were.

    Args:
        model: the model, in training mode.
        loss: ``(model, batch) -> scalar tensor``.
        batch: a batch on the model's device.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    counter = FlopCounterMode(display=False)
    # The counter does not know a CPU's fused attention; written out, it makes the same products.
    with sdpa_kernel(SDPBackend.MATH), counter:
        torch.autograd.grad(loss(model, batch), parameters, allow_unused=True)
    return int(counter.get_total_flops())


def matmul_peak(dtype: torch.dtype, device: str = "cpu") -> float:
    """Return the highest rate of a product of two square matrices on this process's threads, in operations per second.

    Args:
        dtype: of both matrices.
        device: device that holds them.
    """
    sides = _ACCELERATORS_SIDES if devices.is_accelerator(device) else _SIDES
    return max(_rate(side, dtype, device) for side in sides)


def _rate(side: int, dtype: torch.dtype, device: str) -> float:
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    seconds = []
    # The first product chooses its kernel.
    for _ in range(1 + _REPETITIONS):
        devices.synchronize(device)
        began = time.perf_counter()
        left @ right
        devices.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return 2 * side**3 / min(seconds[1:])
