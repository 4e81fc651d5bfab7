"""State in objects of the user's own that a unit's modules hold, or hooks on them, for passes that run a second time.

A probe finds what a unit changes from the first step on. Others begin later: statistics after a warm-up, a log every
hundred steps. A recomputation must see the state as it was before the first run, and must change it no second time.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from autotune.mechanics.buffers import version_of
from autotune.mechanics.copies import attributes_of
from autotune.mechanics.seen_state import Seen, object_seen, snapshot_of

_CONTAINERS = (list, dict, set, deque, tuple)
# The most objects that are looked at, and the most items of all of them.
_MOST_OBJECTS, _MOST_ITEMS = 256, 4096
# Larger arrays, and tensors, are not copied before each call.
_MOST_ARRAY_BYTES, _MOST_TENSOR_BYTES = 2**22, 2**16
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "autotune"})
# An object that holds one of these is changed by other threads or processes as well, at any time.
_CONCURRENT = frozenset({"threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio"})
# Code of a weak proxy's referent runs where its type is asked for.
_WEAK = (weakref.ReferenceType, *weakref.ProxyTypes)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Tensor, nn.Parameter, *_WEAK})


class ReachedState:
    """What roots lead to, apart from modules, at the time of a call.

    Args:
        roots: objects, containers, arrays and tensors.
        restores: whether a second pass is to see the state as it is now; otherwise its changes are undone alone.
    """

    def __init__(self, roots: Sequence[Any], *, restores: bool) -> None:
        self._roots = roots
        found = _reached(roots)
        self._versions = {id(one): version_of(one) for one in found if isinstance(one, torch.Tensor)}
        self._then = [_without_graphs(_seen(one)) for one in found if _is_copied(one)] if restores else []
        self._written: list[torch.Tensor] = []

    def has_run(self) -> bool:
        """Note which tensors the first pass has written to; return whether there are any that were not copied."""
        tensors = [one for one in _reached(self._roots) if isinstance(one, torch.Tensor)]
        self._written = [one for one in tensors if version_of(one) != self._versions.get(id(one), 0)]
        return any(not _is_copied(one) for one in self._written)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Run the second pass in the body; then the present state is restored."""
        values = [one for one in _reached(self._roots) if not isinstance(one, torch.Tensor | tuple)]
        present = [_seen(one) for one in (*values, *self._written)]
        for one in self._then:
            if not one.is_same():
                one.put(one.then)
        try:
            yield
        finally:
            for one in present:
                if not one.is_same():
                    one.put(one.then)


def state_of_hooks(parts: Sequence[nn.Module]) -> ReachedState | None:
    """Return what the forward hooks on modules keep; ``None`` if there are no hooks of the user's own.

    Args:
        parts: the modules.
    """
    kinds = (kind for part in parts for kind in (part._forward_pre_hooks, part._forward_hooks) if kind)
    roots = [root for kind in kinds for hook in kind.values() for root in _roots_of(hook)]
    return ReachedState(roots, restores=False) if roots else None


def state_of_attributes(values: Sequence[Any]) -> ReachedState | None:
    """Return what objects of the user's own classes, tuples and large arrays hold.

    Args:
        values: attributes of modules.

    Returns:
        ``None`` if there is no such attribute.
    """
    roots = [value for value in values if _is_root(value)]
    return ReachedState(roots, restores=True) if roots else None


def _is_root(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.nbytes <= _MOST_ARRAY_BYTES) and not value.dtype.hasobject
    if isinstance(value, tuple):
        return any(type(one) not in _PLAIN for one in value)
    return not isinstance(value, (*_CONTAINERS, nn.Module)) and _is_users_own(value)


def _seen(one: Any) -> Seen:
    return snapshot_of("", one) or object_seen("", one)


def _is_copied(one: Any) -> bool:
    """Return whether the state of something is copied before a call."""
    if isinstance(one, torch.Tensor):
        return one.layout is torch.strided and one.nbytes <= _MOST_TENSOR_BYTES and not one.requires_grad
    return not isinstance(one, tuple)


def _without_graphs(seen: Seen) -> Seen:
    """Return a state in which tensors keep no graph alive."""
    if not isinstance(seen.then, list):
        return seen
    return replace(seen, then=[tuple(map(_left, one)) if isinstance(one, tuple) else _left(one) for one in seen.then])


def _left(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) and value.grad_fn is not None else value


def _roots_of(hook: Any) -> list[Any]:
    """Return what a hook refers to: its object, its closure, and the arguments bound to it."""
    found: list[Any] = []
    while isinstance(hook, functools.partial):
        found += [*hook.args, *hook.keywords.values()]
        hook = hook.func
    if isinstance(hook, MethodType):
        found.append(hook.__self__)
        hook = hook.__func__
    if not isinstance(hook, FunctionType):
        return [*found, hook]
    if _is_librarys(hook.__module__):
        return found
    for cell in hook.__closure__ or ():
        # A variable may not have a value yet.
        with suppress(ValueError):
            found.append(cell.cell_contents)
    return found


def _reached(roots: Iterable[Any]) -> list[Any]:
    """Return the containers, arrays, tensors and objects of the user's own that roots lead to, nearest first."""
    waiting, found, items = deque(roots), dict[int, Any](), 0
    while waiting and len(found) < _MOST_OBJECTS and items <= _MOST_ITEMS:
        one = waiting.popleft()
        if id(one) in found:
            continue
        if isinstance(one, torch.Tensor | np.ndarray):
            if not isinstance(one, nn.Parameter):
                found[id(one)] = one
            continue
        if isinstance(one, _CONTAINERS):
            inner = list(one.values()) if isinstance(one, dict) else list(one) if len(one) <= _MOST_ITEMS else None
        else:
            inner = list(attributes_of(one).values()) if _is_users_own(one) else None
            if inner is not None and any(type(value).__module__.partition(".")[0] in _CONCURRENT for value in inner):
                inner = None
        if inner is not None:
            found[id(one)] = one
            items += len(inner)
            waiting += [value for value in inner if type(value) not in _PLAIN or type(value) is torch.Tensor]
    return list(found.values())


def _is_users_own(one: Any) -> bool:
    """Return whether an object is of a class of the user's own, not of an installed library."""
    kind = type(one)
    return (
        kind not in _PLAIN
        and not isinstance(one, nn.Module | type | FunctionType | MethodType)
        and _is_own_module(kind.__module__)
    )


@functools.cache
def _is_own_module(name: str) -> bool:
    path = getattr(sys.modules.get(name), "__file__", None) or ""
    return not _is_librarys(name) and "site-packages" not in path and "dist-packages" not in path


def _is_librarys(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
