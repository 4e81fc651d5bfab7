"""Hooks that report micro-batches to a live tuner, for loops that show neither batches nor backward passes.

The hooks are on the model's root module: its inputs are the batch, and the backward pass is taken to begin when its
forward pass ends. If a loss calls the model again before that, the forward pass goes on.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from autotune.errors import AttachError
from autotune.live.tuner import LiveTuner
from autotune.mechanics.ambient import checkpoints, runs_backward, transformed
from autotune.mechanics.buffers import version_of
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.trees import tensors
from autotune.mechanics.watching_hooks import WatchingHook

logger = logging.getLogger(__name__)


class ForwardPasses:
    """The calls of a model within one micro-batch, reported to a tuner as one forward pass.

    After each call the backward pass may begin, and is told to; if the model is called again before it did, the forward
    pass goes on.

    Attributes:
        has_returned: whether a call of the micro-batch has returned.

    Args:
        tuner: the tuner.
        parameters: the parameters that are trained.
    """

    def __init__(self, tuner: LiveTuner, parameters: Sequence[nn.Parameter]) -> None:
        self._tuner, self._parameters = tuner, parameters
        self._handles: list[Any] = []
        self._gradients: list[tuple[int, int]] = []
        self._came_back = False
        self.has_returned = False

    @property
    def came_back(self) -> bool:
        """Whether a backward pass has begun since the first call: it reached an output, or a gradient has changed."""
        return self._came_back or (bool(self._gradients) and self._gradients != self._present())

    def begin(self) -> None:
        """Note that the first call of a micro-batch begins."""
        self.forget()
        self._gradients = self._present()

    def go_on(self) -> None:
        """Note that another call begins, before any backward pass."""
        self._tuner.go_on()

    def returned(self, outputs: Any) -> None:
        """Note that a call has returned."""
        self.has_returned = True
        self._tuner.tell_phase("backward")
        try:
            nodes = {tensor.grad_fn: None for tensor in tensors(outputs) if tensor.grad_fn is not None}
        except any_error():  # outputs of any class may be returned
            return
        self._handles += [node.register_prehook(self._reached) for node in nodes]

    def forget(self) -> None:
        """Expect no backward pass any more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._gradients = [], []
        self._came_back = self.has_returned = False

    def _present(self) -> list[tuple[int, int]]:
        gradients = (parameter.grad for parameter in self._parameters)
        return [(id(one), version_of(one)) for one in gradients if one is not None] or [(0, 0)]

    def _reached(self, _gradients: object) -> None:
        self._came_back = True


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
        self._passes = ForwardPasses(tuner, [one for one in model.parameters() if one.requires_grad])
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
        return self._passes.came_back

    def begin(self) -> None:
        """Note that an optimizer step begins."""
        self._watching = True
        self._passes.forget()
        self._micro_batches = self._forwards = 0

    def next(self) -> None:
        """Note that a micro-batch's backward pass has ended, and that another micro-batch follows in the step."""
        self._passes.forget()
        self._tuner.tell_phase("update")
        self._forwards = 0

    def update(self) -> None:
        """Note that the last micro-batch's backward pass has ended, and that the update follows."""
        self._watching = False
        self._passes.forget()
        if self._micro_batches:
            self._tuner.tell_phase("update")

    def end(self, *, stepped: bool) -> None:
        """Note that the step has ended and its gradients are cleared."""
        self._watching = False
        self._tuner.end_step(stepped=stepped)

    def close(self) -> None:
        """Remove the hooks."""
        self._passes.forget()
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_watched(module):
            return
        if self._forwards and not self._passes.has_returned and running_calls(module) == 1:
            # The last call has raised, for example by Ctrl-C in a notebook: the loop begins the micro-batch again.
            self._forwards = 0
            self._micro_batches -= 1
        self._forwards += 1
        if self._forwards > 1:
            self._call_again()
            return
        if checkpoints():
            # Traces that begin here would end after the checkpoint of the loop's own, which torch does not allow.
            self._leave("the model is called within a checkpoint of the loop's own")
            return
        self._micro_batches += 1
        self._passes.begin()
        if self._micro_batches == 1:
            self._tuner.begin_step((args, kwargs))
            self._run_beside(module, (args, kwargs))
        else:
            self._tuner.next_micro_batch((args, kwargs))
        self._tuner.tell_phase("forward")

    def _call_again(self) -> None:
        """Go on with the forward pass, or leave if the backward pass of the micro-batch has begun."""
        if not self._passes.came_back:
            self._passes.go_on()
        else:
            self._leave("the model is called again after a backward pass of the same micro-batch")

    def _leave(self, reason: str) -> None:
        if self._tuner.attached:
            logger.warning("%s; the tuner leaves this run, and no memory budget is kept", reason)
            self._tuner.detach(reason)

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
        if self._is_watched(module):
            self._passes.returned(output)

    def _is_watched(self, module: nn.Module) -> bool:
        """Return whether a call belongs to the loop's own forward passes, which are to be trained on."""
        trains = self._watching and torch.is_grad_enabled() and module.training
        return trains and not (runs_backward() or transformed())


def running_calls(owner: nn.Module | torch.optim.Optimizer | None) -> int:
    """Return how many calls of a module, which may call itself, or steps of an optimizer run now, on any thread."""
    method = type(owner).step if isinstance(owner, torch.optim.Optimizer) else nn.Module._call_impl
    code, count = getattr(method, "__code__", None), 0
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None and owner is not None:
            count += frame.f_code is code and frame.f_locals.get("self") is owner
            frame = frame.f_back
    return count


def _loss_of(output: Any) -> torch.Tensor:
    """Return the loss among a model's outputs, found in the same places as the Trainer finds it."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output:
        loss = output[0]
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
        raise AttachError("the model returns no loss of its own", where="live tuner", allowed="labels among its inputs")
    return loss
