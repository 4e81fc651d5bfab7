"""Record and restore the state outside a unit that its code can reach: globals, closures, attributes of its classes.

Examples are a list that all blocks of a model append to, a global counter, and a generator in a hook's closure. A copy
of the unit shares them, so that passes over the copy show whether the unit changes them. Objects that cannot be read
are left out. If a tensor is too large to copy, or an iterator cannot be restored, the unit's code must not be run.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ContextDecorator, _GeneratorContextManager, contextmanager, suppress
from dataclasses import replace
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import torch
from torch import nn

from autotune.mechanics.copies import attributes_of, has_slots, is_named, items_of, same_bits
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.seen_state import PLAIN, Seen, Values, cell_seen, mapping_seen, object_seen, same, snapshot_of
from autotune.profiling.reachable_code import (
    HOOKS,
    bound_in,
    forward_of,
    functions_of,
    is_trusted,
    may_draw,
    names_in,
    plain_functions,
)

logger = logging.getLogger(__name__)

# Maximum number of recorded objects, and maximum depth to which calls of functions are followed.
_MOST_OBJECTS, _DEPTH = 5000, 8
# Tensors up to this size are copied.
_MOST_BYTES = 2**27
_OF_MODULES = frozenset(vars(nn.Module()))
# Attributes of classes that nobody changes in place; the code of functions is inspected where it is called.
_FUNCTIONS = (FunctionType, classmethod, staticmethod, property)
_OF_CLASSES = (*_FUNCTIONS, type, MethodType, BuiltinFunctionType)
# Methods of objects made in C, such as ``itertools.count().__next__``.
_METHODS_IN_C = (BuiltinFunctionType, MethodWrapperType)
# The code of functions that are decorated by a context manager.
_DECORATED = tuple(one for one in ContextDecorator.__call__.__code__.co_consts if isinstance(one, CodeType))
# The most objects within an attribute that are looked at.
_MOST_WITHIN = 256
_LEFT_OUT = (*PLAIN, type(None))
_WEAK: tuple[type, ...] = (weakref.ReferenceType, *weakref.ProxyTypes)


class Surroundings:
    """The objects that a unit's code can reach, and their recorded states.

    Attributes:
        refusal: why the unit's code must not be run: it may change something that cannot be restored; ``None`` if it
            may be run.

    Args:
        module: the unit.
        own: names and values of attributes of the unit's parts to watch as well.
        handed: arguments of the unit whose functions to watch as well.
        named: whether to watch only the attributes that the unit's code names, of objects reached through ``own``.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        own: Iterable[tuple[str, Any]] = (),
        handed: Sequence[Any] = (),
        named: bool = False,
    ) -> None:
        self._seen: list[Seen] = []
        # Caches of functions, and their sizes: a copy of the unit may add its own results.
        self._caches: list[tuple[Any, int]] = []
        # The unit's own parts are copied, or their attributes are watched: only functions may lead copies to them.
        self._parts = frozenset(map(id, module.modules()))
        self._met: set[int] = set(self._parts) if named else set()
        self._lent = frozenset(map(id, (*module.buffers(), *(value for _, value in own_attributes(module)))))
        self.refusal: str | None = None
        # The attributes that are watched; ``None`` for all.
        self._named = _names_in(module) if named else None
        for name, value in own:
            self._take(name, value)
        self._named = None
        for kind in dict.fromkeys(base for part in module.modules() for base in type(part).__mro__):
            self._take_class(kind)
        for name, function in _functions(module):
            self._look_into(name, function, _DEPTH)
        # Functions of the unit's attributes and arguments that its code may call by name.
        names = _names_in(module)
        for name, value in (*own_attributes(module), *(("what it is handed", one) for one in handed)):
            if issubclass(type(value), _WEAK):
                self._take(name, _referent(value))
            elif not named and is_named(value):
                self._take(name, value)
            for function in functions_of(value, names):
                self._look_into(name, function, _DEPTH)
            if not named:
                self._take_shared(name, value)

    def changed(self, *, grown: bool = False) -> str | None:
        """Return the name of the first object whose state has changed, or ``None``.

        Args:
            grown: whether to ignore items that were added at the end of a list or dictionary.
        """
        return next((one.name for one in self._seen if not one.is_same(grown=grown)), None)

    def restore(self) -> None:
        """Restore all objects that have changed, and clear caches that were empty."""
        for cache, results in self._caches:
            if not results and cache.cache_info().currsize:
                cache.cache_clear()
        for one in self._seen:
            try:
                if not one.is_same():
                    one.put(one.then)
            except any_error() as error:  # the others are restored, and the run continues
                logger.warning("a unit changed %s, which could not be restored: %s", one.name, error)

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Run the body with all objects in their recorded states; changes by the body are undone."""
        changed = [one for one in self._seen if not one.is_same(grown=True)]
        now = [one.now() for one in changed]
        for place, one in enumerate(changed):
            if isinstance(one.then, Values):
                now[place] = replace(now[place], copy=one.then.tensor.detach().clone())
            one.put(one.then)
        try:
            yield
        finally:
            for one, value in zip(changed, now, strict=True):
                one.put(value)

    def _look_into(self, name: str, function: Any, depth: int) -> None:
        """Watch what a function's code names, its closure, and the functions that it may call by name."""
        while isinstance(function, functools.partial):
            for one in (*function.args, *function.keywords.values()):
                self._take(f"what {name} is given", one)
            function = function.func
        if isinstance(function, MethodType) and (depth < _DEPTH or id(function.__self__) not in self._parts):
            # A method that the unit itself holds is copied with its part.
            self._take(f"{name}.__self__", function.__self__)
        for one in plain_functions(function):
            if id(one) not in self._met and depth:
                self._met.add(id(one))
                if not is_trusted(one.__module__):
                    self._look_into_code(one, depth - 1)

    def _take_shared(self, name: str, value: Any) -> None:
        """Watch what copies of a container or an object share with it, such as functions, globals and caches."""
        waiting, met = [value], set[int]()
        while waiting and len(met) < _MOST_WITHIN:
            one = waiting.pop()
            kind = type(one)
            if id(one) in met or issubclass(kind, nn.Module | torch.Tensor | ModuleType | type):
                continue
            met.add(id(one))
            if issubclass(kind, (*_WEAK, functools._lru_cache_wrapper)):
                self._take(name, one)
            elif issubclass(kind, FunctionType | MethodType | functools.partial):
                self._look_into(name, one, _DEPTH)
            elif issubclass(kind, _METHODS_IN_C):
                self._take(name, one.__self__)
            elif not is_trusted(kind.__module__) and (hasattr(kind, "__deepcopy__") or is_named(one)):
                self._take(name, one)
            elif issubclass(kind, list | tuple | set | frozenset | deque):
                waiting += items_of(one)
            elif issubclass(kind, dict):
                waiting += [*one.values(), *([one.default_factory] if issubclass(kind, defaultdict) else [])]
            elif not is_trusted(kind.__module__):
                waiting += attributes_of(one).values()

    def _look_into_code(self, function: FunctionType, depth: int) -> None:
        names = names_in(function.__code__)
        for held in (function.__dict__, function.__kwdefaults__ or {}, function.__defaults__ or ()):
            self._take(f"what {function.__name__} holds", held, depth)
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                found = cell.cell_contents
            except ValueError:
                continue
            if isinstance(found, _GeneratorContextManager) and function.__code__ in _DECORATED:
                # Its generator is never used: each call makes another one.
                key, found = found.func.__name__, functools.partial(found.func, *found.args, **found.kwds)
            self._take_named(key, found, names, depth)
            self._seen.append(cell_seen(key, cell))
        self._seen += [_name(function.__globals__, key) for key in bound_in(function.__code__)]
        self._take_names(function.__globals__, names, depth)

    def _take_names(self, where: dict[str, Any], names: frozenset[str], depth: int) -> None:
        """Watch what names refer to in a module's globals."""
        for key in names:
            found = where.get(key)
            if key in where and not isinstance(found, type | FunctionType | BuiltinFunctionType | ModuleType):
                self._seen.append(_name(where, key))
            if isinstance(found, ModuleType):
                if not is_trusted(found.__name__) and id(found) not in self._met and depth > 0:
                    self._met.add(id(found))
                    self._take_names(vars(found), names, depth - 1)
            else:
                self._take_named(key, found, names, depth)

    def _take_named(self, name: str, value: Any, names: frozenset[str], depth: int) -> None:
        """Watch what a name refers to, and the functions that code with these names may call on it."""
        self._take(name, value, depth)
        for function in functions_of(value, names):
            self._look_into(name, function, depth)

    def _take_class(self, kind: type) -> None:
        """Watch the attributes of a class, except functions and inherited attributes."""
        if is_trusted(kind.__module__) or id(kind) in self._met:
            return
        self._met.add(id(kind))
        for key, value in list(vars(kind).items()):
            if not key.startswith(("_abc", "__")) and not isinstance(value, _OF_CLASSES):
                self._seen.append(_attribute(kind, key))
                self._take(f"{kind.__name__}.{key}", value)

    def _take(self, name: str, value: Any, depth: int = 0) -> None:
        # Use type(): isinstance() would ask the referent of a weak proxy, which may no longer exist.
        if issubclass(type(value), _WEAK):
            value = _referent(value)
        if issubclass(type(value), _LEFT_OUT) or id(value) in self._met or len(self._seen) > _MOST_OBJECTS:
            return
        if isinstance(value, FunctionType | MethodType):
            self._look_into(name, value, depth)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._met.add(id(value))
            self._caches.append((value, value.cache_info().currsize))
            if may_draw(value):
                # A single result cannot be removed, and the run's own call would not draw it again.
                self.refusal = f"its code can reach {name}, a cache of results that may be drawn at random"
        elif isinstance(value, Iterator) and not hasattr(value, "write"):
            self.refusal = f"its code can reach {name}, an iterator, which cannot be restored"
        else:
            self._take_object(name, value, depth)

    def _take_object(self, name: str, value: Any, depth: int) -> None:
        for kind in (value if isinstance(value, type) else type(value)).__mro__:
            self._take_class(kind)
        if not isinstance(value, tuple):
            try:
                found = _snapshot(name, value, self._named)
            except any_error():  # its state cannot be read (random.SystemRandom, for example)
                return
            if found is None:
                return
            self._met.add(id(value))
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and found.then.copy is None:
                self.refusal = f"its code can reach {name}, which it may change and which is too large to copy"
            if id(value) in self._lent and _is_copied(found):
                # Passes over copies may have written to it, and put its values back.
                found = replace(found, same=lambda one, then: same_bits(one.tensor.detach().cpu(), then.copy))
            self._seen.append(found)
        for key, item in _items(value):
            self._take(f"{name}{key}", item, depth)


def _referent(value: Any) -> Any:
    """Return the referent of a weak reference or a weak proxy; ``None`` if it no longer exists."""
    if issubclass(type(value), weakref.ReferenceType):
        return value()
    found = None
    with suppress(ReferenceError):
        # A method that a proxy returns is bound to the referent.
        found = value.__dir__.__self__
    return found


def own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return names and values of the attributes of a unit's parts, except those that every module has."""
    parts = (vars(part).items() for part in module.modules())
    return [(name, value) for items in parts for name, value in items if name not in _OF_MODULES]


def _functions(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield names and functions of a unit that its forward pass may call."""
    for part in module.modules():
        for base in type(part).__mro__:
            if not is_trusted(base.__module__):
                yield from ((name, value) for name, value in vars(base).items() if isinstance(value, _FUNCTIONS))
        yield "forward", forward_of(part)
        if part is not module:
            for kind in HOOKS:
                yield from (("a hook", hook) for hook in vars(part)[kind].values())


def _names_in(module: nn.Module) -> frozenset[str]:
    """Return the names that the code of a unit uses."""
    functions = (function for _, found in _functions(module) for function in plain_functions(found))
    return frozenset().union(*(names_in(function.__code__) for function in functions))


def _snapshot(name: str, value: Any, named: frozenset[str] | None) -> Seen | None:
    """Return an object with its current state; ``None`` if it cannot change, cannot be read, or is trained.

    Args:
        name: the name by which the code reaches it.
        value: the object.
        named: the attributes to record; ``None`` for all.
    """
    if isinstance(value, torch.Tensor) and (value.is_inference() or _is_trained(value)):
        return None
    if (found := snapshot_of(name, value)) is not None:
        return found
    if isinstance(value, nn.Module):
        return mapping_seen(name, vars(value))
    if isinstance(value, type | FunctionType | BuiltinFunctionType | MethodType | ModuleType):
        return None
    if is_trusted(type(value).__module__) or type(value).__module__.partition(".")[0] in ("logging", "contextvars"):
        return None
    return object_seen(name, value, named) if hasattr(value, "__dict__") or has_slots(type(value)) else None


def _is_copied(seen: Seen) -> bool:
    """Return whether a recorded object is a dense tensor with a copy of its values."""
    then = seen.then
    return isinstance(then, Values) and then.tensor.layout is torch.strided and then.copy is not None


def _is_trained(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _name(where: dict[str, Any], name: str) -> Seen:
    """Return a global name of a module with its current value; the name may be undefined."""

    def put(then: Any) -> None:
        if then is _name:
            where.pop(name, None)
        else:
            where[name] = then

    return Seen(name, lambda: where.get(name, _name), where.get(name, _name), put, same)


def _attribute(kind: type, name: str) -> Seen:
    then = vars(kind)[name]
    return Seen(f"{kind.__name__}.{name}", lambda: vars(kind).get(name), then, lambda t: setattr(kind, name, t), same)


def _items(value: Any) -> list[tuple[str, Any]]:
    """Return the items or attributes of an object, with names."""
    if isinstance(value, list | tuple | deque):
        return [(f"[{place}]", item) for place, item in enumerate(items_of(value))]
    if isinstance(value, dict):
        # The text of other keys may be that of modules from which parts are missing now.
        return [
            (f"[{key!r:.40}]" if isinstance(key, str | int | float) else f"[key {place}]", item)
            for place, (key, item) in enumerate(value.items())
        ]
    if isinstance(value, nn.Module):
        # Its weights are left out: they are trained, or do not belong to the unit.
        own = {key: item for key, item in vars(value).items() if key not in _OF_MODULES}
        return [(f".{key}", item) for key, item in {**own, "_buffers": value._buffers, **value._modules}.items()]
    return [(f".{key}", item) for key, item in attributes_of(value).items()]
