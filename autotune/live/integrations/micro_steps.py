"""Hooks that report micro-batches to a live tuner, for loops that show neither batches nor backward passes.

The hooks are on the model's root module: its inputs are the batch, and the backward pass begins when it reaches one of
its outputs. A loss may call the model several times before that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autotune.errors import AttachError
from autotune.live.tuner import LiveTuner
from autotune.mechanics.trees import tensors
from autotune.mechanics.watching_hooks import WatchingHook


class BackwardWatch:
    """Hooks in the graphs of a model's outputs that report the beginning of the backward pass through them.

    Args:
        began: is called at each micro-batch's backward pass, once.
    """

    def __init__(self, began: Callable[[], None]) -> None:
        self._began = began
        self._handles: list[Any] = []
        self._expects = self.has_begun = False

    def expect(self, outputs: Any) -> None:
        """Expect a backward pass through the outputs of one more call of the model."""
        self._expects = True
        nodes = {tensor.grad_fn: None for tensor in tensors(outputs) if tensor.grad_fn is not None}
        self._handles += [node.register_prehook(self._reached) for node in nodes]

    def end(self) -> None:
        """Note that the micro-batch has ended; a backward pass that was not seen has begun by then."""
        unseen = self._expects and not self.has_begun
        self.forget()
        if unseen:
            self._began()

    def forget(self) -> None:
        """Expect no backward pass any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._expects = self.has_begun = False

    def _reached(self, _gradients: object) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._began()


class MicroSteps:
    """Hooks on a model's root module that watch its forward passes within a step.

    Args:
        model: the model.
        tuner: the tuner to report to.
    """

    def __init__(self, model: nn.Module, tuner: LiveTuner) -> None:
        self._tuner = tuner
        self._watching = False
        self._micro_batches = 0
        self._forwards = 0
        self._backward = BackwardWatch(lambda: tuner.tell_phase("backward"))
        self._handles = [
            model.register_forward_pre_hook(WatchingHook(self._before, model), with_kwargs=True),
            model.register_forward_hook(WatchingHook(self._after, model), with_kwargs=True),
        ]

    @property
    def micro_batches(self) -> int:
        """Forward passes of the model in the present or last step."""
        return self._micro_batches

    @property
    def came_back(self) -> bool:
        """Whether the backward pass of the micro-batch has begun."""
        return self._backward.has_begun

    def begin(self) -> None:
        """Note that an optimizer step begins."""
        self._watching = True
        self._backward.forget()
        self._micro_batches = self._forwards = 0

    def next(self) -> None:
        """Note that a micro-batch's backward pass has ended, and that another micro-batch follows in the step."""
        self._backward.end()
        self._tuner.tell_phase("update")
        self._forwards = 0

    def update(self) -> None:
        """Note that the last micro-batch's backward pass has ended, and that the update follows."""
        self._watching = False
        self._backward.end()
        if self._micro_batches:
            self._tuner.tell_phase("update")

    def end(self, *, stepped: bool) -> None:
        """Note that the step has ended and its gradients are cleared."""
        self._watching = False
        self._tuner.end_step(stepped=stepped)

    def close(self) -> None:
        """Remove the hooks."""
        self._backward.forget()
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._watching or not torch.is_grad_enabled() or not module.training:
            return
        self._forwards += 1
        if self._forwards > 1:
            if self._backward.has_begun and self._tuner.attached:
                self._tuner.detach("the model is called again after a backward pass of the same micro-batch")
            return
        self._micro_batches += 1
        if self._micro_batches == 1:
            self._tuner.begin_step((args, kwargs))
            self._run_beside(module, (args, kwargs))
        else:
            self._tuner.next_micro_batch((args, kwargs))
        self._tuner.tell_phase("forward")

    def _run_beside(self, module: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Run the tuner's trial passes for the step, with the loss that the model itself returns."""
        self._watching = False
        for args, kwargs in self._tuner.passes_beside(batch):
            try:
                self._tuner.backward(_loss_of(module(*args, **kwargs)))
            except Exception as error:  # noqa: BLE001 - if it is the caller's, the step's own pass raises it again
                self._tuner.failed_beside(error)
        self._watching = True

    def _after(self, module: nn.Module, _args: object, _kwargs: object, output: Any) -> None:
        if self._watching and torch.is_grad_enabled() and module.training:
            self._backward.expect(output)


def _loss_of(output: Any) -> torch.Tensor:
    """Return the loss among a model's outputs, found in the same places as the Trainer finds it."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output:
        loss = output[0]
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
        raise AttachError("the model returns no loss of its own", where="live tuner", allowed="labels among its inputs")
    return loss
