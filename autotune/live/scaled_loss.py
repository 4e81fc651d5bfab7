"""Recognise a loss that the user's own ``GradScaler`` has scaled: its gradient would not be unscaled."""

from __future__ import annotations

import gc

import torch

# Nodes that are looked at from the loss on: a scaled loss may be divided by k afterwards.
_DEPTH = 3


def is_scaled(loss: torch.Tensor) -> bool:
    """Tell whether a loss was multiplied by the scale of a ``GradScaler`` that is alive.

    The scale is found in the loss's graph and then looked for in all objects, which takes milliseconds; a loss that is
    not multiplied by a tensor of one element takes microseconds.

    Args:
        loss: a scalar with a gradient, before its backward pass.
    """
    factors = _factors(loss)
    if not factors:
        return False
    # By type: asking an arbitrary object for its class may run code of its own.
    scalers = (one for one in gc.get_objects() if issubclass(type(one), torch.amp.GradScaler))
    scales = [getattr(scaler, "_scale", None) for scaler in scalers]
    return any(isinstance(scale, torch.Tensor) and scale.data_ptr() in factors for scale in scales)


def _factors(loss: torch.Tensor) -> set[int]:
    """Return the addresses of the tensors of one element that the loss was multiplied by last."""
    found, node = set(), loss.grad_fn
    for _ in range(_DEPTH):
        if node is None:
            break
        if node.name() == "MulBackward0":
            saved = (getattr(node, name, None) for name in ("_saved_other", "_saved_self"))
            found |= {factor.data_ptr() for factor in saved if isinstance(factor, torch.Tensor) and factor.numel() == 1}
        node = node.next_functions[0][0] if node.next_functions else None
    return found
