"""Detection of losses that the user's own ``GradScaler`` has scaled, whose gradients would not be unscaled."""

from __future__ import annotations

import gc

import torch

# Graph nodes to inspect, starting at the loss: a scaled loss may have been divided by k afterwards.
_DEPTH = 3


def is_scaled(loss: torch.Tensor) -> bool:
    """Return whether a loss was multiplied by the scale of an existing ``GradScaler``.

    A factor in the loss's graph is compared with the scalers among all objects, which takes milliseconds. Without a
    factor of one element, the check takes microseconds.

    Args:
        loss: a scalar with a gradient, before its backward pass.
    """
    factors = _factors(loss)
    if not factors:
        return False
    # Not isinstance(), because it may run code of the objects.
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
