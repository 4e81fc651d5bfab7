"""State in objects of the user's own that a unit's modules hold, or hooks on them, for passes that run a second time.

A probe finds what a unit changes from the first step on. Others begin later: statistics after a warm-up, a log every
hundred steps. A recomputation must see the state as it was before the first run, and must change it no second time.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import weakref
from argparse import Namespace
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from autotune.mechanics.buffers import version_of
from autotune.mechanics.copies import attributes_of, has_scalars_only, is_named, items_of, own_dict
from autotune.mechanics.kept import without_graph
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.seen_state import GENERATORS, Seen, cell_seen, object_seen, snapshot_of

_CONTAINERS = (list, dict, OrderedDict, defaultdict, set, deque, tuple, frozenset)
# Containers that cannot change, but their items can.
_CONSTANT = (tuple, frozenset)
# Code that may hold state.
_CODE = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)
# Classes of Python whose objects hold what users put in them.
_OPEN = (SimpleNamespace, Namespace, UserDict, UserList, ChainMap)
# The most objects that are looked at, and the most items of all of them.
_MOST_OBJECTS, _MOST_ITEMS = 256, 4096
# Larger arrays, and tensors, are not copied before each call.
_MOST_ARRAY_BYTES, _MOST_TENSOR_BYTES = 2**22, 2**16
# The most bytes of tensors that are copied before each call.
_MOST_COPIED = 2**21
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "autotune"})
# An object that holds one of these is changed by other threads or processes as well, at any time.
_CONCURRENT = frozenset({"threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio"})
# Code of a weak proxy's referent runs where its type is asked for.
_WEAK = (weakref.ReferenceType, *weakref.ProxyTypes)
# Generators that the whole process shares; nobody else's state may be put back.
_OF_THE_PROCESS: tuple[Any, ...] = (torch.default_generator, np.random.mtrand._rand, random._inst)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Tensor, nn.Parameter, *_WEAK})


class ReachedState:
    """What roots lead to, apart from modules, at the time of a call.

    Args:
        roots: objects, functions, containers, arrays and tensors.
        buffers: ids of the unit's buffers, which are restored otherwise.
        failed: called with the reason if something cannot be restored.
        modules: modules that lead to tensors among the roots.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        buffers: Collection[int],
        failed: Callable[[str], None],
        modules: Sequence[nn.Module] = (),
    ) -> None:
        self._roots, self._buffers, self._failed = roots, buffers, failed
        found = _reached(roots)
        tensors = self._tensors_in(found)
        self._versions = {id(one): version_of(one) for one in tensors}
        # BatchNorm's kernels do not count their writes.
        hidden = (*modules, *(one for one in found if isinstance(one, nn.Module)))
        self._uncounted = {id(buffer) for one in hidden for buffer in one._buffers.values()}
        # Copied on their own devices: copies to the host would wait for an accelerator at each call.
        copied = itertools.accumulate((one.nbytes if _is_copied(one) else 0 for one in tensors), initial=0)
        fits = [one for one, before in zip(tensors, copied, strict=False) if _is_copied(one) and before < _MOST_COPIED]
        self._copies = {id(one): (one, version_of(one), one.detach().clone()) for one in fits}
        self._others = [one for one in found if not isinstance(one, torch.Tensor) and _is_copied(one)]
        self._then = [_without_graphs(seen) for one in self._others for seen in _seen(one)]
        self._written: list[torch.Tensor] = []

    def _tensors_in(self, found: Iterable[Any]) -> list[torch.Tensor]:
        return [one for one in found if isinstance(one, torch.Tensor) and id(one) not in self._buffers]

    @property
    def objects(self) -> frozenset[int]:
        """Return the ids of the containers and objects that are restored."""
        return frozenset(map(id, self._others))

    def has_run(self) -> bool:
        """Note which tensors the first pass has written to; return whether there are any that were not copied."""
        tensors = self._tensors_in(_reached(self._roots))
        self._written = [one for one in tensors if version_of(one) != self._versions.get(id(one), 0)]
        return any(id(one) not in self._copies and id(one) in self._versions for one in self._written)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Run the second pass in the body; then the present state is restored."""
        reached = [one for one in _reached(self._roots) if not isinstance(one, torch.Tensor) and _is_copied(one)]
        # The loop may have taken some away, such as a list of features, and still use them.
        others = {id(one): one for one in (*self._others, *reached)}
        present = [seen for one in others.values() for seen in _seen(one)]
        # Other calls may have written to further tensors.
        former = [
            (one, copy)
            for one, version, copy in self._copies.values()
            if version_of(one) != version or id(one) in self._uncounted
        ]
        changed = {id(one): one for one in (*self._written, *(one for one, _ in former))}
        values = [(one, one.detach().clone()) for one in changed.values()]
        self._restore(self._then)
        self._put_values(former)
        try:
            yield
        finally:
            self._put_values(values)
            self._restore(present)

    def _restore(self, states: Sequence[Seen]) -> None:
        for one in states:
            with self._failing():
                if not one.is_same():
                    one.put(one.then)

    def _put_values(self, values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for one, then in values:
            with self._failing():
                # Through .data, which autograd ignores: the run's own graph needs exactly the present values.
                one.data.copy_(then)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Run the body; of an error, whose cause may be code of the user's classes, only the reason is told."""
        try:
            yield
        except any_error() as error:
            self._failed(f"what an object of it holds cannot be restored ({type(error).__name__}: {error})")


def state_of_hooks(
    parts: Sequence[nn.Module], buffers: Collection[int], failed: Callable[[str], None]
) -> ReachedState | None:
    """Return what the forward hooks on modules keep; ``None`` if there are no hooks of the user's own.

    Args:
        parts: the modules.
        buffers: ids of the unit's buffers.
        failed: called with the reason if something cannot be restored.
    """
    kinds = (kind for part in parts for kind in (part._forward_pre_hooks, part._forward_hooks) if kind)
    roots: list[Any] = []
    for hook in (hook for kind in kinds for hook in kind.values()):
        owner = hook.__self__ if isinstance(hook, MethodType) else None
        # A method's module is looked at as well, unless it is one of these, which are restored otherwise.
        foreign = isinstance(owner, nn.Module) and all(part is not owner for part in parts)
        roots += [vars(owner)] if foreign else [hook] if _is_root(hook) else []
    return ReachedState(roots, buffers, failed) if roots else None


def state_of_attributes(
    values: Sequence[Any],
    containers: Sequence[Any],
    copied: Collection[int],
    buffers: Collection[int],
    failed: Callable[[str], None],
) -> ReachedState | None:
    """Return what objects of the user's own classes, functions, tuples and large arrays hold.

    Args:
        values: attributes of modules.
        containers: lists, dictionaries and sets among the attributes.
        copied: ids of those that are replaced by copies, which share tensors, functions and globals with them.
        buffers: ids of the unit's buffers.
        failed: called with the reason if something cannot be restored.

    Returns:
        ``None`` if there is no such attribute.
    """
    roots = [value for value in values if _is_root(value)]
    roots += [value for value in containers if id(value) not in copied]
    held = _reached(value for value in containers if id(value) in copied and not has_scalars_only(value))
    roots += [one for one in held if _is_shared(one)]
    modules = [one for one in held if isinstance(one, nn.Module)]
    return ReachedState(roots, buffers, failed, modules) if roots else None


def _is_shared(one: Any) -> bool:
    """Return whether copies of a container share something in it that can change."""
    if isinstance(one, torch.Tensor):
        return not one.requires_grad
    return isinstance(one, FunctionType) or (_is_users_own(one) and is_named(one))


def _is_root(value: Any) -> bool:
    if type(value) in _PLAIN:
        return False
    if isinstance(value, np.ndarray):
        return bool(value.nbytes <= _MOST_ARRAY_BYTES)
    if isinstance(value, bytearray):
        return True
    if isinstance(value, _CONSTANT):
        return any(type(one) not in _PLAIN for one in value)
    if isinstance(value, _CODE):
        return bool(_held_by_code(value))
    return not isinstance(value, (*_CONTAINERS, nn.Module)) and _is_users_own(value)


def _seen(one: Any) -> list[Seen]:
    """Return the present state of one object: its items, its attributes, or both."""
    found = snapshot_of("", one)
    if found is None:
        return [object_seen("", one)]
    # A dictionary may be its own ``__dict__``.
    more = isinstance(one, _CONTAINERS) and type(one) not in _CONTAINERS and own_dict(one) is not one
    return [found, object_seen("", one)] if more else [found]


def _is_copied(one: Any) -> bool:
    """Return whether the state of something is copied before a call."""
    if isinstance(one, torch.Tensor):
        return one.layout is torch.strided and one.nbytes <= _MOST_TENSOR_BYTES and not one.requires_grad
    if isinstance(one, np.ndarray):
        return bool(one.nbytes <= _MOST_ARRAY_BYTES)
    return not isinstance(one, _CONSTANT)


def _without_graphs(seen: Seen) -> Seen:
    """Return a state in which tensors keep no graph alive."""
    if not isinstance(seen.then, list):
        return seen
    return replace(seen, then=[tuple(map(_left, one)) if isinstance(one, tuple) else _left(one) for one in seen.then])


def _left(value: Any) -> Any:
    return without_graph(value) if isinstance(value, torch.Tensor) else value


def _held_by_code(code: Any) -> list[Any]:
    """Return what a function, method or partial holds: its object, its closure, its attributes, and default arguments.

    A module whose method it is does not count.
    """
    if isinstance(code, functools.partial):
        return [code.func, *code.args, *code.keywords.values()]
    if isinstance(code, BuiltinFunctionType):
        # A method of a list, and the like.
        return [] if isinstance(code.__self__, type | ModuleType) or code.__self__ is None else [code.__self__]
    if isinstance(code, MethodType):
        return [] if isinstance(code.__self__, nn.Module) else [code.__self__, code.__func__]
    if _is_librarys(code.__module__):
        return []
    held = [one for one in (vars(code), code.__kwdefaults__) if one]
    return [*(code.__closure__ or ()), *(code.__defaults__ or ()), *held]


def _reached(roots: Iterable[Any]) -> list[Any]:
    """Return the containers, arrays, tensors and objects of the user's own that roots lead to, nearest first."""
    waiting, found, items = deque(roots), dict[int, Any](), 0
    while waiting and len(found) < _MOST_OBJECTS and items <= _MOST_ITEMS:
        one = waiting.popleft()
        if id(one) in found:
            continue
        inner = _inner(one)
        if inner is not None:
            found[id(one)] = one
            items += len(inner)
            waiting += [value for value in inner if type(value) not in _PLAIN or type(value) is torch.Tensor]
    return list(found.values())


def _inner(one: Any) -> list[Any] | None:
    """Return what an object holds; ``None`` if it is not looked at."""
    if isinstance(one, torch.Tensor):
        return None if isinstance(one, nn.Parameter) else []
    if isinstance(one, nn.Module):
        # One that no module has as its part. Its own parts are left out: it may lead to the whole model.
        # One that is being copied has none yet.
        buffers = vars(one).get("_buffers")
        return [held for held in buffers.values() if held is not None] if type(buffers) is dict else None
    if isinstance(one, np.ma.MaskedArray):
        return [one.data, one.mask]
    if isinstance(one, np.ndarray):
        return one.ravel().tolist() if one.dtype.hasobject and one.size <= _MOST_ITEMS else []
    if isinstance(one, CellType):
        return [cell.then[0]] if (cell := cell_seen("", one)).then else []
    if isinstance(one, _CODE):
        return _held_by_code(one)
    if isinstance(one, GENERATORS):
        is_foreign = isinstance(one, random.SystemRandom) or any(one is other for other in _OF_THE_PROCESS)
        return None if is_foreign else []
    return _inner_of_object(one)


def _inner_of_object(one: Any) -> list[Any] | None:
    """Return the items and attributes of a container or an object of the user's own; ``None`` for another object."""
    inner: list[Any] = []
    if isinstance(one, _CONTAINERS):
        # Some subclasses of tuple have no length.
        if (tuple.__len__(one) if isinstance(one, tuple) else len(one)) > _MOST_ITEMS:
            return None
        inner = [*one, *one.values()] if isinstance(one, dict) else items_of(one)
    elif not _is_users_own(one):
        return [] if isinstance(one, bytearray) else None
    if type(one) not in _CONTAINERS:
        inner += attributes_of(one).values()
    is_shared = any(type(value).__module__.partition(".")[0] in _CONCURRENT for value in inner)
    return None if is_shared else inner


def _is_users_own(one: Any) -> bool:
    """Return whether an object is of a class of the user's own, not of an installed library."""
    kind = type(one)
    if kind in _PLAIN or isinstance(one, (nn.Module, type, *_CODE)):
        return False
    return issubclass(kind, _OPEN) or is_own_module(kind.__module__)


@functools.cache
def is_own_module(name: str) -> bool:
    """Return whether a module is the user's own, not of an installed library, by its name."""
    path = getattr(sys.modules.get(name), "__file__", None) or ""
    return not _is_librarys(name) and "site-packages" not in path and "dist-packages" not in path


def _is_librarys(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
