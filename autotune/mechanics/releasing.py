"""Make an optimizer's update during the backward pass, one parameter after the other, and free each gradient at once.

Only one gradient or a few are alive at a time, instead of those of the whole model. That takes the update of a
parameter to depend on that parameter alone, a single backward pass per step, and gradients that are neither clipped by
their common norm nor scaled.

Source: Lv et al. 2024, Full Parameter Fine-tuning for Large Language Models with Limited Resources (2306.09782), and
PyTorch's ``register_post_accumulate_grad_hook``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from autotune.errors import JobError
from autotune.mechanics.stepping import Update

_WITHOUT = "a job without +release"


@contextmanager
def released(optimizer: torch.optim.Optimizer, seen: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Run a backward pass in the body that updates each parameter as soon as its gradient is complete, and frees it.

    Args:
        optimizer: the optimizer.
        seen: called with each gradient before its update.

    Raises:
        JobError: if a parameter would be updated twice.
    """
    groups = optimizer.param_groups
    # What a step writes to a group, such as a counter of steps, is kept when the last parameter has been updated: each
    # of them begins with the same group.
    written: dict[int, dict[str, Any]] = {}
    updated: set[int] = set()

    def updater(place: int) -> Callable[[torch.Tensor], None]:
        def update(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if id(parameter) in updated:
                problem = "a parameter is given its gradient in several parts, as by reentrant checkpoints"
                raise JobError(problem, where="+release", allowed=_WITHOUT)
            updated.add(id(parameter))
            seen(parameter.grad)
            written[place] = {**groups[place], "params": [parameter]}
            optimizer.param_groups = [written[place]]
            try:
                optimizer.step()
            finally:
                optimizer.param_groups = groups
            parameter.grad = None

        return update

    hooks = [
        parameter.register_post_accumulate_grad_hook(updater(place))
        for place, group in enumerate(groups)
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for place, group in written.items():
            groups[place].update({name: value for name, value in group.items() if name != "params"})


class ReleasingUpdate(Update):
    """Maker of updates that are done when the backward pass is; arguments as for :class:`Update`, which clips nothing.

    A step that is not finite has changed weights when that is known, so :meth:`finish` raises.
    """

    keeps_gradients = False

    def __init__(self, optimizer: torch.optim.Optimizer, **common: Any) -> None:
        super().__init__(optimizer, clip_norm=None, **common)
        self.updating = False
        self._keeping = False
        self._norms: list[torch.Tensor] = []

    @contextmanager
    def whole_gradients(self) -> Iterator[None]:
        """Keep the gradients of all parameters during the body, in which no weight changes."""
        self._keeping = True
        try:
            yield
        finally:
            self._keeping = False

    def begin(self, micro_batches: int) -> None:
        """Forget an earlier step that was interrupted."""
        self.discard()

    def backward(self, loss: torch.Tensor, weight: float) -> None:
        """Run the backward pass and, unless the loss is not finite or gradients are kept, make the update.

        Raises:
            JobError: if updates come too early for the job's backward pass.
        """
        updates = not self._keeping and math.isfinite(float(loss.detach()))
        body: AbstractContextManager[None] = released(self.optimizer, self._see) if updates else nullcontext()
        try:
            with body:
                super().backward(loss, weight)
        except RuntimeError as error:
            if self.updating and "modified by an inplace operation" in str(error):
                problem = "the backward pass reads a weight again after its update"
                raise JobError(problem, where="+release", allowed=_WITHOUT) from error
            raise

    def unscale(self) -> float:
        """Return the 2-norm of the gradient."""
        return float(torch.linalg.vector_norm(torch.stack(self._norms))) if self.updating else super().unscale()

    def finish(self, norm: float, *, abandon: bool = False) -> bool:
        """Forget the step, which is made; return whether it was.

        Raises:
            JobError: if the gradient was not finite.
        """
        stepped, made = self.updating, math.isfinite(norm)
        if stepped:
            # What a backward pass within the loss left.
            self.optimizer.step()
        self.discard()
        if stepped and not made:
            raise JobError("a gradient that is not finite was applied", where="+release", allowed="finite gradients")
        return stepped

    def discard(self) -> None:
        """Drop what is left of the step."""
        self._norms, self.updating = [], False
        super().discard()

    def _see(self, gradient: torch.Tensor) -> None:
        # The values of a sparse gradient have the same norm.
        dense = gradient if gradient.layout is torch.strided else gradient.coalesce().values()
        self._norms.append(torch.linalg.vector_norm(dense).float())
        self.updating = True
