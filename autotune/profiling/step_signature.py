"""What the memory of a step depends on, known before it runs: shapes, trained parameters, and calls of units.

Bytes do not suffice: 8 sequences of 256 tokens have as many as 64 of 32, but their attention weights take eight times
the memory. The bytes of a batch predict its memory if another batch was measured that is larger, or smaller, in every
dimension. A batch that is larger in one dimension and smaller in another has to be measured itself.
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
_REQUIRES_GRAD = operator.attrgetter("requires_grad")

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """What the memory of a step depends on besides the bytes of its batch.

    Attributes:
        shapes: shapes of the batch's tensors.
        trained: number of parameters that require a gradient, and of those with a state in the optimizer.
        calls: calls of a unit in a forward pass, divided by those when it was profiled.
    """

    shapes: Shapes
    trained: tuple[int, int]
    calls: int = 1

    def is_kin_to(self, other: Signature) -> bool:
        """Tell whether steps with the two signatures differ only in their batches."""
        return (self.trained, self.calls) == (other.trained, other.calls)

    def tells_of(self, other: Signature) -> bool:
        """Tell whether a measured step with this signature predicts, by bytes, one with the other."""
        if self == other:
            return True
        return self.covers(other) or other.covers(self)

    def covers(self, other: Signature) -> bool:
        """Tell whether a step with this signature is at least as large as one with the other in every dimension."""
        if not self.is_kin_to(other) or [len(s) for s in self.shapes] != [len(s) for s in other.shapes]:
            return False
        own, its = ([size for shape in one.shapes for size in shape] for one in (self, other))
        return all(map(operator.ge, own, its))


class Trained:
    """Counter of the parameters that require a gradient, which rarely walks over the model's modules.

    Parameters that were added, replaced or removed are noticed at once if the optimizer's number of parameters has
    changed, and otherwise within ``_WALK_EVERY`` steps.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters: list[nn.Parameter] = []
        self._owned = self._steps = 0

    def count(self, owned: int) -> int:
        """Return the number; a parameter that several modules share counts for each.

        Args:
            owned: number of the optimizer's parameters.
        """
        if self._steps % _WALK_EVERY == 0 or owned != self._owned:
            held = (one for module in self._model.modules() for one in module._parameters.values())
            self._parameters = [parameter for parameter in held if parameter is not None]
        self._owned, self._steps = owned, self._steps + 1
        return sum(map(_REQUIRES_GRAD, self._parameters))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a batch holds, found in one walk over it.

    Attributes:
        shapes: shapes of its tensors; of a batch without tensors, of its arrays and texts.
        num_bytes: bytes of the same, at least 1.
        samples: number of samples; 1 where the batch holds no tensor that tells.
    """

    shapes: Shapes
    num_bytes: int
    samples: int


def contents_of(batch: Any) -> Contents:
    """Return what a batch holds."""
    found = tensors(batch)
    if not found:
        shapes = _shapes_of_others(batch)
        return Contents(shapes=shapes, num_bytes=max(sum(map(math.prod, shapes)), 1), samples=1)
    shapes = tuple([tuple(leaf.shape) for leaf in found])
    samples = next((shape[0] for shape in shapes if shape), 1)
    return Contents(shapes=shapes, num_bytes=max(content_bytes(found), 1), samples=max(samples, 1))


def signature_of(shapes: Shapes, trained: Trained, optimizer: torch.optim.Optimizer, calls: int) -> Signature:
    """Return the signature of a step.

    Args:
        shapes: shapes of the tensors of its batch, or of the first batch that the caller accumulates.
        trained: counts the model's parameters.
        optimizer: the model's optimizer.
        calls: value of :attr:`Signature.calls`.
    """
    owned = sum(len(group["params"]) for group in optimizer.param_groups)
    return Signature(shapes, (trained.count(owned), len(optimizer.state)), calls)


def _shapes_of_others(batch: Any) -> Shapes:
    """Return the shapes of a batch's arrays and texts."""
    leaves = [
        getattr(leaf, "shape", (len(leaf),) if isinstance(leaf, str | bytes) else ()) for leaf in tree_leaves(batch)
    ]
    return tuple(tuple(shape) for shape in leaves if isinstance(shape, Sequence))
