"""Agree on how a loss uses a model on all ranks, and refuse models that ranks cannot train exactly."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autotune.errors import JobError
from autotune.mechanics import controls, cutting, devices, randomness
from autotune.mechanics.buffers import copy_buffers, equal_buffers, undo_writes
from autotune.mechanics.collectives import of_all_ranks
from autotune.mechanics.rank_calls import different_calls
from autotune.mechanics.weight_use import weight_use

_Value = TypeVar("_Value")

# Largest difference of a buffer's sum on two ranks that is due to rounding, as a share of the sum of absolute values.
_ROUNDING = 1e-5
# Largest relative difference of two losses that differ only by rounding: under a loss's own autocast on CPUs, and where
# weights have 16 bits, or fp32 is computed in fewer.
_LOSS_ROUNDING, _COARSE_ROUNDING = 3e-3, 3e-2
# Samples that are tried whole and in parts, unless a batch has fewer.
_TRIED = 4
_REMEDY = "--engine torch, or a model in which a sample's result does not depend on the other samples of its batch"


def contained_units(model: nn.Module, names: Sequence[str], run: Callable[[], object], seed: int) -> list[str]:
    """Return the units that can gather their own weights, the same on all ranks.

    Args:
        model: the model, not spread yet, in the modes in which it trains.
        names: the units' names.
        run: function that computes the loss of a micro-batch of this rank.
        seed: random seed of this rank.

    Raises:
        JobError: if the loss uses the model in a way that ranks cannot train exactly.
    """
    uses = []
    for training in (False, True):
        with _unchanged(model), randomness.isolated():
            randomness.seed_all(seed)
            if not training:
                model.eval()
            before = copy_buffers(model)
            uses.append(_lean(lambda: weight_use(model, names, run)))
            written = _changed_sums(model, before)
    calls = [name for use in uses for name in use.calls]
    own = {name for name in names if all(name in use.contained for use in uses)}
    told = of_all_ranks((sorted(own), calls, written))
    _require_same_calls([one[1] for one in told])
    _require_same_buffers([one[2] for one in told])
    return [name for name in names if all(name in one[0] for one in told)]


def _lean(compute: Callable[[], _Value]) -> _Value:
    """Return what a function computes from a loss, without gradients unless the loss itself computes some."""
    try:
        with torch.no_grad():
            return compute()
    except JobError as error:
        if not isinstance(error.__cause__, RuntimeError):
            raise
    with torch.enable_grad():
        return compute()


def require_separate_samples(
    model: nn.Module, batch: Any, loss: Callable[[Any], torch.Tensor], count: cutting.Count | None
) -> None:
    """Refuse a loss that is not the mean over a batch's items, each of which depends on its own sample alone.

    A few samples are tried whole and in two parts, in evaluation mode; a loss that draws random numbers is not checked.

    Args:
        model: the model, not spread yet.
        batch: a batch.
        loss: function that returns the mean loss of a batch.
        count: the job's count of loss-bearing items; ``None`` counts samples.

    Raises:
        JobError: if the weighted losses of the parts sum to another value, on any rank.
    """
    whole = cutting.WholeTensors()
    whole.note(batch)
    few = whole.split(batch, max(cutting.num_samples(batch) // _TRIED, 1))[0]
    parts = whole.split(few, 2)
    counts = [cutting.count_items(part, count) for part in parts]
    pair = (0.0, 0.0)

    def value_of(samples: Any, seed: int = 1) -> float:
        randomness.seed_all(seed)
        return float(loss(samples))

    with _unchanged(model), randomness.isolated():
        model.eval()
        expected, again = (_lean(functools.partial(value_of, few, seed)) for seed in (1, 2))
        if len(parts) == 2 and min(counts) > 0 and expected == again:
            weighted = zip(parts, cutting.weights(counts), strict=True)
            pair = (expected, sum(_lean(functools.partial(value_of, part)) * weight for part, weight in weighted))
    first = next(model.parameters())
    coarse = devices.is_accelerator(first.device) or controls.has_16_bit_parameters(model)
    tolerance = _COARSE_ROUNDING if coarse else _LOSS_ROUNDING
    for expected, found in of_all_ranks(pair):
        if abs(found - expected) > tolerance * max(abs(expected), 1e-3):
            raise JobError(
                f"in two parts, the weighted losses of a batch sum to {found:.6g} instead of {expected:.6g}",
                where="engine fsdp2",
                allowed="a loss that is the mean over the items of `count`, each of which depends on its own sample "
                "alone (no contrastive loss, no capacities), or --engine torch",
            )


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore a model's modes and buffers after the body, and drop gradients."""
    modes = {module: module.training for module in model.modules()}
    buffers = copy_buffers(model)
    try:
        yield
    finally:
        undo_writes(model, buffers)
        model.zero_grad(set_to_none=True)
        for module, mode in modes.items():
            module.training = mode


def _changed_sums(model: nn.Module, before: Mapping[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
    """Return the sum and the sum of absolute values of each buffer that has changed, by name, without BatchNorm's."""
    norms = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, _BatchNorm))
    now = {name: one for name, one in model.named_buffers() if not name.startswith(norms)}
    changed = [name for name, one in before.items() if name in now and not equal_buffers(now[name], one)]
    parts = {name: torch.view_as_real(now[name]) if now[name].is_complex() else now[name] for name in changed}
    wide = {name: part.double() for name, part in parts.items()}
    return {name: (float(one.sum()), float(one.abs().sum())) for name, one in wide.items()}


def _require_same_calls(ranks: Sequence[Sequence[str]]) -> None:
    for rank, calls in enumerate(ranks):
        for pair in itertools.zip_longest(ranks[0], calls, fillvalue="no more"):
            if len(set(pair)) > 1:
                raise different_calls("fsdp2", f"rank 0 calls {pair[0]}, and rank {rank} {pair[1]}")


def _require_same_buffers(ranks: Sequence[Mapping[str, tuple[float, float]]]) -> None:
    for name in sorted({name for one in ranks for name in one}):
        sums = [one.get(name, (0.0, 0.0)) for one in ranks]
        values = [total for total, _ in sums]
        if max(values) - min(values) > _ROUNDING * max(absolute for _, absolute in sums):
            problem = f"the model writes other values to buffer {name} on each rank"
            raise JobError(problem, where="engine fsdp2", allowed=_REMEDY)
