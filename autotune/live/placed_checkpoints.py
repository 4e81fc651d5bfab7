"""Recomputation placed in a model by one line: its loop stays as it is, and the steps are seen from hooks."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import torch
from torch import nn

from autotune.errors import AttachError
from autotune.live.argument_checks import inner_of
from autotune.live.attach import attach, leave_to_model
from autotune.live.attached import Budget
from autotune.live.integrations.micro_steps import MicroSteps, running_calls
from autotune.live.tuner import LiveTuner
from autotune.mechanics.ambient import runs_backward, transformed
from autotune.mechanics.buffers import version_of
from autotune.mechanics.watching_hooks import WatchingHook

logger = logging.getLogger(__name__)


def checkpoint(
    model: nn.Module,
    memory_budget: Budget,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    accumulation_steps: int | None = None,
) -> LiveTuner:
    """Recompute as few activations as a memory budget allows, in a loop that stays as it is.

    Call it after the optimizer was made and before the first step::

        autotune.checkpoint(model, memory_budget="8GB")

    Training stays bit-identical. It is :func:`autotune.attach` in mode ``exact`` with the policy ``exact``; the steps
    are seen from the model's forward passes and the optimizer's steps, so that nothing is called in the loop. A loop
    whose steps cannot be seen (closures, training in evaluation mode) is left with a warning.

    Args:
        model: the model as the loop calls it, on its device.
        memory_budget: bytes, a size (``"8GB"``), or a function that returns either and is called before every step;
            ``None`` for the device's memory.
        optimizer: its optimizer; ``None`` finds the one that has the model's parameters.
        accumulation_steps: backward passes through the model before each update: those of the batches that the loop
            accumulates, or of several losses; ``None`` learns the number from the first steps.

    Returns:
        The tuner, which need not be kept; ``autotune.detach(model)`` leaves the model as it was.

    Raises:
        AttachError: if no optimizer or several have the model's parameters, or as :func:`autotune.attach`.
    """
    try:
        chosen = _optimizer_of(inner_of(model)) if optimizer is None else optimizer
        tuner = attach(
            model,
            chosen,
            policy="exact",
            memory_budget_bytes=memory_budget,
            accumulation_steps=accumulation_steps,
            runs_dir=None,
        )
    except AttachError as error:
        raise _as_own(error) from None
    if tuner.attached:
        _Steps(model, chosen, tuner)
        leave_to_model(tuner)
    return tuner


def _as_own(error: AttachError) -> AttachError:
    """Return an error of ``attach`` with the names of this function and its arguments."""
    problem = error.problem.replace("memory_budget_bytes", "memory_budget", 1)
    return AttachError(problem, where=error.where.replace("attach", "checkpoint", 1), allowed=error.allowed)


def _optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the one optimizer that has parameters of a model."""
    own = {id(parameter) for parameter in model.parameters()}
    found: list[torch.optim.Optimizer] = [
        one
        for one in gc.get_objects()
        # Some modules answer isinstance() with a warning.
        if issubclass(type(one), torch.optim.Optimizer)
        # Not a wrapper of another one, such as Accelerate's, or Lookahead.
        and not any(isinstance(value, torch.optim.Optimizer) for value in list(vars(one).values()))
        and any(id(parameter) in own for group in getattr(one, "param_groups", ()) for parameter in group["params"])
    ]
    if len(found) != 1:
        told = "several optimizers have" if found else "no optimizer has"
        raise AttachError(
            f"{told} parameters of this model", where="checkpoint", allowed="optimizer=, or a call after it was made"
        )
    return found[0]


class _Steps:
    """Hooks that tell a tuner of the steps of a loop; they leave with it.

    Args:
        model: the model as the loop calls it.
        optimizer: its optimizer.
        tuner: the tuner.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, tuner: LiveTuner) -> None:
        self._tuner = tuner
        # These hooks keep the tuner alive as long as the model; those of the optimizer must not.
        self._handles = [model.register_forward_pre_hook(WatchingHook(self._before, model))]
        self._passes = MicroSteps(model, tuner)
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._versions: list[int] = []
        # The thread that called the model last.
        self._thread = threading.get_ident()
        # The last hook, which may remove the others: torch does not expect that of earlier ones.
        self._handles.append(model.register_forward_hook(WatchingHook(self._after, model)))
        this, its_model, its_optimizer = weakref.ref(self), weakref.ref(model), weakref.ref(optimizer)

        def updating(*_: object) -> None:
            if (steps := this()) is not None:
                steps._passes.update()

        def updated(*_: object) -> None:
            if (steps := this()) is not None:
                # Torch iterates over the hooks that follow this one.
                steps._end(is_last=next(reversed(optimizer_hooks), None) == own)

        def leaving() -> None:
            # While torch goes through the hooks they cannot be removed: the last one of them does it then.
            if (steps := this()) is not None and not any(map(running_calls, (its_model(), its_optimizer()))):
                steps._leave()

        updates = optimizer.register_step_post_hook(updated)
        optimizer_hooks, own = optimizer._optimizer_step_post_hooks, updates.id
        self._handles += [optimizer.register_step_pre_hook(updating), updates]
        tuner.when_detached(leaving)
        self._passes.begin()

    def _before(self, module: nn.Module, _args: object) -> None:
        if runs_backward() or transformed():
            # A checkpoint of the loop's own, round the model, runs it again; or torch.func looks at it.
            return
        if not torch.is_grad_enabled():
            return
        if not module.training:
            # An attack on the model, or attributions: no step has such a pass, so that nothing is known of it.
            self._tuner.recompute_outside_steps()
            return
        self._thread = threading.get_ident()
        versions = list(map(version_of, self._parameters))
        if not self._passes.came_back:
            self._versions = versions
        elif versions == self._versions:
            # A backward pass has run since the last forward pass, and no update: the loop accumulates.
            self._passes.next()
        else:
            # Another optimizer has made it.
            self._versions = versions
            self._passes.update()
            self._end(is_last=False)

    def _after(self, *_: object) -> None:
        if not self._tuner.attached:
            self._leave()

    def _end(self, *, is_last: bool) -> None:
        """Note that an update has ended.

        Args:
            is_last: whether no other hook of the optimizer follows, so that all may be removed.
        """
        if not self._passes.micro_batches and self._tuner.attached:
            reason = "a step did not call the model in training mode before the optimizer's step, as far as is seen"
            logger.warning("%s; the tuner leaves this run, and no memory budget is kept", reason)
            self._tuner.detach(reason)
        if self._thread != threading.get_ident() and self._tuner.attached:
            # Torch's hooks and profiler belong to a thread, so a trace could not end in this one.
            reason = "another thread calls the model than makes the updates"
            logger.warning("%s; the tuner leaves this run, and no memory budget is kept", reason)
            self._tuner.detach(reason)
        self._passes.end(stepped=True)
        if self._tuner.attached:
            self._passes.begin()
        elif is_last:
            self._leave()

    def _leave(self) -> None:
        self._passes.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []
