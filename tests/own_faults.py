"""Faults inside a user's model or optimizer: nonfinite numbers and out of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from autotune.units import units_of

NOT_FINITE = ("nan in forward", "nan in loss", "nan in backward", "nan in update")
OUT_OF_MEMORY = ("memory in forward", "memory between", "memory in backward")


class OwnFault:
    """A fault that occurs once, at the first opportunity after it is due.

    Attributes:
        fired: whether the fault has occurred.

    Args:
        kind: one of ``NOT_FINITE`` and ``OUT_OF_MEMORY``.
        is_due: tells whether the fault is due.
        model: the model.
        optimizer: its optimizer.
    """

    def __init__(
        self, kind: str, is_due: Callable[[], bool], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.kind, self.fired = kind, False
        self._is_due = is_due
        names = [unit.name for unit in units_of(model, None)]
        unit = model.get_submodule(names[len(names) // 2]) if names else model
        weight = next(p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
        if kind == "nan in forward":
            unit.register_forward_pre_hook(self._spoil_inputs, with_kwargs=True)
        elif kind == "nan in loss":
            model.register_forward_hook(lambda _module, _args, output: self._spoiled(output))
        elif kind == "nan in backward":
            weight.register_hook(self._spoiled)
        elif kind == "nan in update":
            optimizer.register_step_pre_hook(lambda *_: self._spoil_gradient(weight))
        elif kind == "memory in forward":
            for part in list(unit.modules())[1:] or [unit]:
                part.register_forward_pre_hook(lambda *_: self._run_out())
        elif kind == "memory between":
            model.register_forward_hook(lambda *_: self._run_out())
        else:
            weight.register_hook(lambda _: self._run_out())

    def _fires(self) -> bool:
        if self.fired or not self._is_due():
            return False
        self.fired = True
        return True

    def _run_out(self) -> None:
        # A pass without gradients needs little memory.
        if (torch.is_grad_enabled() or self.kind == "memory in backward") and self._fires():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def _spoiled(self, tree: Any) -> Any:
        floating = [False]

        def spoil(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
                return leaf
            floating[0] = True
            return leaf * float("nan")

        if self.fired or not self._is_due():
            return tree
        found = tree_map(spoil, tree)
        self.fired = floating[0]
        return found

    def _spoil_inputs(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._spoiled((args, kwargs))

    def _spoil_gradient(self, weight: torch.Tensor) -> None:
        if weight.grad is not None and self._fires():
            weight.grad.mul_(float("nan"))
