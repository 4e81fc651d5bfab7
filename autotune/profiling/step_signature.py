"""What determines a step's memory and is known before it runs: shapes, trained parameters, modes, and calls of units.

The number of bytes does not suffice: 8 sequences of 256 tokens have as many as 64 of 32, but their attention weights
take eight times the memory. A batch's bytes predict its memory if a measured batch is at least as large in every
dimension, or at most as large, and no tensor grows by more than the batch. Another batch must be measured itself.
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

from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.memory_meter import content_bytes
from autotune.mechanics.trees import tensors

# Factor by which a tensor may grow more than its batch.
_EVENLY = 1.05
# Size of a batch that has no contents, such as an index: large enough to tell shares of it apart.
_UNTOLD_BYTES = 256
# Number of steps after which a model's parameters are listed again.
_WALK_EVERY = 16
_REQUIRES_GRAD, _DTYPE = operator.attrgetter("requires_grad"), operator.attrgetter("dtype")
_TRAINING = operator.attrgetter("training")

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """What the memory of a step depends on besides the bytes of its batch.

    Attributes:
        shapes: shapes of the batch's tensors.
        trained: hash of which parameters require a gradient, of their dtypes and of which modules are in training mode,
            and number of parameters with optimizer state.
        calls: calls of a unit per forward pass, divided by the number when the run was profiled.
    """

    shapes: Shapes
    trained: tuple[int, int]
    calls: int = 1

    def is_kin_to(self, other: Signature) -> bool:
        """Return whether steps with the two signatures differ only in their batches."""
        return (self.trained, self.calls) == (other.trained, other.calls)

    def tells_of(self, other: Signature) -> bool:
        """Return whether the memory of a step with this signature predicts that of the other, scaled by bytes."""
        return self == other or self.covers(other) or self.scales_to(other)

    def scales_to(self, other: Signature) -> bool:
        """Return whether steps with the two signatures need memory in proportion to the bytes of their batches."""
        if self == other:
            return True
        if self.covers(other):
            return not other._hides_growth_to(self)
        return other.covers(self) and not self._hides_growth_to(other)

    def _hides_growth_to(self, larger: Signature) -> bool:
        """Return whether a tensor grows by more than the whole batch, so that its bytes do not tell of it.

        Beside a large image or table, a text may become many times as long, and with it what units keep.
        """
        own, its = ([math.prod(shape) for shape in one.shapes] for one in (self, larger))
        whole = sum(its) / max(sum(own), 1)
        return any(large > _EVENLY * whole * max(small, 1) for small, large in zip(own, its, strict=True))

    def covers(self, other: Signature) -> bool:
        """Return whether this signature is at least as large as the other in every dimension."""
        if not self.is_kin_to(other) or [len(s) for s in self.shapes] != [len(s) for s in other.shapes]:
            return False
        own, its = ([size for shape in one.shapes for size in shape] for one in (self, other))
        return all(map(operator.ge, own, its))


class Trained:
    """Which of a model's parameters require a gradient, in which dtypes, and which of its modules are in training mode.

    It lists them only every ``_WALK_EVERY`` steps, or when the optimizer's number of parameters has changed. Until
    then, those that were added, replaced or removed go unnoticed.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._owned = self._steps = 0

    def present(self, owned: int) -> int:
        """Return a hash of all that.

        Args:
            owned: number of the optimizer's parameters.
        """
        if self._steps % _WALK_EVERY == 0 or owned != self._owned:
            self._modules = list(self._model.modules())
            held = (one for module in self._modules for one in module._parameters.values())
            self._parameters = [parameter for parameter in held if parameter is not None]
        self._owned, self._steps = owned, self._steps + 1
        gradients, dtypes = map(_REQUIRES_GRAD, self._parameters), map(_DTYPE, self._parameters)
        return hash((tuple(gradients), tuple(dtypes), tuple(map(_TRAINING, self._modules))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The contents of a batch.

    Attributes:
        shapes: shapes of the batch's tensors; if it has none, of its arrays and strings.
        num_bytes: bytes of the tensors, at least 1; if there are none, the number of elements of arrays and strings, at
            least ``_UNTOLD_BYTES``.
        samples: first dimension of the first tensor that has one, else 1.
    """

    shapes: Shapes
    num_bytes: int
    samples: int


def contents_of(batch: Any) -> Contents:
    """Return the contents of a batch."""
    found = tensors(batch)
    if not found:
        shapes = _shapes_of_others(batch)
        return Contents(shapes=shapes, num_bytes=max(sum(map(math.prod, shapes)), _UNTOLD_BYTES), samples=1)
    # The sizes of a nested tensor are not numbers, but those of what it holds are.
    shapes = tuple([tuple((leaf.values() if leaf.is_nested else leaf).shape) for leaf in found])
    samples = next((leaf.size(0) for leaf in found if leaf.dim()), 1)
    return Contents(shapes=shapes, num_bytes=max(content_bytes(found), 1), samples=max(samples, 1))


def signature_of(shapes: Shapes, trained: Trained, optimizer: torch.optim.Optimizer, calls: int) -> Signature:
    """Return the signature of a step.

    Args:
        shapes: shapes of the tensors of its batch, or of the first batch that the caller accumulates.
        trained: the model's trained parameters and modes.
        optimizer: the model's optimizer.
        calls: value of :attr:`Signature.calls`.
    """
    owned = sum(len(group["params"]) for group in optimizer.param_groups)
    return Signature(shapes, (trained.present(owned), len(optimizer.state)), calls)


def _shapes_of_others(batch: Any) -> Shapes:
    """Return the shapes of a batch's arrays and strings."""
    return tuple(tuple(shape) for shape in map(_shape_of_other, tree_leaves(batch)) if isinstance(shape, Sequence))


def _shape_of_other(leaf: object) -> object:
    if isinstance(leaf, str | bytes):
        return (len(leaf),)
    try:
        return getattr(leaf, "shape", ())
    except any_error():  # a class may answer to names that it does not know in any way
        return ()
