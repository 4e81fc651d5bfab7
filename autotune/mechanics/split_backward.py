"""Backward passes of a pipeline's stage in two parts: what the rank before waits for, and the gradients of weights.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. The second part begins at the operations that use a weight,
with the gradients that they were given in the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc, construct_reverse_graph, reverse_closure
from torch.utils.hooks import RemovableHandle

# The gradients that an operation is given, of each of its results.
_Given = tuple[torch.Tensor | None, ...]


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
        self._groups = _groups(end, received, late)
        handles = [handle for group in self._groups for handle in group.noting()]
        try:
            # Gradients are added one after another, and not held until all are there.
            torch.autograd.backward(end, retain_graph=True, inputs=[received, *early])
        finally:
            for handle in handles:
                handle.remove()
        end.detach_()

    def finish(self) -> None:
        """Add the gradients of the late parameters to those that they have, and release what the micro-batch saved."""
        while self._groups:
            self._groups.pop().accumulate()


@dataclass
class _Group:
    """Parameters that the same operations use.

    Attributes:
        parameters: the parameters.
        operations: the first operations after them that what the stage was handed leads to as well.
        given: what these were given in the first part.
    """

    parameters: list[nn.Parameter]
    operations: list[Node]
    given: list[_Given]

    def noting(self) -> list[RemovableHandle]:
        """Note what the operations are given from now on; return the handles that end it."""

        def note(place: int) -> Callable[[_Given], None]:
            def hook(given: _Given) -> None:
                self.given[place] = given

            return hook

        return [node.register_prehook(note(place)) for place, node in enumerate(self.operations)]

    def accumulate(self) -> None:
        """Add the parameters' gradients to those that they have."""
        pairs = [
            (GradientEdge(node, number), gradient)
            for node, given in zip(self.operations, self.given, strict=True)
            for number, gradient in enumerate(given)
            if gradient is not None
        ]
        if not pairs:
            return
        # An operation that another one leads to has been given all that it is to be given.
        handles = [
            node.register_prehook(lambda _, given=given: given)
            for node, given in zip(self.operations, self.given, strict=True)
            if len(self.operations) > 1
        ]
        try:
            edges, gradients = zip(*pairs, strict=True)
            found = torch.autograd.grad(edges, self.parameters, gradients, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for parameter, gradient in zip(self.parameters, found, strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad += gradient
            elif gradient is not None:
                parameter.grad = gradient


def _groups(end: torch.Tensor, received: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[_Group]:
    """Return the groups of parameters on which a number depends, those that get their gradients last first."""
    edges = construct_reverse_graph([_node(end)])
    passed, _ = reverse_closure([_node(received)], set(), edges)
    found: dict[frozenset[Node], list[nn.Parameter]] = {}
    for parameter in parameters:
        _, operations = reverse_closure([_node(parameter)], passed, edges)
        if operations:
            found.setdefault(frozenset(operations), []).append(parameter)
    return [_Group(parameters, list(operations), [()] * len(operations)) for operations, parameters in found.items()]


def _node(tensor: torch.Tensor) -> Node:
    """Return the node of the graph that makes a tensor's gradient, or accumulates a parameter's."""
    found = _get_grad_fn_or_grad_acc(tensor)
    assert found is not None
    return found
