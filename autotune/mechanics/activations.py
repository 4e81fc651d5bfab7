"""Recompute a unit's activations in backward, and change nothing else by it.

Random draws repeat, because the generator's state is kept; buffers that forward updates (BatchNorm's running
statistics, a power iteration's vectors) are updated once and read as they were, because the recomputation runs on
copies taken before the forward pass. A cache of keys and values, which a unit would fill once more, is not handed to
it while it holds nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from autotune.mechanics.buffers import copy_buffers, drop_constants, replaced_buffers

# What a unit may be handed besides tensors: nothing that it could change.
_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    Enum,
    type,
    FunctionType,
    BuiltinFunctionType,
    np.generic,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
# What transformers' models call the cache that they hand to each layer.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


def without_empty_cache(module: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a unit's arguments without a cache that holds nothing for it; nobody reads in training what it would hold.

    A cache that holds something (a prefix, say), or whose entries other layers read, is left where it is.

    Source: ``transformers.modeling_layers.GradientCheckpointingLayer``, which recomputes without one, too.
    """
    numbers = (getattr(part, "layer_idx", None) for part in module.modules())
    number = next((index for index in numbers if type(index) is int), None)
    if number is None or getattr(module, "_can_checkpoint_with_cache", False):
        return dict(kwargs)
    found = [name for name in _CACHES if _is_empty(kwargs.get(name), number)]
    return {**kwargs, **dict.fromkeys(found), **({"use_cache": False} if found and "use_cache" in kwargs else {})}


def foreign_argument(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return the type of an object, handed to a unit, that recomputing might change once more; ``None`` for none."""
    leaves = tree_flatten((args, without_empty_cache(module, kwargs)))[0]
    return next((type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_CONSTANTS))), None)


def _is_empty(cache: object, number: int) -> bool:
    length = getattr(cache, "get_seq_length", None)
    return callable(length) and length(number) == 0


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
        leaves, shape = tree_flatten((args, without_empty_cache(self.module, kwargs)))
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
