"""Run passes beside a live run: what they compute is looked at and thrown away, and the run goes on as if without them.

They tell what storage's probe cannot: whether a batch may be cut, and what 16 bits do to its gradient.
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

# How far loss and gradient of a batch that is cut in two may differ from the whole's, relative: in fp32, and where the
# user's own autocast rounds to 16 bits.
FP32_TOLERANCE = 1e-4
AUTOCAST_TOLERANCE = 3e-2
# How far 16 bits may turn a gradient, relative.
PRECISION_TOLERANCE = 0.1
_COUPLED = "a sample's loss depends on the others of its batch (BatchNorm, contrastive losses, capacities)"
# Elements of each parameter's gradient that are compared.
_COMPARED = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Result of one way of running a batch.

    Attributes:
        loss: its mean loss.
        gradients: elements of each parameter's gradient, evenly spaced; ``None`` for a parameter without one.
        failure: what a pass raised; ``None`` if none did.
    """

    loss: float
    gradients: Sequence[torch.Tensor | None]
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """Take in what passes under one plan come to.

    Attributes:
        losses: weighed losses of the micro-batches.
        failures: what the plan made them raise.
    """

    losses: list[torch.Tensor]
    failures: list[Exception]

    def outcome(self, parameters: Sequence[nn.Parameter]) -> Outcome:
        """Return the outcome, once the passes have left their gradients in the parameters."""
        gradients = [None if p.grad is None else _sampled(p.grad) for p in parameters]
        failure = next((f"{type(error).__name__}: {error}" for error in self.failures), None)
        return Outcome(float(sum(self.losses)), gradients, failure)


@contextmanager
def undone(model: nn.Module) -> Iterator[None]:
    """Run the body with dropout off, and put back generators and buffers; gradients are the caller's to clear.

    Normalisation stays in training mode: it is what makes a batch's samples depend on each other.
    """
    before, buffers = randomness.capture(), copy_buffers(model)
    modes = {module: module.training for module in model.modules()}
    for module, training in modes.items():
        module.training = training and isinstance(module, _NormBase)
    own = model.__dict__.get("train")
    # Some loops put the model into training mode at each step.
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
        whole: of the whole batch.
        cut: of the batch in two, weighed by items.
        tolerance: how far they may differ, relative.
    """
    failure = whole.failure or cut.failure
    if failure is not None:
        return f"cut in two, it fails: {failure}"
    if not abs(whole.loss) < float("inf") or not abs(cut.loss) < float("inf"):
        return "its loss is not finite"
    if abs(whole.loss - cut.loss) > tolerance * max(abs(whole.loss), 1e-3):
        return (
            f"cut in two, the weighed losses sum to {cut.loss:.6g} and not to {whole.loss:.6g}: "
            f"`count` is wrong or missing, or {_COUPLED}"
        )
    difference = _difference(whole, cut)
    if difference is None:
        return "cut in two, other parameters get gradients"
    if not difference <= tolerance:
        return f"cut in two, the gradient differs by {difference:.2%}: {_COUPLED}"
    return None


def precision_lock(exact: Outcome, rounded: Outcome) -> str | None:
    """Return why a 16-bit precision may not be used; ``None`` if it may.

    Args:
        exact: of the batch in the user's own precision.
        rounded: of the same batch in 16 bits everywhere.
    """
    failure = exact.failure or rounded.failure
    if failure is not None:
        return f"it fails: {failure}"
    difference = _difference(exact, rounded)
    if difference is None:
        return "other parameters get gradients"
    if not difference <= PRECISION_TOLERANCE:
        return f"it turns the gradient by {difference:.1%}, of {PRECISION_TOLERANCE:.0%} that are tolerated"
    return None


def _sampled(gradient: torch.Tensor) -> torch.Tensor:
    flat = gradient.detach().reshape(-1)
    # On the host: what is compared takes no room that the passes need.
    return flat[:: max(-(-flat.numel() // _COMPARED), 1)].cpu().double()


def _difference(one: Outcome, two: Outcome) -> float | None:
    """Return the relative 2-norm of the gradients' difference; ``None`` if other parameters have one."""
    if any((a is None) != (b is None) for a, b in zip(one.gradients, two.gradients, strict=True)):
        return None
    pairs = [(a, b) for a, b in zip(one.gradients, two.gradients, strict=True) if a is not None and b is not None]
    if not pairs:
        return None
    size = sum(float(a.square().sum()) for a, _ in pairs)
    return float((sum(float((a - b).square().sum()) for a, b in pairs) / max(size, 1e-300)) ** 0.5)
