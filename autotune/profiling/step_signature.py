"""Tell what a step's memory depends on before it runs: its batch's shapes, what is trained, how often it is called.

Bytes alone do not tell: 8 sequences of 256 tokens take as many as 64 of 32, and their attention weights eight times
the room. A batch that is in every dimension as large as one that was measured, or smaller, or larger, needs what its
bytes tell; one that is larger in one dimension and smaller in another has to be measured itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autotune.mechanics.memory_meter import content_bytes
from autotune.mechanics.trees import tensors

# Steps after which a model's parameters are listed anew.
_WALK_EVERY = 16


@dataclass(frozen=True, slots=True)
class Signature:
    """What a step's memory depends on besides the bytes of its batch.

    Attributes:
        shapes: of the batch's tensors.
        trained: number of parameters that require a gradient, and of those that the optimizer keeps a state for.
        calls: how many times as often as when it was profiled a forward pass may call a unit.
    """

    shapes: tuple[tuple[int, ...], ...]
    trained: tuple[int, int]
    calls: int = 1

    def is_kin_to(self, other: Signature) -> bool:
        """Tell whether steps with the two differ by their batches alone."""
        return (self.trained, self.calls) == (other.trained, other.calls)

    def tells_of(self, other: Signature) -> bool:
        """Tell whether, once a step with this signature was measured, bytes tell what one with the other needs."""
        if self == other:
            return True
        return self.covers(other) or other.covers(self)

    def covers(self, other: Signature) -> bool:
        """Tell whether a step with this signature needs at least as much as one with the other, being no smaller."""
        if not self.is_kin_to(other) or [len(s) for s in self.shapes] != [len(s) for s in other.shapes]:
            return False
        own, its = ([size for shape in one.shapes for size in shape] for one in (self, other))
        return all(map(operator.ge, own, its))


class Trained:
    """Count the parameters of a model that require a gradient, without walking over its modules at each step.

    Parameters that were added, replaced or taken away are noticed at once where the optimizer got others, and at the
    latest after so many steps as ``_WALK_EVERY`` says.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters: list[nn.Parameter] = []
        self._owned = self._steps = 0

    def count(self, owned: int) -> int:
        """Return how many there are; one that several modules share counts for each.

        Args:
            owned: how many parameters the optimizer has.
        """
        if self._steps % _WALK_EVERY == 0 or owned != self._owned:
            held = (one for module in self._model.modules() for one in module._parameters.values())
            self._parameters = [parameter for parameter in held if parameter is not None]
        self._owned, self._steps = owned, self._steps + 1
        return [parameter.requires_grad for parameter in self._parameters].count(True)


def signature_of(batch: Any, trained: Trained, optimizer: torch.optim.Optimizer, calls: int) -> Signature:
    """Return the signature of a step.

    Args:
        batch: its batch, or the first that the caller accumulates.
        trained: counts the model's parameters.
        optimizer: its optimizer.
        calls: as :attr:`Signature.calls`.
    """
    owned = sum(len(group["params"]) for group in optimizer.param_groups)
    return Signature(_shapes(batch), (trained.count(owned), len(optimizer.state)), calls)


def bytes_of(batch: Any) -> int:
    """Return the bytes of a batch's tensors, or, of one without any, what is most like them; at least 1."""
    found = tensors(batch)
    if found:
        return max(content_bytes(found), 1)
    return max(sum(math.prod(shape) for shape in _shapes(batch)), 1)


def _shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a batch's tensors, or, of one without any, of its arrays and texts."""
    found = tensors(batch)
    if found:
        return tuple(tuple(leaf.shape) for leaf in found)
    leaves = [
        getattr(leaf, "shape", (len(leaf),) if isinstance(leaf, str | bytes) else ()) for leaf in tree_leaves(batch)
    ]
    return tuple(tuple(shape) for shape in leaves if isinstance(shape, Sequence))
