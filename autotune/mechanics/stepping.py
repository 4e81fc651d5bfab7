"""Optimizer updates: losses are scaled and accumulated, gradients clipped and applied.

The gradient of an update is (1/N) times the sum over the step's loss-bearing items, however the step was cut into
micro-batches, and an update that is not finite never reaches a weight. This file knows nothing of plans, windows or
measurements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

_T = TypeVar("_T")


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
            if not pairs:
                # Other ranks have the whole gradient.
                return
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
