"""Normalize over the samples of all ranks, as BatchNorm does over those of one process.

torch's own SyncBatchNorm is another class, whose modules compute on accelerators alone; here the model's modules stay.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from autotune.errors import JobError, a_kind


def share_statistics(model: nn.Module) -> list[str]:
    """Make each BatchNorm normalize over the samples of all ranks while it trains.

    All ranks must call the modules in the same order, forward and backward.

    Args:
        model: the model, in the modes in which it trains.

    Returns:
        The modules' names; empty if none is in training mode.

    Raises:
        JobError: if a module of a class of its own computes otherwise than torch's BatchNorm.
    """
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or isinstance(module, SyncBatchNorm) or not module.training:
            continue
        if type(module).forward is not _BatchNorm.forward:
            raise JobError(
                f"{name} is {a_kind(module)}, whose statistics depend on how ranks share a batch",
                where="engine fsdp2",
                allowed="torch.nn.BatchNorm1d to 3d, whose statistics are shared, or --engine torch",
            )
        vars(module)["forward"] = functools.partial(_normalized, module)
        found.append(name)
    return found


def _normalized(module: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Return what a BatchNorm returns for this rank's share of a batch."""
    if not module.training:
        return _BatchNorm.forward(module, x)
    module._check_input_dim(x)
    mean, variance, count = _statistics(x.detach())
    if module.track_running_stats:
        _remember(module, mean, variance * (count / max(count - 1, 1.0)))
    shared: Any = _SharedNorm
    found: torch.Tensor = shared.apply(x, module.weight, module.bias, mean, variance, count, module.eps)
    return found


def _statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return each channel's mean and variance over all ranks, and the number of its values."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(wide, _others(x), correction=0)
    count = x.numel() // x.shape[1]
    own = torch.stack([mean, variance, torch.full_like(mean, count)]).double()
    ranks = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(ranks, own)
    means, variances, counts = torch.stack(ranks, dim=1)
    total = counts.sum(0)
    whole = (means * counts).sum(0) / total
    spread = ((variances + (means - whole).square()) * counts).sum(0) / total
    return whole.to(wide.dtype), spread.to(wide.dtype), float(total[0])


def _remember(module: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Update the running statistics."""
    share = 0.0 if module.momentum is None else module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            share = 1.0 / float(module.num_batches_tracked)
    for running, value in ((module.running_mean, mean), (module.running_var, variance)):
        if running is not None:
            running.mul_(1 - share).add_(value.to(running.dtype), alpha=share)


def _others(x: torch.Tensor) -> list[int]:
    """Return all dimensions but the channels'."""
    return [0, *range(2, x.dim())]


class _SharedNorm(torch.autograd.Function):
    """Normalization by statistics that depend on the samples of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: float,
        eps: float,
    ) -> torch.Tensor:
        """Return the normalized values."""
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.count, ctx.eps = count, eps
        return F.batch_norm(x, mean, variance, weight, bias, training=False, momentum=0.0, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the values, the weight and the bias.

        Source: Ioffe and Szegedy, Batch Normalization (arXiv:1502.03167), section 3, with sums over all ranks.
        """
        x, weight, mean, variance = ctx.saved_tensors
        shape = [1, -1, *[1] * (x.dim() - 2)]
        scale = torch.rsqrt(variance + ctx.eps)
        centered = (x - mean.view(shape)) * scale.view(shape)
        wide = gradient.to(centered.dtype)
        own = torch.stack([wide.sum(_others(x)), (wide * centered).sum(_others(x))])
        sums = own.clone()
        distributed.all_reduce(sums)
        of_bias, of_weight = (sums / ctx.count).view(2, *shape).unbind()
        factor = scale if weight is None else scale * weight
        found = (wide - of_bias - centered * of_weight) * factor.view(shape)
        weights = (None, None) if weight is None else (own[1].to(weight.dtype), own[0].to(weight.dtype))
        return found.to(x.dtype), *weights, None, None, None, None
