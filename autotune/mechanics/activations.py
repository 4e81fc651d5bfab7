"""Recompute a unit's activations in backward, and change nothing else by it.

Random draws repeat, because the generator's state is kept; buffers that forward updates (BatchNorm's running
statistics, a power iteration's vectors) are updated once and read as they were, because the recomputation runs on
copies taken before the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

# The names of a module's buffers that its forward leaves alone and that need no copy, once a pass was watched.
_constant_buffers: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


@dataclass(slots=True)
class Recomputation:
    """Recompute one module's forward, and count how often that happened.

    Attributes:
        module: the module whose forward it is.
        count: how many backward passes recomputed it.
    """

    module: nn.Module
    count: int = 0

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call ``forward`` so that autograd keeps its inputs only.

        Tensors anywhere in the arguments are handed over one by one: checkpoint finds the device whose generator it
        must keep by looking at its positional arguments.
        """
        leaves, shape = tree_flatten((args, dict(kwargs)))
        before = self._copies()

        def flat(*values: Any) -> Any:
            call_args, call_kwargs = tree_unflatten(list(values), shape)
            return forward(*call_args, **call_kwargs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), self._recomputing(before.copies)

        result = checkpoint(flat, *leaves, use_reentrant=False, preserve_rng_state=True, context_fn=contexts)
        self._learn(before)
        return result

    @contextmanager
    def _recomputing(self, copies: Mapping[str, torch.Tensor]) -> Iterator[None]:
        self.count += 1
        owners = {name: _owner(self.module, name) for name in copies}
        current = {name: owner._buffers[key] for name, (owner, key) in owners.items()}
        for name, (owner, key) in owners.items():
            owner._buffers[key] = copies[name]
        try:
            yield
        finally:
            for name, (owner, key) in owners.items():
                owner._buffers[key] = current[name]

    def _copies(self) -> _Before:
        """Copy the buffers that forward may change; in evaluation mode nothing is learnt about them."""
        constant = _constant_buffers.get(self.module)
        if constant is None and not self.module.training:
            return _Before({}, {})
        watched = [item for item in self.module.named_buffers() if item[0] not in (constant or ())]
        return _Before(
            copies={name: value.detach().clone() for name, value in watched},
            marks={name: _mark(value) for name, value in watched},
        )

    def _learn(self, before: _Before) -> None:
        """Drop the copies of buffers that this pass left alone, and remember them if it was the first."""
        now = {name: _mark(value) for name, value in self.module.named_buffers()} if before.marks else {}
        unchanged = frozenset(name for name, mark in before.marks.items() if now.get(name) == mark)
        for name in unchanged:
            del before.copies[name]
        if self.module.training:
            _constant_buffers.setdefault(self.module, unchanged)


@dataclass(frozen=True, slots=True)
class _Before:
    """Hold a module's buffers as they were before a forward pass."""

    copies: dict[str, torch.Tensor]
    marks: dict[str, tuple[int, int]]


def _mark(buffer: torch.Tensor) -> tuple[int, int]:
    """Return what changes when a buffer is written to or replaced."""
    return id(buffer), buffer._version


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return module.get_submodule(path), key
