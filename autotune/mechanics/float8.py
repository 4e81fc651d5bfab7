"""Linear layers with products of 8-bit floating-point numbers, for a unit in precision ``fp8``.

The two factors of a layer's forward pass are rounded to e4m3, and the gradient of its output to e5m2. Each tensor is
scaled so that its largest magnitude is the format's largest number. Products are summed in fp32. Weights, biases and
their gradients keep their dtype, and nothing is kept from step to step. Where a device has no fast path, the products
of the rounded numbers are computed in fp32: the same numbers, but for the order of the sums.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433), for the formats and what each is used
for; scaling each tensor by its present largest magnitude follows "dynamic scaling" of PyTorch's torchao.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autotune.mechanics import devices

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Sizes that the fast path multiplies; a layer with another one computes as under plain autocast.
_MULTIPLE = 16
# Smaller magnitudes count as this one, so that a tensor of zeros has a scale.
_TINY = 1e-30
# The function itself: others may put one of their own in its place.
_LINEAR = F.linear
_ONCE = "linear layers in fp8 have no second derivative; give their unit another precision"


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor rounded to an 8-bit format, and the fp32 scale (a scalar tensor) that it is to be multiplied by.

    Args:
        tensor: floating-point numbers, at least one.
        dtype: the format.
    """
    largest = torch.finfo(dtype).max
    scale = tensor.abs().amax().float().clamp(min=_TINY) / largest
    return (tensor.float() / scale).clamp(-largest, largest).to(dtype), scale


def product(
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
    *,
    is_fast: bool,
) -> torch.Tensor:
    """Return the matrix product of two rounded matrices.

    Args:
        first: shape (m, n), and its scale.
        second: shape (n, l), and its scale.
        dtype: dtype of the result.
        is_fast: whether the device has a fast path; otherwise the rounded numbers are multiplied in fp32.

    Returns:
        Shape (m, l).
    """
    (one, one_scale), (other, other_scale) = first, second
    if not is_fast:
        return ((one.float() @ other.float()) * (one_scale * other_scale)).to(dtype)
    # cuBLASLt multiplies rows of the first matrix by columns of the second, each of which must be contiguous.
    one, other = one.contiguous(), other.t().contiguous().t()
    return torch._scaled_mm(one, other, scale_a=one_scale, scale_b=other_scale, out_dtype=dtype)


class _Linear(torch.autograd.Function):
    """A linear layer of a matrix of shape (rows, inputs), whose result has the dtype of autocast."""

    @staticmethod
    def forward(
        ctx: Any,
        matrix: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        is_fast: bool,
    ) -> torch.Tensor:
        found, scale = rounded(matrix, E4M3)
        ctx.save_for_backward(found, scale, weight)
        ctx.dtypes, ctx.is_fast = (matrix.dtype, None if bias is None else bias.dtype), is_fast
        own, own_scale = rounded(weight, E4M3)
        result = product((found, scale), (own.t(), own_scale), dtype, is_fast=is_fast)
        return result if bias is None else result + bias.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(_ONCE)
        matrix, scale, weight = ctx.saved_tensors
        dtype, bias_dtype = ctx.dtypes
        of_matrix = of_weight = of_bias = None
        with torch.autocast(gradient.device.type, enabled=False):
            found, found_scale = rounded(gradient, E5M2)
            if ctx.needs_input_grad[0]:
                of_matrix = product((found, found_scale), rounded(weight, E4M3), dtype, is_fast=ctx.is_fast)
            if ctx.needs_input_grad[1]:
                of_weight = product((found.t(), found_scale), (matrix, scale), weight.dtype, is_fast=ctx.is_fast)
            if ctx.needs_input_grad[2]:
                of_bias = gradient.float().sum(0).to(bias_dtype)
        return of_matrix, of_weight, of_bias, None, None


class Linears(TorchFunctionMode):
    """Context in which ``torch.nn.functional.linear`` multiplies 8-bit numbers.

    Layers with a size that is no multiple of 16, and with inputs or weights other than plain floating-point tensors of
    at most 32 bits, compute as they would without it.

    Args:
        dtype: dtype of the results.
        device_type: type of the device that computes.
    """

    def __init__(self, dtype: torch.dtype, device_type: str) -> None:
        super().__init__()
        self._dtype, self._is_fast = dtype, not devices.lacks_float8(device_type)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        kwargs = dict(kwargs or {})
        if func is _LINEAR and (found := _taken(*args, **kwargs)) is not None:
            tensor, weight, bias = found
            with torch.autocast(tensor.device.type, enabled=False):
                matrix = tensor.reshape(-1, tensor.shape[-1])
                result: torch.Tensor = _Linear.apply(matrix, weight, bias, self._dtype, self._is_fast)  # type: ignore[no-untyped-call]
                return result.view(*tensor.shape[:-1], weight.shape[0])
        return func(*args, **kwargs)


def _taken(
    input: torch.Tensor,  # noqa: A002 - the name that F.linear gives it
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """Return the arguments of a linear layer that can multiply 8-bit numbers; ``None`` for any other."""
    given = [one for one in (input, weight, bias) if one is not None]
    plain = all(
        type(one) in (torch.Tensor, torch.nn.Parameter) and one.is_floating_point() and one.itemsize in (2, 4)
        for one in given
    )
    if not plain or weight.dim() != 2 or input.dim() < 1 or input.shape[-1] != weight.shape[1] or not input.numel():
        return None
    sizes = (input.numel() // input.shape[-1], *weight.shape)
    return None if any(size % _MULTIPLE for size in sizes) else (input, weight, bias)
