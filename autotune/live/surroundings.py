"""Watch what a unit's code can reach besides the unit itself: globals, closures, attributes of its classes.

A list that all blocks of a model append to, a counter in a module, a generator that a hook's closure holds: a copy of
the unit shares them, so that passes over the copy show whether the unit changes them, and they are put back.
"""

from __future__ import annotations

import functools
import operator
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

# Objects that are looked at, and how many functions deep: a function calls others.
_MOST_OBJECTS, _DEPTH = 5000, 3
# Tensors up to this size are copied.
_SMALL_BYTES = 2**20
# Libraries whose functions keep to what they are handed.
_TRUSTED = ("torch", "numpy", "builtins", "math", "functools", "itertools", "typing", "collections", "autotune")
_OF_MODULES = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """Hold one object as it was.

    Attributes:
        name: how the code calls it, or leads to it.
        now: returns what it holds.
        then: what it held.
        put: puts that back; what it returns is of no use.
        same: tells whether two such values are the same.
    """

    name: str
    now: Callable[[], Any]
    then: Any
    put: Callable[[Any], object]
    same: Callable[[Any, Any], bool]


class Surroundings:
    """Hold what a unit's code can reach.

    Args:
        module: the unit.
        itself: whether what the unit's own attributes hold is watched as well, for passes that do not run on a copy.
    """

    def __init__(self, module: nn.Module, *, itself: bool = False) -> None:
        self._seen: list[_Seen] = []
        self._met: set[int] = set()
        for part in module.modules() if itself else ():
            for name, value in vars(part).items():
                if name not in _OF_MODULES:
                    self._take(name, value)
        for name, function in _functions(module):
            self._look_into(name, function, _DEPTH)

    def changed(self) -> str | None:
        """Return the name of the first object that is not what it was; ``None`` if all are."""
        return next((one.name for one in self._seen if not one.same(one.now(), one.then)), None)

    def restore(self) -> None:
        """Put back what is not what it was."""
        for one in self._seen:
            if not one.same(one.now(), one.then):
                one.put(one.then)

    def _look_into(self, name: str, function: Any, depth: int) -> None:
        """Take in what a function's code names, and what its closure holds."""
        if isinstance(function, MethodType):
            self._take(f"{name}.__self__", function.__self__)
            function = function.__func__
        function = getattr(function, "__wrapped__", None) or function
        if not isinstance(function, FunctionType) or id(function) in self._met or not depth:
            return
        self._met.add(id(function))
        if (function.__module__ or "").partition(".")[0] in _TRUSTED:
            return
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                self._take(key, cell.cell_contents, depth - 1)
            except ValueError:
                continue
        for key in function.__code__.co_names:
            if key in function.__globals__:
                self._take(key, function.__globals__[key], depth - 1)

    def _take(self, name: str, value: Any, depth: int = 0) -> None:
        if id(value) in self._met or len(self._seen) > _MOST_OBJECTS:
            return
        if isinstance(value, FunctionType | MethodType):
            self._look_into(name, value, depth)
            return
        if isinstance(value, nn.Module | torch.nn.Parameter):
            return
        found = _snapshot(name, value)
        if found is None:
            return
        self._met.add(id(value))
        self._seen.append(found)
        for key, item in _items(value):
            self._take(f"{name}{key}", item, depth)


def _functions(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the functions that a unit's forward pass calls, with names for them."""
    for part in module.modules():
        for base in type(part).__mro__:
            if base.__module__.partition(".")[0] not in _TRUSTED and base is not object:
                yield from ((name, value) for name, value in vars(base).items() if isinstance(value, FunctionType))
        yield "forward", vars(part).get("forward")
        if part is not module:
            for kind in _HOOKS:
                yield from (("a hook", hook) for hook in vars(part)[kind].values())


def _snapshot(name: str, value: Any) -> _Seen | None:
    """Return an object as it is; ``None`` for one that nothing can change, or that nobody can look into."""
    for kinds, seen in _KINDS:
        if isinstance(value, kinds):
            return seen(name, value)
    if isinstance(value, type) or not hasattr(value, "__dict__") or callable(value):
        return None
    if type(value).__module__.partition(".")[0] in (*_TRUSTED, "logging", "contextvars"):
        return None
    return _mapping(name, vars(value))


def _sequence(name: str, value: Any) -> _Seen:
    return _Seen(name, lambda: list(value), list(value), lambda then: _refill(value, then), _same_items)


def _mapping(name: str, value: Any) -> _Seen:
    return _Seen(name, lambda: list(value.items()), list(value.items()), lambda t: _refill(value, t), _same_pairs)


def _set(name: str, value: Any) -> _Seen:
    return _Seen(name, lambda: set(value), set(value), lambda then: _refill(value, then), operator.eq)


def _torch_generator(name: str, value: Any) -> _Seen:
    return _Seen(name, value.get_state, value.get_state(), value.set_state, torch.equal)


def _python_generator(name: str, value: Any) -> _Seen:
    return _Seen(name, value.getstate, value.getstate(), value.setstate, operator.eq)


def _numpy_generator(name: str, value: Any) -> _Seen:
    bits = value.bit_generator
    put = functools.partial(setattr, bits, "state")
    return _Seen(name, lambda: bits.state, bits.state, put, lambda one, two: repr(one) == repr(two))


def _tensor(name: str, value: Any) -> _Seen:
    then = value._version, value.detach().clone() if value.nbytes <= _SMALL_BYTES else None
    return _Seen(name, lambda: (value._version, value), then, lambda t: _write(value, t[1]), lambda a, b: a[0] == b[0])


def _items(value: Any) -> list[tuple[str, Any]]:
    """Return what an object holds, with names."""
    if isinstance(value, list | deque):
        return [(f"[{place}]", item) for place, item in enumerate(value)]
    if isinstance(value, dict):
        return [(f"[{key!r:.40}]", item) for key, item in value.items()]
    own = getattr(value, "__dict__", None)
    return [(f".{key}", item) for key, item in own.items()] if isinstance(own, dict) else []


def _refill(value: Any, then: Any) -> None:
    value.clear()
    if isinstance(value, list | deque):
        value.extend(then)
    else:
        value.update(then)


def _write(value: torch.Tensor, then: torch.Tensor | None) -> None:
    if then is not None:
        with torch.no_grad():
            value.copy_(then)


def _same_items(one: list[Any], two: list[Any]) -> bool:
    return len(one) == len(two) and all(a is b for a, b in zip(one, two, strict=True))


def _same_pairs(one: list[tuple[Any, Any]], two: list[tuple[Any, Any]]) -> bool:
    return len(one) == len(two) and all(
        key == other and value is item for (key, value), (other, item) in zip(one, two, strict=True)
    )


_KINDS: tuple[tuple[Any, Callable[[str, Any], _Seen]], ...] = (
    ((list, deque), _sequence),
    (dict, _mapping),
    (set, _set),
    (torch.Generator, _torch_generator),
    (random.Random, _python_generator),
    (np.random.Generator, _numpy_generator),
    (torch.Tensor, _tensor),
)
