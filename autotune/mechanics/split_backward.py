"""Backward passes of a pipeline's stage in two parts: what the rank before waits for, and the gradients of weights.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. The graph is divided by functions of torch's own pipelines:
the second part begins at the operations that use a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
    stage_backward_weight,
)
from torch.utils.hooks import RemovableHandle


class SplitBackward:
    """A backward pass of one micro-batch, of which the first part is run when this is made.

    What the micro-batch saved stays until the second part, which also needs the gradients of what operations with
    weights have returned.

    Args:
        end: the number from which the backward pass begins; it is detached.
        received: what the stage was handed, which gets its gradient.
        late: parameters that get theirs in the second part.
        early: parameters that get theirs in the first one: in the second part, a unit that recomputes would do so again
            for each of its weights.
    """

    def __init__(
        self, end: torch.Tensor, received: torch.Tensor, late: Sequence[nn.Parameter], early: Sequence[nn.Parameter]
    ) -> None:
        self._late = late
        self._groups = get_param_groups([_node(received)], [*map(_node, late)], construct_reverse_graph([_node(end)]))
        handles = [handle for group in self._groups for handle in _noting(group)]
        try:
            given = torch.autograd.grad(end, [received, *early], retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        end.detach_()
        _accumulate([received, *early], given)

    def finish(self) -> None:
        """Add the gradients of the late parameters to those that they have, and release what the micro-batch saved."""
        groups, self._groups = self._groups, []
        stage_backward_weight(iter(self._late), groups)


def _noting(group: dict[str, Any]) -> list[RemovableHandle]:
    """Note the gradients of a group's operations, as torch's second part reads them; return the hooks' handles."""
    group["intermediates"] = list(group["intermediates"])
    grads: list[tuple[torch.Tensor | None, ...]] = [()] * len(group["intermediates"])
    group["grads"] = grads

    def note(place: int) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
        def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
            grads[place] = gradients

        return hook

    return [node.register_prehook(note(place)) for place, node in enumerate(group["intermediates"])]


def _node(tensor: torch.Tensor) -> Node:
    """Return the node of the graph that makes a tensor's gradient, or accumulates a parameter's."""
    found = _get_grad_fn_or_grad_acc(tensor)
    assert found is not None
    return found


def _accumulate(tensors: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    for one, gradient in zip(tensors, gradients, strict=True):
        if gradient is not None and one.grad is not None:
            one.grad += gradient
        elif gradient is not None:
            one.grad = gradient
