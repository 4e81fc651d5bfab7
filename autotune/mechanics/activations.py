"""Recompute a unit's activations in backward, and change nothing else by it.

A recomputation runs as the forward pass did: with the generators' states, the attributes, modes, weights and buffers
that the unit had when it was called, under the flags of torch that were set then, and with copies of what it was handed
besides tensors (a cache of keys and values, say) and of the lists and dictionaries among its attributes, as they were
then. What it changes of all that is forgotten. Of tensors that other passes have computed the values are kept, and not
the graphs. Whether a recomputation repeats the forward pass is found out on a sample of calls.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_unflatten
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from autotune.mechanics import ambient
from autotune.mechanics.buffers import (
    constants_of,
    copy_buffers,
    drop_constants,
    fresh_buffers,
    lost_buffer,
    replaced_buffers,
    version_of,
)
from autotune.mechanics.copies import CopyError, TensorCopy, copied, has_scalar_attributes, is_unchanged
from autotune.mechanics.kept import Kept, Objects, Reads, flattened, is_carrier, objects_of, without_graph
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.repeats import Repeats, is_due

logger = logging.getLogger(__name__)

WRITTEN = "what it is handed is written to in place before its backward pass"
_DIFFERS = "recomputed, it did not repeat its forward pass"
_OF_MODULES = frozenset(vars(nn.Module()))


def uncopyable_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return the type of an object, handed to a unit, that no copy can be made of; ``None`` for none."""
    try:
        copied([leaf for leaf in flattened(args, kwargs)[0] if not isinstance(leaf, torch.Tensor)])
    except CopyError as error:
        return str(error)
    return None


class _Again(AbstractContextManager[None]):
    """Put a module back, while the body runs, to what it was when this was made; it can be entered any number of times.

    Attributes:
        runs: whether a body runs.

    Args:
        recomputation: of the module.
        parts: the module's parts.
        objects: copies of what it is handed and holds now; ``None`` for nothing.
        repeats: compares what the bodies save; ``None`` for nothing.
    """

    def __init__(
        self,
        recomputation: Recomputation,
        parts: Sequence[nn.Module],
        objects: Objects | None = None,
        repeats: Repeats | None = None,
    ) -> None:
        module = recomputation.module
        self.repeats = repeats
        self.recomputation = recomputation
        self.objects = objects or Objects({}, {})
        # What stands for what it was handed, while a body runs.
        self.handed: Mapping[int, Any] = {}
        # What is handed over itself, if it is alive and unchanged, or whatever it is.
        self.originals: dict[int, Callable[[], Any]] = {}
        self.insists = False
        # What it was handed, where that is kept besides.
        self.kept: Kept | None = None
        # Each dictionary of the module's parts, and what it held; the parts' own ones come first, by place.
        self._own: list[tuple[int, dict[str, Any], dict[str, Any]]] = []
        self._then: list[tuple[dict[str, Any], dict[str, Any]]] = []
        # Each weight, and whether it was trained.
        self._weights: list[tuple[nn.Parameter, bool]] = []
        for place, part in enumerate(parts):
            if not isinstance(part, torch.jit.ScriptModule):
                # Copies stand for what it held: to keep that would keep other passes' graphs alive.
                then = {**part.__dict__, **self.objects.attributes.get(place, {})}
                self._own.append((place, part.__dict__, then))
                # Of buffers it says which there were; their values are put back as well.
                self._then += [
                    (held, held.copy()) for held in (part._modules, part._buffers) if type(held) is dict and held
                ]
                # torch.func.functional_call runs a module with other weights than it has. A dictionary of another
                # class (DeepSpeed's ZeRO-3) gathers a weight when it is read.
                if part._parameters and type(part._parameters) is dict:
                    self._then.append((part._parameters, part._parameters.copy()))
                    self._weights += [(one, one.requires_grad) for one in part._parameters.values() if one is not None]
        for held in objects_of(parts):
            # Values alone: an object that takes up what others have computed would keep their graphs alive.
            values = held.items()
            then = {name: without_graph(one) if isinstance(one, torch.Tensor) else one for name, one in values}
            self._then.append((held, then))
        tensors = _tensors_of(parts)
        self._versions = [(one, version_of(one)) for one in tensors]
        self._then += [(vars(one), vars(one).copy()) for one in tensors if has_scalar_attributes(one)]
        self.buffers, self.constants = {}, {}
        if any(part._buffers for part in parts):
            self.buffers, self.constants = copy_buffers(module), constants_of(module)
        self._flags = ambient.flags()
        self._entered: list[ExitStack] = []

    @property
    def runs(self) -> bool:
        return bool(self._entered)

    def has_run(self, leaves: Sequence[Any]) -> None:
        """Note what the first run did.

        Objects that it left as they were are handed over themselves: code may ask whether it is handed the very one
        that it was handed before. Of its own tensors that it wrote to, others stand in.

        Args:
            leaves: what it was handed.
        """
        for place, copy in self.objects.handed.items():
            original = leaves[place]
            if original is not copy and is_unchanged(original, copy):
                # One that nobody can refer to weakly has a copy after all.
                with suppress(TypeError):
                    self.originals[place] = weakref.ref(original)
        written = {id(one): one for one, version in self._versions if version_of(one) != version}
        if written:
            self.recomputation.bar_late("it has begun to write to its own weights or other tensors")
            self._replace({key: one.detach().clone().requires_grad_(one.requires_grad) for key, one in written.items()})
        self._versions = []

    def _replace(self, others: Mapping[int, torch.Tensor]) -> None:
        """Have what is run again write to other tensors."""
        for then in (*(then for _, _, then in self._own), *(then for _, then in self._then)):
            for name, value in then.items():
                if id(value) in others:
                    other = others[id(value)]
                    is_weight = isinstance(value, nn.Parameter)
                    then[name] = nn.Parameter(other, requires_grad=other.requires_grad) if is_weight else other

    def drop(self, unused: TensorCopy) -> None:
        """Forget tensors that objects hold, once the module has run.

        Args:
            unused: returns what stands for a tensor from now on.
        """
        self.objects = self.objects.copied(unused)
        for place, _, then in self._own:
            then.update(self.objects.attributes.get(place, {}))

    def _made_again(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return each dictionary of the parts and what it held, with other copies of objects at each time."""
        alive = {place: found() for place, found in self.originals.items()}
        # Copies lead to other tensors where those that it was handed have been written to.
        written = self.kept is not None and self.kept.written
        known = {
            place: one
            for place, one in alive.items()
            if self.insists or (one is not None and not written and is_unchanged(one, self.objects.handed[place]))
        }
        try:
            again = self.objects.copied(_itself if self.kept is None else self.kept.then, known)
        except any_error() as error:  # whatever it is, the run goes on
            self.recomputation.bar_late(f"it holds what cannot be copied any more ({type(error).__name__}: {error})")
            again = self.objects
        self.handed = again.handed
        own = [(held, {**then, **again.attributes.get(place, {})}) for place, held, then in self._own]
        return [*own, *self._then]

    def __enter__(self) -> None:
        self.recomputation.count += 1
        stack = ExitStack()
        flags = ambient.flags()
        if flags != self._flags:
            ambient.put(self._flags, flags)
        # Checkpoint leaves a recomputation once it has what was saved: what the unit sets back later is left to do.
        stack.callback(_put_flags, flags)
        if self.recomputation.around is not None:
            stack.enter_context(self.recomputation.around.as_they_were())
        former = self._made_again()
        stack.callback(_restore, [(own, then if _holds(own, then) else own.copy()) for own, then in former])
        _restore(former)
        others = [(weight, trained) for weight, trained in self._weights if weight.requires_grad != trained]
        for weight, trained in others:
            stack.callback(weight.requires_grad_, not trained)
            weight.requires_grad_(trained)
        if self.buffers or self.constants:
            stack.enter_context(self._buffers_as_they_were())
        if self.repeats is not None:
            stack.callback(self.recomputation.take, self.repeats)
            stack.enter_context(self.repeats.again())
        self._entered.append(stack)

    def __exit__(self, *_: object) -> None:
        self._entered.pop().close()

    def _buffers_as_they_were(self) -> AbstractContextManager[None]:
        """Return what runs a body on copies of the buffers."""
        module = self.recomputation.module
        lost = lost_buffer(module, self.constants)
        if lost is not None:
            self.recomputation.bar_late(f"its buffer {lost!r} was written to, of which it keeps no copy")
        return replaced_buffers(module, fresh_buffers(module, self.buffers, self.constants))


def _catches_errors(parts: Sequence[nn.Module]) -> bool:
    """Tell whether a method of the parts' classes may catch the exception by which checkpoint ends a recomputation."""
    kinds = dict.fromkeys(
        base
        for part in parts
        for base in type(part).__mro__
        if base.__module__.partition(".")[0] not in ("torch", "builtins")
    )
    methods = (one for kind in kinds for one in vars(kind).values() if isinstance(one, FunctionType))
    return any(_catches(inspect.unwrap(method).__code__) or _catches(method.__code__) for method in methods)


@functools.cache
def _catches(code: CodeType) -> bool:
    steps = [step.opname for step in dis.get_instructions(code)]
    bare = any(pair == ("PUSH_EXC_INFO", "POP_TOP") for pair in itertools.pairwise(steps))
    return bare or "CHECK_EXC_MATCH" in steps or "suppress" in code.co_names


def _tensors_of(parts: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Return the weights and other tensors that parts have, but for buffers."""
    held: Iterator[Any] = (
        one for part in parts for owner in (part.__dict__, part._parameters) for one in owner.values()
    )
    return [one for one in held if type(one) in (torch.Tensor, nn.Parameter)]


def _put_flags(wanted: list[Any]) -> None:
    """Set flags that are others than wanted."""
    present = ambient.flags()
    if present != wanted:
        ambient.put(wanted, present)


def _restore(former: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Put back what dictionaries held, where they hold something else."""
    for own, then in former:
        if not _holds(own, then):
            own.clear()
            own.update(then)


def _holds(own: dict[str, Any], then: dict[str, Any]) -> bool:
    """Tell whether a dictionary holds the same objects as another."""
    return len(own) == len(then) and all(map(operator.is_, own.values(), then.values()))


def _itself(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class _First:
    """What only the first run of a call needs; it is forgotten afterwards, so that nothing is kept alive by it.

    Attributes:
        args: what the unit is called with.
        kwargs: the same, by keyword.
        leaves: of both.
        inputs: what checkpoint is handed.
        reads: sees which tensors of objects are used.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: Sequence[Any]
    inputs: Sequence[torch.Tensor | None]
    reads: Reads


@dataclass(slots=True)
class _Call:
    """One call of a unit, which can be run again as it was.

    Attributes:
        forward: the unit's forward.
        shape: of its arguments.
        tensors: those it was handed that nothing has computed, by place: code may ask for the very one.
        attributes: those that its other tensors have, by place.
        kept: what it was handed, where that is kept besides.
        held: the tensors that objects hold, otherwise.
        again: puts the unit back to what it was.
        first: what its first run needs; ``None`` once it has run.
    """

    forward: Callable[..., Any]
    shape: TreeSpec
    tensors: Mapping[int, torch.Tensor]
    attributes: Mapping[int, Mapping[str, Any]]
    kept: Kept | None
    held: Kept | None
    again: _Again
    first: _First | None

    def run(self, *leaves: Any) -> Any:
        """Run it; with the leaves that checkpoint kept, where it is run again."""
        if self.first is not None and not self.again.runs:
            return self.forward(*self.first.args, **self.first.kwargs)
        found = list(leaves[: self.shape.num_leaves]) if self.kept is None else self.kept.leaves()
        for place, value in (*self.tensors.items(), *self.again.handed.items()):
            found[place] = value
        for place, attributes in self.attributes.items():
            vars(found[place]).update(attributes)
        if self.held is not None and self.held.written:
            self.again.recomputation.bar_late(WRITTEN)
        args, kwargs = tree_unflatten(found, self.shape)
        return self.forward(*args, **kwargs)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[None]]:
        """Return what the first run and the later ones run within."""
        watch: AbstractContextManager[Any] = nullcontext()
        if self.first is not None and self.first.reads.tensors:
            watch = self.first.reads
        return watch if self.again.repeats is None else self.again.repeats.first(watch), self.again

    def has_run(self) -> None:
        """Forget what only its first run needs, and of other units' tensors what it did not use."""
        assert self.first is not None
        first, self.first = self.first, None
        self.again.has_run(first.leaves)
        # What is kept besides is found by the tensors themselves.
        if first.reads.tensors and self.kept is None:
            if self.held is not None:
                self.held.drop(first.reads.left)
            self.again.drop(first.reads.left)


def undone(module: nn.Module) -> AbstractContextManager[None]:
    """Return what runs a body after which a module has the attributes, modes, weights and buffers that it has now."""
    return _Again(Recomputation(module), list(module.modules()))


class Reachable(Protocol):
    """What a unit's code can reach besides the unit."""

    def as_they_were(self) -> AbstractContextManager[None]:
        """Run the body with all of it as it was."""


@dataclass(slots=True)
class Recomputation:
    """Recompute one module's forward, and count how often that happened.

    Attributes:
        module: the module whose forward it is.
        checks: whether a sample of the recomputations is compared with the forward passes.
        count: how many backward passes recomputed it.
        keeps: whether what it is handed is kept besides, while nobody knows whether it is written to before backward.
        hooks: how many hooks its parts had when it was probed; ``None`` for as many as at its first call.
        barred: why it is not recomputed any more; ``None`` while it is.
        kept: what it was handed since backward began last.
        around: puts back what its code can reach besides, round a recomputation; ``None`` for nothing.
        carriers: the attributes that a pass may put something into, or that hold what one has computed, by the place of
            the part that has them.
    """

    module: nn.Module
    checks: bool = False
    count: int = 0
    keeps: bool = False
    barred: str | None = None
    kept: list[Kept] = field(default_factory=list)
    around: Reachable | None = None
    hooks: int | None = None
    carriers: dict[int, set[str]] = field(default_factory=dict)
    # Whether its code may catch the exception by which checkpoint ends a recomputation early; ``None`` if not known.
    _catches: bool | None = None
    _calls: int = 0
    _last: _Call | None = None
    # The identities of what each part's attributes held at the call before.
    _held: list[list[int]] = field(default_factory=list)
    # Of the arguments last called with.
    _shape: TreeSpec | None = None
    # Whether a recomputation differed, where only the device knows.
    _differs: torch.Tensor | None = None

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call ``forward`` so that autograd keeps its inputs only."""
        try:
            call = self._prepared(forward, args, kwargs)
        except any_error() as error:  # whatever it is, the unit is left alone
            self.barred, call = f"{type(error).__name__}: {error}", None
        if call is None or call.first is None:
            return forward(*args, **kwargs)
        if self._catches is None:
            self._catches = _catches_errors(list(self.module.modules()))
        with set_checkpoint_early_stop(False) if self._catches else nullcontext():
            result = checkpoint(
                call.run, *call.first.inputs, use_reentrant=False, preserve_rng_state=True, context_fn=call.contexts
            )
        try:
            call.has_run()
        except any_error() as error:  # whatever it is, the unit is left alone from now on
            self.barred = f"{type(error).__name__}: {error}"
        again = call.again
        if drop_constants(self.module, again.buffers):
            again.constants = {**constants_of(self.module), **again.constants}
        return result

    def _prepared(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call | None:
        """Return a call that can be run again; ``None`` if the unit may not be recomputed.

        Tensors anywhere in the arguments are handed over one by one: checkpoint finds the device whose generator it
        must keep by looking at its positional arguments.
        """
        leaves, shape = flattened(args, kwargs)
        parts, reads = list(self.module.modules()), Reads()
        if self._is_barred(parts):
            return None
        self._look_for_carriers(parts)
        objects = self._copied(leaves, parts, reads)
        computed = [one for one in leaves if type(one) is torch.Tensor and one.grad_fn is not None and vars(one)]
        if not all(map(has_scalar_attributes, computed)):
            self.barred = "it is handed a tensor with attributes that a recomputation may change"
        if objects is None or self.barred is not None:
            return None
        if shape != self._shape:
            # A tuple's own class may not let itself be made again: that is better known now than in backward.
            tree_unflatten(leaves, shape)
            self._shape = shape
        self._calls += 1
        kept = Kept(leaves) if self.keeps else None
        held = Kept(reads.met_all, copies=False) if kept is None and reads.met_all else None
        again = _Again(self, parts, objects, Repeats() if self.checks and is_due(self._calls) else None)
        if kept is not None:
            self.kept.append(kept)
            again.kept = kept
        given = {place: leaf for place, leaf in enumerate(leaves) if kept is None and isinstance(leaf, torch.Tensor)}
        # Whatever checkpoint is handed, it refuses to use once somebody has written to it.
        inputs = [without_graph(given[place]) if place in given else None for place in range(len(leaves))]
        first = _First(args, kwargs, leaves, [*inputs, *_elsewhere(inputs, leaves, parts)], reads)
        tensors = {place: leaf for place, leaf in given.items() if leaf.grad_fn is None}
        others = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        attributes = {place: vars(leaf).copy() for place, leaf in others.items() if has_scalar_attributes(leaf)}
        call = _Call(forward, shape, tensors, attributes, kept, held, again, first)
        self._last = call if self.keeps else None
        return call

    def take(self, repeats: Repeats) -> None:
        """Note the result of a comparison."""
        if isinstance(repeats.differs, torch.Tensor):
            self._differs = repeats.differs
        elif repeats.differs:
            self.bar_late(_DIFFERS)

    def bar_late(self, reason: str) -> None:
        """Recompute the module no more, and say that it was found out too late for what is recomputed now."""
        if self.barred is None:
            logger.warning(
                "a unit (%s) is recomputed no more: %s; the gradient of this step, and of those before in which that "
                "was so, may differ from the run's own",
                type(self.module).__name__,
                reason,
            )
        self.barred = self.barred or reason

    def hand_originals(self, leaves: Sequence[Any]) -> None:
        """Recompute the last call with the objects that it was handed themselves: it tells copies from them.

        Args:
            leaves: what it was handed.
        """
        if self._last is not None:
            again = self._last.again
            again.insists = True
            again.originals = {place: functools.partial(_itself, leaves[place]) for place in again.objects.handed}

    def settle(self) -> None:
        """Note that backward begins: a unit whose inputs were written to is barred from the next step on."""
        for kept in self.kept:
            kept.settle()
            if kept.written:
                self.barred = WRITTEN
        self.kept, self._last = [], None

    def _look_for_carriers(self, parts: Sequence[nn.Module]) -> None:
        """Find the carriers among the attributes of parts that hold other objects than at the call before."""
        # Now and then those that hold the same objects are looked at as well: an object may hold others.
        anew = self._calls & (self._calls + 1) == 0 or len(parts) != len(self._held)
        held = [list(map(id, part.__dict__.values())) for part in parts]
        for place, part in enumerate(parts):
            if anew or held[place] != self._held[place]:
                names = {name for name, value in vars(part).items() if name not in _OF_MODULES and is_carrier(value)}
                if names:
                    self.carriers[place] = names
                else:
                    self.carriers.pop(place, None)
        self._held = held

    def _is_barred(self, parts: Sequence[nn.Module]) -> bool:
        """Look whether the unit may be recomputed still."""
        hooks = _hooks_of(parts[1:])
        if self.hooks is None:
            self.hooks = hooks
        if hooks != self.hooks:
            self.barred = "its parts got other hooks after it was probed"
        differs, self._differs = self._differs, None
        if differs is not None and bool(differs):
            self.bar_late(_DIFFERS)
        return self.barred is not None

    def _copied(self, leaves: Sequence[Any], parts: Sequence[nn.Module], reads: Reads) -> Objects | None:
        """Return copies of the arguments that are no tensors, and of attributes that a pass may put something into.

        Args:
            leaves: the arguments.
            parts: the unit's parts.
            reads: is told the tensors that the objects hold.

        Returns:
            ``None``, the unit being barred, if something cannot be copied.
        """
        handed = {place: leaf for place, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        attributes = {
            place: {name: value for name, value in vars(parts[place]).items() if name in names}
            for place, names in self.carriers.items()
            if place < len(parts)
        }
        try:
            return Objects(handed, attributes).copied(reads.met)
        except CopyError as error:
            self.barred = f"it is handed, or has, a {error}, which cannot be copied and which it may change"
            return None


def _elsewhere(
    tensors: Sequence[torch.Tensor | None], leaves: Sequence[Any], parts: Sequence[nn.Module]
) -> list[torch.Tensor]:
    """Return empty tensors on the devices that a unit computes on and none of the tensors is on."""
    weights = (weight for part in parts if part._parameters for weight in part._parameters.values())
    devices = {leaf.device for leaf in (*leaves, *weights) if isinstance(leaf, torch.Tensor)}
    found = {tensor.device for tensor in tensors if tensor is not None}
    return [torch.empty(0, device=device) for device in devices - found]


def hooks_within(module: nn.Module) -> int:
    """Return how many hooks a module's parts have; its own are called round its forward, and not by it."""
    return _hooks_of(list(module.modules())[1:])


def _hooks_of(parts: Sequence[nn.Module]) -> int:
    return sum(
        len(part._forward_hooks)
        + len(part._forward_pre_hooks)
        + len(part._backward_hooks)
        + len(part._backward_pre_hooks)
        for part in parts
    )
