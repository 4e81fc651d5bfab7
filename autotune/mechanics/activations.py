"""Recompute a unit's activations in the backward pass, without changing anything else.

A recomputation runs in the state that the forward pass began in: random generators, flags of torch, and the unit's
attributes, modes, weights and buffers. Its non-tensor arguments (such as a key-value cache) and the lists and
dictionaries among the unit's attributes are copies from that time. Its own changes to all of these are discarded, and
so is what it prints, logs and warns of. Of tensors that other passes computed, only the values are kept, not the
graphs. On a sample of calls, the recomputation is compared with the forward pass.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import logging
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_unflatten
from torch.utils.checkpoint import _StopRecomputationError, checkpoint, set_checkpoint_early_stop

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
from autotune.mechanics.copies import (
    CopyError,
    TensorCopy,
    copied,
    given_attributes,
    has_scalar_attributes,
    is_unchanged,
)
from autotune.mechanics.devices import is_accelerator
from autotune.mechanics.kept import (
    OF_MODULES,
    Kept,
    Objects,
    Reads,
    flattened,
    is_carrier,
    objects_of,
    own_containers,
    own_values,
    without_graph,
)
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.muting import muted
from autotune.mechanics.reached_state import is_own_module, state_of_attributes, state_of_hooks
from autotune.mechanics.repeats import Repeats, is_due
from autotune.mechanics.watching_hooks import reporting_writes, seeing_saved

logger = logging.getLogger(__name__)

WRITTEN = "its inputs are written to in place before its backward pass"
_OVERWRITTEN = "its weights or other tensors were written to between its forward and its backward pass"
_DIFFERS = "recomputed, it did not repeat its forward pass"
# The dictionaries of a module that say which hooks its call runs, and how.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_NOTHING: OrderedDict[Any, Any] = OrderedDict()
# First calls in which writes to saved tensors are looked for, and the most shapes of arguments that are told apart.
_LOOKED_AT, _MOST_SHAPES = 16, 1000


def uncopyable_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return the type of a unit's argument that cannot be copied; ``None`` if all can be."""
    try:
        copied([leaf for leaf in flattened(args, kwargs)[0] if not isinstance(leaf, torch.Tensor)])
    except CopyError as error:
        return str(error)
    return None


class _Again(AbstractContextManager[None]):
    """Context, which can be entered repeatedly, in which a module is as it was when the context was created.

    Attributes:
        runs: whether a body is running.

    Args:
        recomputation: the recomputation of the module.
        parts: the module's parts.
        objects: copies of the module's present arguments and attributes; ``None`` for none.
        repeats: comparison of what the bodies save for backward; ``None`` for no comparison.
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
        # While a body runs: replacements for the module's non-tensor arguments.
        self.handed: Mapping[int, Any] = {}
        # Arguments to pass instead of their copies: those alive and unchanged, or, with ``insists``, all of them.
        self.originals: dict[int, Callable[[], Any]] = {}
        self._insisted: set[int] = set()
        self.insists = False
        # Copies of the module's arguments, if they are kept.
        self.kept: Kept | None = None
        # Dictionaries of the module's parts, with their contents: each part's ``__dict__``, by place, then all others.
        self._own: list[tuple[int, dict[str, Any], dict[str, Any]]] = []
        self._then: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        # Each weight, and whether it required a gradient.
        self._weights: list[tuple[nn.Parameter, bool]] = []
        own = own_values(parts)
        bar = recomputation.bar_late
        copied = {id(vars(parts[place])[name]) for place, kept in self.objects.attributes.items() for name in kept}
        buffers = {id(one) for part in parts for one in part._buffers.values()}
        found = (
            state_of_hooks(parts[1:], buffers, bar),
            state_of_attributes(own, own_containers(parts), copied, buffers, bar),
        )
        self._reached = [state for state in found if state is not None]
        # What objects or hooks refer to as well is restored as it is, instead of being replaced by a copy.
        self._shared = frozenset().union(*(state.objects for state in self._reached))
        for place, part in enumerate(parts):
            if not isinstance(part, torch.jit.ScriptModule):
                # Copies replace the original objects, which would keep other passes' graphs alive.
                then = {**part.__dict__, **self._copies_of(place, self.objects, part.__dict__)}
                self._own.append((place, part.__dict__, then))
                # This restores which buffers there were; their values are restored separately.
                owned = (held for held in (part._modules, part._buffers) if type(held) is dict)
                self._then += [(held, held.copy() if held else _NOTHING) for held in owned]
                hooks = (part.__dict__[kind] for kind in _HOOKS)
                self._then += [(held, held.copy() if held else _NOTHING) for held in hooks]
                # torch.func.functional_call runs a module with weights other than its own. A dictionary of another
                # class is left out: DeepSpeed's ZeRO-3 gathers a weight when its dictionary is read.
                if part._parameters and type(part._parameters) is dict:
                    self._then.append((part._parameters, part._parameters.copy()))
                    self._weights += [(one, one.requires_grad) for one in part._parameters.values() if one is not None]
        for held in objects_of(own):
            # Without graphs: an object that collects others' results would keep their graphs alive.
            values = held.items()
            then = {name: without_graph(one) if isinstance(one, torch.Tensor) else one for name, one in values}
            self._then.append((held, then))
        tensors = _tensors_of(parts)
        self._versions = [(one, version_of(one)) for one in tensors]
        # A weight in a dictionary of another class is given its data by others, in hooks.
        plain = {id(one) for one, _ in self._weights}
        self._data = _data_of([one for one in tensors if id(one) in plain or not isinstance(one, nn.Parameter)])
        self._then += [(vars(one), vars(one).copy()) for one in tensors if has_scalar_attributes(one)]
        self.buffers, self.constants = {}, {}
        if any(part._buffers for part in parts):
            self.buffers, self.constants = copy_buffers(module), constants_of(module)
        self._flags = ambient.flags()
        # For each body that is running: what undoes its changes, and an item once checkpoint has ended it.
        self._entered: list[tuple[ExitStack, list[None]]] = []

    @property
    def runs(self) -> bool:
        return bool(self._entered)

    def _copies_of(self, place: int, objects: Objects, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the copies that replace attributes of a part, given its place and its attributes until now."""
        copies = objects.attributes.get(place, {})
        return {name: copy for name, copy in copies.items() if id(own.get(name)) not in self._shared}

    def has_run(self, leaves: Sequence[Any]) -> None:
        """Record the effects of the first run.

        Objects that it left unchanged are passed again instead of copies, since code may compare them by identity. The
        module's own tensors that it wrote to are replaced.

        Args:
            leaves: leaves of the arguments.
        """
        for place, copy in self.objects.handed.items():
            original = leaves[place]
            if id(original) in self._shared:
                self.originals[place] = functools.partial(_itself, original)
                self._insisted.add(place)
            elif original is not copy and is_unchanged(original, copy):
                # An object that allows no weak reference is copied instead.
                with suppress(TypeError):
                    self.originals[place] = weakref.ref(original)
        others = [state.has_run() for state in self._reached]
        if any(others):
            self.recomputation.bar_late("it has begun to write to a tensor that an object or a hook keeps")
        written = {id(one): one for one, version in self._versions if version_of(one) != version}
        if written:
            self.recomputation.bar_late("it has begun to write to its own weights or other tensors")
            self._replace({key: one.detach().clone().requires_grad_(one.requires_grad) for key, one in written.items()})
        # From now on, others' writes are looked for.
        self._versions = [(one, version_of(one)) for one, _ in self._versions if id(one) not in written]

    def _replace(self, others: Mapping[int, torch.Tensor]) -> None:
        """Replace tensors, by id, in the recorded contents, so that recomputations write to the replacements."""
        for then in (*(then for _, _, then in self._own), *(then for _, then in self._then)):
            for name, value in then.items():
                if id(value) in others:
                    other = others[id(value)]
                    is_weight = isinstance(value, nn.Parameter)
                    then[name] = nn.Parameter(other, requires_grad=other.requires_grad) if is_weight else other

    def drop(self, unused: TensorCopy) -> None:
        """Replace the tensors within objects, after the module has run.

        Args:
            unused: function that returns the replacement for a tensor.
        """
        self.objects = self.objects.copied(unused)
        for place, _, then in self._own:
            then.update(self._copies_of(place, self.objects, then))

    def _made_again(self) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        """Return each dictionary of the parts with its recorded contents, with new copies of objects at each call."""
        alive = {place: found() for place, found in self.originals.items()}
        # If argument tensors have been written to, objects must be copied, so that they refer to the tensors' copies.
        written = self.kept is not None and self.kept.written
        known = {
            place: one
            for place, one in alive.items()
            if self.insists
            or place in self._insisted
            or (one is not None and not written and is_unchanged(one, self.objects.handed[place]))
        }
        try:
            again = self.objects.copied(_itself if self.kept is None else self.kept.then, known)
        except any_error() as error:  # the run continues after any error
            reason = f"it contains an object that can no longer be copied ({type(error).__name__}: {error})"
            self.recomputation.bar_late(reason)
            again = self.objects
        self.handed = again.handed
        own = [(held, {**then, **self._copies_of(place, again, then)}) for place, held, then in self._own]
        return [*own, *self._then]

    def __enter__(self) -> None:
        self.recomputation.count += 1
        if any(version_of(one) != version for one, version in self._versions):
            self.recomputation.bar_late(_OVERWRITTEN)
        stack = ExitStack()
        stack.enter_context(ambient.out_of_batched_backward())
        flags = ambient.flags()
        if flags != self._flags:
            ambient.put(self._flags, flags)
        # Checkpoint ends a recomputation as soon as it has the saved tensors, before the unit resets its own flags.
        stack.callback(_put_flags, flags)
        if self.recomputation.around is not None:
            stack.enter_context(self.recomputation.around.as_they_were())
        for state in self._reached:
            stack.enter_context(state.as_before())
        stack.enter_context(_tensor_hooks_kept([weight for weight, _ in self._weights]))
        # Code that gives a weight other data for the time of a call may never come to put the former back.
        present = _data_of([one for one, _ in self._data])
        stack.callback(_put_data, present)
        _put_data(self._data)
        former = self._made_again()
        stack.callback(_restore, [(own, then if _holds(own, then) else own.copy()) for own, then in former])
        _restore(former)
        others = [(weight, trained) for weight, trained in self._weights if weight.requires_grad != trained]
        for weight, trained in others:
            stack.callback(weight.requires_grad_, not trained)
            weight.requires_grad_(trained)
        if self.buffers or self.constants:
            stack.enter_context(self._buffers_as_they_were())
        # Autograd keeps leaves themselves, so that a backward pass computes with the data that they have at its time.
        leaves = {id(one): data for one, data in present if one.is_leaf}
        ends: list[None] = []
        stack.enter_context(seeing_saved(lambda one: leaves.get(id(one), one), functools.partial(ends.append, None)))
        if self.repeats is not None:
            stack.callback(self.recomputation.take, self.repeats)
            stack.enter_context(self.repeats.again())
        self._entered.append((stack, ends))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        stack, ends = self._entered.pop()
        stack.close()
        if not ends or isinstance(error, _StopRecomputationError):
            return False
        # The unit's code has caught the exception by which checkpoint ends: there is nothing left to recompute.
        self.recomputation.run_to_the_end()
        # An interrupt may come at any time, and is the user's.
        return isinstance(error, Exception)

    def _buffers_as_they_were(self) -> AbstractContextManager[None]:
        """Return a context that runs its body on copies of the buffers."""
        module = self.recomputation.module
        lost = lost_buffer(module, self.constants)
        if lost is not None:
            self.recomputation.bar_late(f"its buffer {lost!r}, which has no copy, was written to")
        return replaced_buffers(module, fresh_buffers(module, self.buffers, self.constants))


# Operations, and pairs of them, of code that catches errors by their class or at all, or writes to what is outside.
_UNDONE_LATER = {"CHECK_EXC_MATCH", "CHECK_EG_MATCH", "STORE_GLOBAL", ("PUSH_EXC_INFO", "POP_TOP")}
_UNDONE_LATER |= {
    (load, then) for load in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR") for then in ("STORE_ATTR", "COPY")
}
# Names that such code uses: locks, context variables, and contexts that are left by a call.
_UNDONE_BY = {"suppress", "acquire", "reset", "__exit__"}


def _runs_to_its_end(parts: Sequence[nn.Module]) -> bool:
    """Return whether a recomputation must not end early, by an exception that checkpoint raises.

    A method of the parts' classes, a function that a part holds, or one of the user's or of the same files that these
    call, may catch it, or do later what undoes something that it has done, such as release a lock.
    """
    kinds = dict.fromkeys(base for part in parts for base in type(part).__mro__ if not _is_torchs(base))
    methods = [(name, one) for kind in kinds for name, one in vars(kind).items() if _is_a(one, FunctionType)]
    waiting: list[Any] = [one for name, one in methods if name != "__init__"]
    waiting += [one for part in parts for value in vars(part).values() for one in _functions_in(value)]
    files, met = {one.__module__ for one in (*kinds, *waiting)}, set[Any]()
    while waiting:
        found = waiting.pop()
        if found in met or _is_torchs(found) or not (found.__module__ in files or is_own_module(found.__module__)):
            continue
        met.add(found)
        if isinstance(found, type):
            if "__exit__" in vars(found):
                return True
            waiting += [one for one in vars(found).values() if _is_a(one, FunctionType)]
            continue
        body = inspect.unwrap(found)
        if _may_not_end(found.__code__) or (body is not found and _leaves_open(body)):
            return True
        names, known = found.__code__.co_names, found.__globals__
        named = [known[name] for name in names if name in known]
        modules = [vars(one) for one in named if _is_a(one, ModuleType) and is_own_module(one.__name__)]
        named += [body, *(one[name] for one in modules for name in names if name in one)]
        waiting += [one for one in named if _is_a(one, FunctionType) or _is_helper(one)]
    return False


def _functions_in(value: Any) -> list[FunctionType]:
    """Return a function, that of a method, or those in a list, a tuple or a dictionary."""
    values = value.values() if _is_a(value, dict) else value if _is_a(value, list, tuple) else [value]
    found = (one.__func__ if _is_a(one, MethodType) else one for one in values)
    return [one for one in found if _is_a(one, FunctionType)]


def _is_helper(found: Any) -> bool:
    return _is_a(found, type) and not issubclass(found, nn.Module)


def _is_a(value: Any, *kinds: type) -> bool:
    """Return whether a value is of one of the types itself; ``isinstance`` asks what a proxy stands for, if any."""
    return issubclass(type(value), kinds)


def _is_torchs(found: type | FunctionType) -> bool:
    return (found.__module__ or "").partition(".")[0] in ("torch", "builtins")


@functools.cache
def _may_not_end(code: CodeType) -> bool:
    steps = [step.opname for step in dis.get_instructions(code)]
    within = any(_may_not_end(one) for one in code.co_consts if isinstance(one, CodeType))
    found = within or not _UNDONE_LATER.isdisjoint(itertools.pairwise(steps))
    return found or not _UNDONE_LATER.isdisjoint(steps) or not _UNDONE_BY.isdisjoint(code.co_names)


def _leaves_open(body: Callable[..., Any]) -> bool:
    """Return whether what a context manager made of a generator function does at its end is left out by an error."""
    code: CodeType | None = getattr(body, "__code__", None)
    return code is not None and inspect.isgeneratorfunction(body) and not _handles_errors(code)


@functools.cache
def _handles_errors(code: CodeType) -> bool:
    return any(step.opname == "PUSH_EXC_INFO" for step in dis.get_instructions(code))


@contextmanager
def _tensor_hooks_kept(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Run the body; afterwards, tensors have the hooks again that they had before."""
    before = [(one, one._backward_hooks, dict(one._backward_hooks or {})) for one in tensors]
    try:
        yield
    finally:
        for one, hooks, then in before:
            if one._backward_hooks is not hooks:
                # The graph of a computed tensor refers to them.
                (one._backward_hooks or {}).clear()
                one._backward_hooks = hooks
            if hooks is not None and len(hooks) != len(then):
                hooks.clear()
                hooks.update(then)


def _tensors_of(parts: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Return the parts' weights and tensor attributes, without buffers."""
    held: Iterator[Any] = (
        one for part in parts for owner in (part.__dict__, part._parameters) for one in owner.values()
    )
    return [one for one in held if type(one) in (torch.Tensor, nn.Parameter)]


def _data_of(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each tensor with its present data, without sparse ones, whose memory cannot be compared."""
    return [(one, one.data) for one in tensors if one.layout is torch.strided]


def _put_data(former: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Restore the data of those tensors that refer to other memory."""
    for one, data in former:
        if not one.is_set_to(data):
            one.data = data


def _put_flags(wanted: list[Any]) -> None:
    """Set the flags that differ from the wanted values."""
    present = ambient.flags()
    if present != wanted:
        ambient.put(wanted, present)


def _restore(former: Sequence[tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
    """Restore the contents of dictionaries that have changed."""
    for own, then in former:
        if not _holds(own, then):
            own.clear()
            own.update(then)


def _holds(own: dict[Any, Any], then: dict[Any, Any]) -> bool:
    """Return whether two dictionaries have the same objects as keys and values, in the same order."""
    if len(own) != len(then) or not all(map(operator.is_, own, then)):
        return False
    return all(map(operator.is_, own.values(), then.values()))


def _itself(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class _First:
    """Data that only the first run of a call needs; dropped afterwards, so that it keeps nothing alive.

    Attributes:
        args: the unit's positional arguments.
        kwargs: its keyword arguments.
        leaves: the leaves of both.
        inputs: the arguments of checkpoint.
        reads: recorder of the tensors within objects that are used.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: Sequence[Any]
    inputs: Sequence[torch.Tensor | None]
    reads: Reads


@dataclass(slots=True)
class _Call:
    """One call of a unit, which can be repeated in its original state.

    Attributes:
        forward: the unit's forward.
        shape: nesting of the arguments.
        tensors: tensor arguments without a graph, by place, if ``kept`` is ``None``: code may compare their identity.
        attributes: attributes of tensor arguments, by place.
        kept: copies of the arguments; ``None`` if none are kept.
        held: the tensors within objects, if no copies are kept.
        again: context that restores the unit's state.
        first: data of the first run; ``None`` once it has run.
        reports: whether the backward pass raises if a tensor that the run has saved was written to.
    """

    forward: Callable[..., Any]
    shape: TreeSpec
    tensors: Mapping[int, torch.Tensor]
    attributes: Mapping[int, Mapping[str, Any]]
    kept: Kept | None
    held: Kept | None
    again: _Again
    first: _First | None
    reports: bool = False

    def run(self, *leaves: Any) -> Any:
        """Run the call; a repetition uses the leaves that ``kept`` or checkpoint has kept."""
        if self.first is not None and not self.again.runs:
            return self.forward(*self.first.args, **self.first.kwargs)
        found = list(leaves[: self.shape.num_leaves]) if self.kept is None else self.kept.leaves()
        for place, value in (*self.tensors.items(), *self.again.handed.items()):
            found[place] = value
        if self.held is not None and self.held.written:
            self.again.recomputation.bar_late(WRITTEN)
        args, kwargs = tree_unflatten(found, self.shape)
        owns = [(vars(found[place]), attributes) for place, attributes in self.attributes.items()]
        present = [(own, own.copy()) for own, _ in owns]
        _restore([(own, {**own, **attributes}) for own, attributes in owns])
        try:
            plain = [one for one in found if type(one) in (torch.Tensor, nn.Parameter)]
            with muted(), _tensor_hooks_kept([one for one in plain if one.requires_grad]):
                return self.forward(*args, **kwargs)
        finally:
            _restore(present)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[None]]:
        """Return the contexts of the first run and of the later ones."""
        return self._watched(), self.again

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with ExitStack() as watch:
            if self.reports:
                watch.enter_context(reporting_writes())
            if self.again.repeats is not None:
                watch.enter_context(self.again.repeats.first())
            if self.first is not None and self.first.reads.tensors:
                watch.enter_context(self.first.reads)
            yield

    def has_run(self) -> None:
        """Drop the first run's data, and those tensors of other units that the run did not use."""
        assert self.first is not None
        first, self.first = self.first, None
        self.again.has_run(first.leaves)
        # Kept copies are looked up by the tensors' ids, so these tensors must stay.
        if first.reads.tensors and self.kept is None:
            if self.held is not None:
                self.held.drop(first.reads.left)
            self.again.drop(first.reads.left)


@contextmanager
def hooks_kept(module: nn.Module) -> Iterator[None]:
    """Run the body; afterwards, a module and its parts have the hooks again that they had before."""
    held = [part.__dict__[kind] for part in module.modules() for kind in _HOOKS]
    then = [(one, one.copy()) for one in held]
    try:
        yield
    finally:
        _restore(then)


def undone(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context that on exit restores a module's present attributes, modes, weights and buffers."""
    return _Again(Recomputation(module), list(module.modules()))


class Reachable(Protocol):
    """State that a unit's code can reach outside the unit."""

    def as_they_were(self) -> AbstractContextManager[None]:
        """Run the body with this state as it was."""


@dataclass(slots=True)
class Recomputation:
    """Recomputation of one module's forward.

    Attributes:
        module: the module.
        checks: whether a sample of the recomputations is compared with the forward passes.
        count: number of recomputations.
        keeps: whether copies of the arguments are kept until it is known whether they are written to before backward.
        hooks: number of hooks on the module's parts when it was probed; ``None`` for the number at its first call.
        barred: why the module is no longer recomputed; ``None`` while it is.
        kept: arguments of the calls since the last backward pass began.
        around: other state that the code can reach, restored during a recomputation; ``None`` for none.
        carriers: names of attributes that are mutable containers or lead to computed tensors, by place of their part.
        compressions: number of calls whose activations were compressed.
        selections: number of calls of whose activations some were kept.
        compiled: whether the module contains compiled code; ``None`` if unknown.
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
    compressions: int = 0
    selections: int = 0
    compiled: bool | None = None
    # Whether recomputations must run to their end; ``None`` if unknown.
    _whole: bool | None = None
    _calls: int = 0
    _last: _Call | None = None
    # Ids of the attribute values of each part at the previous call.
    _held: list[list[int]] = field(default_factory=list)
    # Shapes of the arguments of all calls.
    _shapes: set[tuple[torch.Size, ...]] = field(default_factory=set)
    # Nesting of the last call's arguments.
    _shape: TreeSpec | None = None
    # Whether a recomputation differed, as a tensor on the accelerator.
    _differs: torch.Tensor | None = None

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call ``forward`` so that autograd keeps only its inputs."""
        try:
            call = self._prepared(forward, args, kwargs)
        except any_error() as error:  # after any error the unit is not recomputed
            self.barred, call = f"{type(error).__name__}: {error}", None
        if call is None or call.first is None:
            return forward(*args, **kwargs)
        if self._whole is None:
            self._whole = _runs_to_its_end(list(self.module.modules()))
        with set_checkpoint_early_stop(False) if self._whole else nullcontext():
            result = checkpoint(
                call.run, *call.first.inputs, use_reentrant=False, preserve_rng_state=True, context_fn=call.contexts
            )
        try:
            call.has_run()
        except any_error() as error:  # after any error later calls are not recomputed
            self.barred = f"{type(error).__name__}: {error}"
        again = call.again
        if drop_constants(self.module, again.buffers):
            again.constants = {**constants_of(self.module), **again.constants}
        return result

    def run_to_the_end(self) -> None:
        """Let no later recomputation end by an exception, which the module's code catches."""
        self._whole = True

    def _prepared(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call | None:
        """Return a call that can be run again; ``None`` if the unit may not be recomputed.

        Nested tensors are passed to checkpoint as separate positional arguments: from these it finds the device whose
        random generator it must save.
        """
        leaves, shape = flattened(args, kwargs)
        parts, reads = list(self.module.modules()), Reads()
        if self._is_barred(parts):
            return None
        self._look_for_carriers(parts)
        objects = self._copied(leaves, parts, reads)
        computed = (one for one in leaves if type(one) is torch.Tensor and one.grad_fn is not None)
        if not all(has_scalar_attributes(one) for one in computed if given_attributes(one)):
            self.barred = "it is handed a tensor with attributes that a recomputation may change"
        if objects is None or self.barred is not None:
            return None
        if shape != self._shape:
            # Rebuilding a tuple of another class may fail: better now than in the backward pass.
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
        # Kept arguments are not passed to checkpoint, which refuses to use inputs that have been written to.
        inputs = [without_graph(given[place]) if place in given else None for place in range(len(leaves))]
        first = _First(args, kwargs, leaves, [*inputs, *_elsewhere(inputs, leaves, parts)], reads)
        tensors = {place: leaf for place, leaf in given.items() if leaf.grad_fn is None}
        others = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        attributes = {place: given_attributes(leaf) for place, leaf in others.items() if has_scalar_attributes(leaf)}
        call = _Call(forward, shape, tensors, attributes, kept, held, again, first, self._reports(others.values()))
        self._last = call if self.keeps else None
        return call

    def _reports(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether writes to saved tensors are looked for: in some calls, and in the first of each shape."""
        shapes = tuple(one.shape for one in tensors)
        is_new = shapes not in self._shapes and len(self._shapes) < _MOST_SHAPES
        if is_new:
            self._shapes.add(shapes)
        # Others' hooks keep values of their own, to which nobody writes.
        hook = ambient.saving_hook()
        is_others = hook is not None and hook.__module__ != reporting_writes.__module__
        return not is_others and (is_new or self._calls <= _LOOKED_AT or is_due(self._calls))

    def may_repeat(self) -> bool:
        """Return whether operations of the module may be repeated: so far, nothing differed or was written to."""
        self._settle_difference()
        return self.barred is None

    def note_difference(self, differs: torch.Tensor) -> None:
        """Record whether something that was computed again differs.

        Args:
            differs: a boolean; on an accelerator it is read at the next call, so that the run does not wait for it.
        """
        if is_accelerator(differs.device):
            self._differs = differs if self._differs is None else self._differs | differs
        elif bool(differs):
            self.bar_late(_DIFFERS)

    def _settle_difference(self) -> None:
        differs, self._differs = self._differs, None
        if differs is not None and bool(differs):
            self.bar_late(_DIFFERS)

    def take(self, repeats: Repeats) -> None:
        """Record the result of a comparison."""
        if isinstance(repeats.differs, torch.Tensor):
            self._differs = repeats.differs
        elif repeats.differs:
            self.bar_late(_DIFFERS)

    def bar_late(self, reason: str) -> None:
        """Stop recomputing the module, and warn that the reason was found too late for the present step."""
        if self.barred is None:
            logger.warning(
                "a unit (%s) is no longer recomputed: %s; gradients of this step and of earlier affected steps may "
                "differ from the run's own",
                type(self.module).__name__,
                reason,
            )
        self.barred = self.barred or reason

    def hand_originals(self, leaves: Sequence[Any]) -> None:
        """Recompute the last call with its original objects instead of copies, which its code distinguishes.

        Args:
            leaves: leaves of its arguments.
        """
        if self._last is not None:
            again = self._last.again
            again.insists = True
            again.originals = {place: functools.partial(_itself, leaves[place]) for place in again.objects.handed}

    def settle(self) -> None:
        """Record that backward begins: a unit whose inputs were written to is barred from the next step on."""
        for kept in self.kept:
            kept.settle()
            if kept.written:
                self.barred = WRITTEN
        self.kept, self._last = [], None

    def _look_for_carriers(self, parts: Sequence[nn.Module]) -> None:
        """Update the carriers of those parts whose attribute values were replaced since the previous call."""
        # From time to time all parts are examined, since the contents of an object may have changed.
        anew = self._calls & (self._calls + 1) == 0 or len(parts) != len(self._held)
        held = [list(map(id, part.__dict__.values())) for part in parts]
        for place, part in enumerate(parts):
            if anew or held[place] != self._held[place]:
                names = {name for name, value in vars(part).items() if name not in OF_MODULES and is_carrier(value)}
                if names:
                    self.carriers[place] = names
                else:
                    self.carriers.pop(place, None)
        self._held = held

    def _is_barred(self, parts: Sequence[nn.Module]) -> bool:
        """Return whether the unit may no longer be recomputed."""
        hooks = _hooks_of(parts[1:])
        if self.hooks is None:
            self.hooks = hooks
        if hooks != self.hooks:
            self.barred = "its parts got other hooks after it was probed"
        self._settle_difference()
        return self.barred is not None

    def _copied(self, leaves: Sequence[Any], parts: Sequence[nn.Module], reads: Reads) -> Objects | None:
        """Return copies of the non-tensor arguments and of the carriers.

        Args:
            leaves: leaves of the arguments.
            parts: the unit's parts.
            reads: recorder of the tensors within the objects.

        Returns:
            ``None``, after barring the unit, if something cannot be copied.
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
            self.barred = f"an argument or attribute, a {error}, cannot be copied and may change"
            return None


def _elsewhere(
    tensors: Sequence[torch.Tensor | None], leaves: Sequence[Any], parts: Sequence[nn.Module]
) -> list[torch.Tensor]:
    """Return an empty tensor for each device of a unit's arguments and weights on which none of the tensors is."""
    weights = (weight for part in parts if part._parameters for weight in part._parameters.values())
    devices = {leaf.device for leaf in (*leaves, *weights) if isinstance(leaf, torch.Tensor)}
    found = {tensor.device for tensor in tensors if tensor is not None}
    return [torch.empty(0, device=device) for device in devices - found]


def hooks_within(module: nn.Module) -> int:
    """Return the number of hooks on a module's parts, without the module's own, which run outside its forward."""
    return _hooks_of(list(module.modules())[1:])


def _hooks_of(parts: Sequence[nn.Module]) -> int:
    return sum(
        len(part._forward_hooks)
        + len(part._forward_pre_hooks)
        + len(part._backward_hooks)
        + len(part._backward_pre_hooks)
        for part in parts
    )
