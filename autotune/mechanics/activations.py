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

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from autotune.mechanics.buffers import copy_buffers, drop_constants, replaced_buffers


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
        copies = copy_buffers(self.module)

        def flat(*values: Any) -> Any:
            call_args, call_kwargs = tree_unflatten(list(values), shape)
            return forward(*call_args, **call_kwargs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), self._recomputing(copies)

        result = checkpoint(flat, *leaves, use_reentrant=False, preserve_rng_state=True, context_fn=contexts)
        drop_constants(self.module, copies)
        return result

    @contextmanager
    def _recomputing(self, copies: Mapping[str, torch.Tensor]) -> Iterator[None]:
        self.count += 1
        with replaced_buffers(self.module, copies):
            yield
