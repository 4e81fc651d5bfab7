"""Backward passes of a pipeline's stage in two parts: what the rank before waits for, and the gradients of weights.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. The second part begins at the operations that use a weight,
with the gradients that they were given in the first one.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc, reverse_closure
from torch.utils.hooks import RemovableHandle

from autotune.mechanics.trees import tensors

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
        self._groups = _groups([end], [received], late)
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


def _groups(
    ends: Sequence[torch.Tensor], received: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]
) -> list[_Group]:
    """Return the groups of the parameters between two sets of tensors, those that get their gradients last first."""
    stops = set(map(_node, received))
    users: dict[Node, list[Node]] = defaultdict(list)
    reached = [*map(_node, ends)]
    seen = {*reached, *stops}
    while reached:
        node = reached.pop()
        for other, _ in node.next_functions:
            if other is not None:
                users[other].append(node)
                reached += [] if other in seen else [other]
                seen.add(other)
    passed, _ = reverse_closure([*stops], set(), users)
    found: dict[frozenset[Node], list[nn.Parameter]] = {}
    for parameter in parameters:
        _, operations = reverse_closure([_node(parameter)], passed, users)
        if operations:
            found.setdefault(frozenset(operations), []).append(parameter)
    return [_Group(parameters, list(operations), [()] * len(operations)) for operations, parameters in found.items()]


class GivenBytes:
    """Bytes of the gradients that operations with weights are given in each unit's first call in a step.

    Use it as a context manager around the step.

    Attributes:
        found: the bytes, by unit; those are left out that are handed nothing with a gradient.

    Args:
        model: the model.
        names: its units.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._units = {name: model.get_submodule(name) for name in names}
        self._handles: list[RemovableHandle] = []
        self._seen: set[str] = set()
        self.found: dict[str, int] = {}

    def __enter__(self) -> GivenBytes:
        for name, module in self._units.items():
            hook = functools.partial(self._returned, name)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _returned(self, *call: Any) -> None:
        # What cannot be told of a unit is left out.
        with contextlib.suppress(Exception):
            self._note(*call)

    def _note(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        received = [one for one in tensors((args, kwargs)) if one.requires_grad]
        ends = [one for one in tensors(output) if one.grad_fn is not None]
        if name in self._seen or not torch.is_grad_enabled() or not (received and ends):
            return
        self._seen.add(name)
        weights = [one for one in module.parameters() if one.requires_grad]
        operations = {node for group in _groups(ends, received, weights) for node in group.operations}

        def note(given: _Given) -> None:
            self.found[name] = self.found.get(name, 0) + sum(one.nbytes for one in given if one is not None)

        self._handles += [node.register_prehook(note) for node in operations]


def _node(tensor: torch.Tensor) -> Node:
    """Return the node of the graph that makes a tensor's gradient, or accumulates a parameter's."""
    found = _get_grad_fn_or_grad_acc(tensor)
    assert found is not None
    return found
