"""Optimizer updates: batches are split and weighted, losses scaled and accumulated, gradients clipped and applied.

The gradient of an update is (1/N) times the sum over the step's loss-bearing items, however the step was cut into
micro-batches, and an update that is not finite never reaches a weight. This file knows nothing of plans, windows or
measurements.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from autotune.errors import JobError
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.trees import map_tensors, tensors

Count = Callable[[Any], int]

_T = TypeVar("_T")


def num_samples(batch: Any) -> int:
    """Return a batch's sample count: the first dimension of its first tensor that has one.

    Raises:
        JobError: if the batch holds no such tensor, or no sample.
    """
    samples = next((leaf.shape[0] for leaf in tensors(batch) if leaf.dim() > 0), 0)
    if samples == 0:
        raise JobError("a batch has no samples", where="batches", allowed="tensors with samples in dimension 0")
    return int(samples)


def split(batch: Any, pieces: int, whole: Collection[int] = ()) -> list[Any]:
    """Cut a batch into micro-batches whose sizes differ by at most one sample.

    Tensors whose first dimension is the batch's sample count are cut; everything else is passed whole to each piece. A
    batch of fewer samples than ``pieces`` gives as many pieces as it has samples.

    Args:
        batch: any tree of tensors with samples in dimension 0.
        pieces: how many micro-batches, at least 1.
        whole: indices, among the batch's tensors, of those that are never cut.

    Returns:
        The micro-batches, in order; views, not copies.

    Raises:
        JobError: if the batch has no samples.
    """
    samples = num_samples(batch)
    pieces = min(pieces, samples)
    if pieces == 1:
        return [batch]

    def piece(index: int) -> Any:
        numbers = itertools.count()

        def cut(leaf: torch.Tensor) -> torch.Tensor:
            has_samples = next(numbers) not in whole and leaf.dim() > 0 and leaf.shape[0] == samples
            return leaf.tensor_split(pieces)[index] if has_samples else leaf

        return map_tensors(cut, batch)

    return [piece(index) for index in range(pieces)]


def unevenness(samples: int, pieces: int, *, later: bool = False) -> float:
    """Return the size of the largest piece of a batch over that of an equal share: 16/9 for 9 samples in 8 pieces.

    Args:
        samples: samples in the batch; 0 for equal pieces.
        pieces: how many pieces :func:`split` is asked for, at least 1.
        later: whether the largest is wanted of all pieces but the first; 8/9 in the example.
    """
    if not samples:
        return 1.0
    cut = min(pieces, samples)
    largest = samples // cut + (samples % cut > (later and cut > 1))
    return largest * pieces / samples


class WholeTensors:
    """Record of a run's tensors whose first dimension is not their batch's number of samples.

    Such a tensor, for example class weights, is never cut, even if the two numbers are equal by chance.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], set[int]] = {}

    def note(self, batch: Any) -> None:
        """Add a batch; one without samples is ignored."""
        try:
            samples = num_samples(batch)
        except any_error():  # the loop may know what to do with a batch that nothing here can walk over
            return
        leaves = enumerate(tensors(batch))
        self.of(batch).update(n for n, leaf in leaves if leaf.dim() == 0 or leaf.shape[0] != samples)

    def split(self, batch: Any, pieces: int) -> list[Any]:
        """Cut a batch as :func:`split` does, except for recorded tensors."""
        return split(batch, pieces, self.of(batch))

    def of(self, batch: Any) -> set[int]:
        """Return the recorded indices, which batches share whose tensors have the same dtypes and dimensions."""
        return self._found.setdefault(tuple((leaf.dtype, leaf.dim()) for leaf in tensors(batch)), set())


def count_items(batch: Any, count: Count | None) -> int:
    """Return the number of a batch's loss-bearing items by the job's own count, or of its samples.

    Raises:
        JobError: if the count is not a whole number >= 0.
    """
    if count is None:
        return num_samples(batch)
    items: Any = count(batch)
    if isinstance(items, torch.Tensor) and items.numel() == 1:
        items = items.item()
    whole = isinstance(items, int | float | np.integer) and not isinstance(items, bool) and float(items).is_integer()
    if not whole or items < 0:
        raise JobError(f"count returned {items!r}", where="count", allowed="a whole number >= 0")
    return int(items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The micro-batches of a step that run in this process.

    Attributes:
        here: micro-batches that run in this process, each with the factor on its mean loss.
        items: loss-bearing items of the whole step.
        samples: samples of each loss-bearing micro-batch of the step, in any process.
        weights: the factor on the mean loss of each of these micro-batches.
    """

    here: tuple[tuple[Any, float], ...]
    items: int
    samples: tuple[int, ...]
    weights: tuple[float, ...]


def shares(pieces: Sequence[Any], count: Count | None) -> Shares:
    """Return the shares of a step whose micro-batches all run in this process.

    A micro-batch without loss-bearing items has weight 0 and no mean loss; it is left out.

    Args:
        pieces: the step's micro-batches.
        count: the job's own count of loss-bearing items; ``None`` counts samples.

    Raises:
        JobError: if the count is not a whole number >= 0.
    """
    counts = [count_items(piece, count) for piece in pieces]
    here = [(piece, weight) for piece, weight in zip(pieces, weights(counts), strict=True) if weight > 0]
    return Shares(
        here=tuple(here),
        items=sum(counts),
        samples=tuple(num_samples(piece) for piece, _ in here),
        weights=tuple(weight for _, weight in here),
    )


class Update:
    """Maker of optimizer updates from micro-batch losses.

    The loss scale stays constant from the first ``backward`` to ``finish``; a change in between would weight
    micro-batches unequally.

    Args:
        optimizer: the optimizer.
        clip_norm: largest 2-norm of the gradient; ``None`` never clips.
        device_type: device type of the loss scale.
        init_scale: the first loss scale.
        growth_interval: finite steps after which the loss scale doubles.
        whole_norm: function that returns the gradient's 2-norm if this rank has only a part; ``None`` computes it here.
        order: the model's parameters; the norm adds their gradients in this order, as loops do that clip
            ``model.parameters()``. Empty for the order of the optimizer's groups.

    Attributes:
        keeps_gradients: whether all gradients are there when the backward pass is done.
        updating: whether the step under way has changed a weight before :meth:`finish`.
    """

    keeps_gradients = True
    updating = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None,
        device_type: str = "cpu",
        init_scale: float = 65536.0,
        growth_interval: int = 2000,
        whole_norm: Callable[[], torch.Tensor] | None = None,
        order: Iterable[nn.Parameter] = (),
    ) -> None:
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self._whole_norm = whole_norm
        self._places = {id(parameter): place for place, parameter in enumerate(order)}
        self.scaled = False
        self._accumulating = False
        self._scaler = torch.amp.GradScaler(device_type, init_scale=init_scale, growth_interval=growth_interval)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the optimizer's parameters, in the order of the model if it is known."""
        found = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if len(self.optimizer.param_groups) > 1 and self._places:
            found.sort(key=lambda parameter: self._places.get(id(parameter), len(self._places)))
        return found

    @property
    def loss_scale(self) -> float:
        """Return the factor on the loss and thereby on the gradients; 1 while scaling is off."""
        return self._scaler.get_scale() if self.scaled else 1.0

    def whole_gradients(self) -> AbstractContextManager[None]:
        """Keep the gradients of all parameters during the body, in which no step is finished."""
        return nullcontext()

    def begin(self, micro_batches: int) -> None:
        """Announce the number of micro-batches of the next update, for subclasses that must know the last one."""

    def backward(self, loss: torch.Tensor, weight: float) -> None:
        """Accumulate the gradient of one micro-batch.

        Args:
            loss: the micro-batch's mean loss, a scalar.
            weight: its share n_j/N of the step's loss-bearing items.
        """
        weighed = loss if weight == 1.0 else loss * weight
        if self.scaled:
            weighed = self._scaler.scale(weighed)
        self._accumulating = True
        weighed.backward()

    def average(self, factor: float) -> None:
        """Multiply accumulated gradients whose weights did not sum to 1 by a factor; call it before :meth:`unscale`."""
        if factor == 1.0:
            return
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def unscale(self) -> float:
        """Turn accumulated gradients into true ones and return their 2-norm.

        Called once between the last ``backward`` and ``finish``.
        """
        if self.scaled and self._accumulating:
            self._scaler.unscale_(self.optimizer)
        if self._whole_norm is not None:
            return float(self._whole_norm())
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norms = [_norm(alike) for alike in _by_mesh(gradients, gradients)]
        return norms[0] if len(norms) == 1 else math.hypot(*norms)

    def clip(self, norm: float) -> None:
        """Scale the gradients down to ``clip_norm``.

        Args:
            norm: result of :meth:`unscale`; nothing is clipped if it is not finite.
        """
        # torch divides by the norm plus 1e-6, so that it also scales gradients whose norm is just below the limit.
        if self.clip_norm is not None and self.clip_norm < norm + 2e-6 and norm < math.inf:
            # In the dtype that the norm was computed in: another one would round the factor differently. The norm of
            # complex gradients is real.
            pairs = [(owner, owner.grad) for owner in self.parameters if owner.grad is not None]
            owners, gradients = zip(*pairs, strict=True)
            dtype = functools.reduce(torch.promote_types, {gradient.dtype.to_real() for gradient in gradients})
            for alike in _by_mesh(owners, gradients):
                nn.utils.clip_grads_with_norm_(alike, self.clip_norm, torch.tensor(norm, dtype=dtype, device="cpu"))

    def learning_rate_times(self, factor: float) -> AbstractContextManager[None]:
        """Run the body with every learning rate multiplied by a factor, and restore the rates."""
        return nullcontext() if factor == 1.0 else self._learning_rate_times(factor)

    @contextmanager
    def _learning_rate_times(self, factor: float) -> Iterator[None]:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        try:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            yield
        finally:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def finish(self, norm: float, *, abandon: bool = False) -> bool:
        """Step and clear the gradients; skip the step if the gradient is not finite.

        Args:
            norm: result of :meth:`unscale`.
            abandon: whether to skip the step in any case, for example for a loss that is not finite.

        Returns:
            Whether the optimizer stepped.
        """
        stepping = math.isfinite(norm) and not abandon and self._accumulating
        if stepping and not self.scaled:
            self.optimizer.step()
        elif self.scaled and self._accumulating and (stepping or not math.isfinite(norm)):
            if stepping:
                self._scaler.step(self.optimizer)
            # Grows after enough finite steps, and backs off if unscaling met an overflow.
            self._scaler.update()
            self._accumulating = False
        self.discard()
        return stepping

    def discard(self) -> None:
        """Drop the accumulated gradients, as if the step had not begun; the loss scale stays."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.scaled and self._accumulating:
            # Setting the scale to itself clears the scaler's record of this step and nothing else.
            self._scaler.update(self.loss_scale)
        self._accumulating = False

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state; its tensors are not copied."""
        return self.optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`optimizer_state`; the optimizer may keep its tensors."""
        self.optimizer.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scaler's state."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._scaler.load_state_dict(state)


def _by_mesh(values: Sequence[_T], gradients: Sequence[torch.Tensor]) -> list[list[_T]]:
    """Group values by the device mesh of their gradients, or by none: one operation cannot take several meshes.

    Args:
        values: values of any type, one for each gradient.
        gradients: tensors; DTensors have a mesh.
    """
    if set(map(type, gradients)) == {torch.Tensor}:
        # Looking up a missing attribute of hundreds of tensors takes a tenth of the time of their norm.
        return [list(values)]
    groups: dict[Any, list[_T]] = {}
    for value, gradient in zip(values, gradients, strict=True):
        groups.setdefault(getattr(gradient, "device_mesh", None), []).append(value)
    return list(groups.values())


def _norm(gradients: Sequence[torch.Tensor]) -> float:
    """Return the 2-norm of gradients on one mesh; for DTensors, over all its ranks."""
    # The values of a sparse gradient have the same norm.
    dense = [one if one.layout is torch.strided else one.coalesce().values() for one in gradients]
    norm: Any = nn.utils.get_total_norm(dense)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def weights(counts: Sequence[int]) -> list[float]:
    """Return each micro-batch's share of the loss-bearing items; zeros if there are none.

    Source: eq. 4 of the paper for equal counts; weighting by items keeps it exact for unequal ones
    (transformers#34191).
    """
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]
