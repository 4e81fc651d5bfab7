"""Compare trial passes, which run alongside a live run without changing it: their results are discarded.

They show whether a batch may be cut, and how 16 bits change its gradient, which the probe of recomputation does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from autotune.mechanics import randomness
from autotune.mechanics.buffers import copy_buffers, write_buffers
from autotune.profiling.outside_state import Surroundings, own_attributes

# Largest relative difference of loss and gradient between a batch that is cut in two and the whole batch: in fp32, and
# if the user's own autocast rounds to 16 bits.
FP32_TOLERANCE = 1e-4
AUTOCAST_TOLERANCE = 3e-2
# Largest relative difference of a gradient in 16 bits.
PRECISION_TOLERANCE = 0.1
# Largest change of a buffer, as a share of its values, that is due to rounding.
_ROUNDING = 1e-6
_COUPLED = "a sample's loss depends on the others of its batch (BatchNorm, contrastive losses, capacities)"
# Maximum number of elements of each parameter's gradient, and of each buffer, that are compared.
_COMPARED = 4096
# Attributes that are not restored: they are not the user's, or are restored by themselves.
_KEPT = frozenset(vars(nn.Module())) | {"forward"}
# Packages whose modules change their attributes in step with other objects, which are not restored.
_WRAPPERS = ("torch.distributed", "torch.nn.parallel", "deepspeed", "accelerate")


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Result of running a batch under one plan.

    Attributes:
        loss: mean loss of the batch.
        gradients: evenly spaced elements of each parameter's gradient; ``None`` for a parameter without one.
        buffers: evenly spaced elements of each buffer that the passes changed, before and after them, by name.
        failure: the first exception that a pass raised, as text; ``None`` if none did.
    """

    loss: float
    gradients: Sequence[torch.Tensor | None]
    buffers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    failure: str | None = None


@dataclass(slots=True)
class Attempt:
    """Trial passes under one plan.

    Attributes:
        training: whether the model runs in the modes in which it trains, except dropout; else in evaluation mode,
            except BatchNorm and InstanceNorm, since trial passes must show if samples depend on each other.
        losses: weighted losses of the micro-batches.
        failures: exceptions that the passes raised.
        buffers: see :class:`Outcome`.
        drew: whether the passes drew random numbers, so that passes over other micro-batches differ; ``True`` as well
            if they can reach what cannot be restored, so that they may run in evaluation mode only.
    """

    training: bool
    losses: list[torch.Tensor] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    drew: bool = False

    def outcome(self, parameters: Sequence[nn.Parameter]) -> Outcome:
        """Return the outcome, with the gradients that the passes accumulated in the parameters."""
        gradients = [None if p.grad is None else _sampled(p.grad) for p in parameters]
        failure = next((f"{type(error).__name__}: {error}" for error in self.failures), None)
        return Outcome(float(sum(self.losses)), gradients, self.buffers, failure)

    @contextmanager
    def undone(self, model: nn.Module) -> Iterator[None]:
        """Run the body with dropout off, then restore the generators and the model's state.

        The caller must clear the gradients.
        """
        around = Surroundings(model, own=own_attributes(model)) if self.training else None
        self.drew = around is not None and around.refusal is not None
        trains, state = self.training and not self.drew, _State(model)
        modes = {module: module.training for module in model.modules()}
        for module, training in modes.items():
            on = not isinstance(module, _DropoutNd) if trains else isinstance(module, _NormBase)
            module.training = training and on
        own = model.__dict__.get("train")
        # Some loops set the model to training mode at each step, which must have no effect.
        model.__dict__["train"] = lambda mode=True: model
        before = randomness.capture()
        try:
            yield
        finally:
            self.buffers = state.changed_buffers()
            self.drew |= randomness.drawn(before) or (around is not None and around.drew)
            del model.__dict__["train"]
            if own is not None:
                model.__dict__["train"] = own
            if around is not None and around.refusal is None:
                around.restore()
            state.restore()
            for module, training in modes.items():
                module.training = training
            randomness.restore(before)


class _State:
    """The present attributes and buffers of a model's parts.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._copies = model, copy_buffers(model)
        # Restored as objects; `Surroundings` restores their contents.
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for part in model.modules():
            self._held += [(part._buffers, part._buffers.copy())] if part._buffers else []
            if not type(part).__module__.startswith(_WRAPPERS):
                self._held.append((vars(part), vars(part).copy()))

    def changed_buffers(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return evenly spaced elements of each buffer that has changed, before and now."""
        present = dict(self._model.named_buffers())
        pairs = {
            name: (_sampled(one), _sampled(present[name]))
            for name, one in self._copies.items()
            if name in present and one.layout is present[name].layout is torch.strided
        }
        return {name: pair for name, pair in pairs.items() if not _equal(*pair)}

    def restore(self) -> None:
        """Restore attributes and buffers."""
        for held, then in self._held:
            for name in held.keys() - then.keys() - _KEPT:
                del held[name]
            held.update((name, value) for name, value in then.items() if name not in _KEPT)
        write_buffers(self._model, self._copies)


def k_lock(whole: Outcome, cut: Outcome, tolerance: float) -> str | None:
    """Return why k may not be changed; ``None`` if it may.

    Args:
        whole: outcome of the whole batch.
        cut: outcome of the batch cut in two micro-batches, weighted by items.
        tolerance: largest relative difference.
    """
    failure = whole.failure or cut.failure
    if failure is not None:
        return f"cut in two, it fails: {failure}"
    if not abs(whole.loss) < float("inf") or not abs(cut.loss) < float("inf"):
        return "its loss is not finite"
    if abs(whole.loss - cut.loss) > tolerance * max(abs(whole.loss), 1e-3):
        return (
            f"cut in two, the weighted losses sum to {cut.loss:.6g} instead of {whole.loss:.6g}: "
            f"`count` is wrong or missing, or {_COUPLED}"
        )
    difference = _difference(whole, cut)
    if difference is None:
        return "cut in two, different parameters get gradients"
    if not difference <= tolerance:
        return f"cut in two, the gradient differs by {difference:.2%}: {_COUPLED}"
    changed = dict.fromkeys((*whole.buffers, *cut.buffers))
    other = next((name for name in changed if not _same_buffer(whole, cut, name, tolerance)), None)
    if other is not None:
        return f"cut in two, the buffer {other!r} gets other values: it counts calls, or averages over them"
    return None


def precision_lock(exact: Outcome, rounded: Outcome) -> str | None:
    """Return why a 16-bit precision may not be used; ``None`` if it may.

    Args:
        exact: outcome of a batch in the user's own precision.
        rounded: outcome of the same batch in 16 bits everywhere.
    """
    failure = exact.failure or rounded.failure
    if failure is not None:
        return f"it fails: {failure}"
    difference = _difference(exact, rounded)
    if difference is None:
        return "different parameters get gradients"
    if not difference <= PRECISION_TOLERANCE:
        return f"it changes the gradient by {difference:.1%}; at most {PRECISION_TOLERANCE:.0%} is tolerated"
    return None


def _sampled(gradient: torch.Tensor) -> torch.Tensor:
    flat = gradient.detach().reshape(-1)
    # On the host, to leave the device's memory to the passes.
    return flat[:: max(-(-flat.numel() // _COMPARED), 1)].cpu().clone()


def _same_buffer(whole: Outcome, cut: Outcome, name: str, tolerance: float) -> bool:
    """Return whether a buffer has the same values after the passes under both plans."""
    if name not in whole.buffers or name not in cut.buffers:
        return False
    (before, one), (_, other) = whole.buffers[name], cut.buffers[name]
    if _equal(one, other):
        return True
    if not one.shape == other.shape == before.shape:
        return False
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other, before = one.to(wide), other.to(wide), before.to(wide)
    bound = tolerance * torch.linalg.vector_norm(one - before) + _ROUNDING * torch.linalg.vector_norm(one)
    return bool(torch.linalg.vector_norm(one - other) <= bound)


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and torch.equal(one, two)


def _difference(one: Outcome, two: Outcome) -> float | None:
    """Return the relative 2-norm of the gradients' difference; ``None`` if other parameters have one, or none has."""
    if any((a is None) != (b is None) for a, b in zip(one.gradients, two.gradients, strict=True)):
        return None
    pairs = [(a, b) for a, b in zip(one.gradients, two.gradients, strict=True) if a is not None and b is not None]
    if not pairs:
        return None
    size = sum(_squared(a) for a, _ in pairs)
    return float((sum(_squared(a.double() - b) for a, b in pairs) / max(size, 1e-300)) ** 0.5)


def _squared(gradient: torch.Tensor) -> float:
    """Return the square of a gradient's 2-norm."""
    return float(gradient.double().square().sum())
