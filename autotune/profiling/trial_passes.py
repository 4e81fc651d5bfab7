"""Compare trial passes, which run alongside a live run without changing it: their results are discarded.

They show whether a batch may be cut, and how 16 bits change its gradient, which the probe of recomputation does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from autotune.mechanics import randomness
from autotune.mechanics.buffers import copy_buffers, write_buffers

# Largest relative difference of loss and gradient between a batch that is cut in two and the whole batch: in fp32, and
# if the user's own autocast rounds to 16 bits.
FP32_TOLERANCE = 1e-4
AUTOCAST_TOLERANCE = 3e-2
# Largest relative difference of a gradient in 16 bits.
PRECISION_TOLERANCE = 0.1
_COUPLED = "a sample's loss depends on the others of its batch (BatchNorm, contrastive losses, capacities)"
# Maximum number of elements of each parameter's gradient that are compared.
_COMPARED = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Result of running a batch under one plan.

    Attributes:
        loss: mean loss of the batch.
        gradients: evenly spaced elements of each parameter's gradient; ``None`` for a parameter without one.
        failure: the first exception that a pass raised, as text; ``None`` if none did.
    """

    loss: float
    gradients: Sequence[torch.Tensor | None]
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """Losses and failures of the trial passes under one plan.

    Attributes:
        losses: weighted losses of the micro-batches.
        failures: exceptions that the passes raised.
    """

    losses: list[torch.Tensor]
    failures: list[Exception]

    def outcome(self, parameters: Sequence[nn.Parameter]) -> Outcome:
        """Return the outcome, with the gradients that the passes accumulated in the parameters."""
        gradients = [None if p.grad is None else _sampled(p.grad) for p in parameters]
        failure = next((f"{type(error).__name__}: {error}" for error in self.failures), None)
        return Outcome(float(sum(self.losses)), gradients, failure)


@contextmanager
def undone(model: nn.Module) -> Iterator[None]:
    """Run the body with dropout off, and restore generators and buffers; the caller must clear the gradients.

    BatchNorm and InstanceNorm stay in training mode, since trial passes must show if samples depend on each other.
    """
    before, buffers = randomness.capture(), copy_buffers(model)
    modes = {module: module.training for module in model.modules()}
    for module, training in modes.items():
        module.training = training and isinstance(module, _NormBase)
    own = model.__dict__.get("train")
    # Some loops set the model to training mode at each step, which must have no effect.
    model.__dict__["train"] = lambda mode=True: model
    try:
        yield
    finally:
        del model.__dict__["train"]
        if own is not None:
            model.__dict__["train"] = own
        for module, training in modes.items():
            module.training = training
        write_buffers(model, buffers)
        randomness.restore(before)


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
