"""Copy objects and everything that they refer to, so that a pass over the copy leaves the original unchanged.

Values of trained and large parameters are not copied: the copy has a new leaf on the same storage, without the
original's hooks and gradient, but with copies of its attributes (such as ``main_grad``). Functions, classes and objects
of the process (process groups, locks) are shared. Objects that cannot be copied are refused.
"""

from __future__ import annotations

import copy
import functools
import io
import random
import re
import struct
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from autotune.mechanics.devices import is_accelerator
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.memory_meter import strided

_WEAK = (weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType)
WEAK_DICTIONARIES = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
# Types of immutable objects, and of objects that belong to the whole process.
_SHARED = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    Enum,
    type,
    FunctionType,
    ModuleType,
    *_WEAK,
    type(threading.Lock()),
    type(threading.RLock()),
    np.generic,
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_PLAIN_CONTAINERS = (list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict)
_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
# Beginnings of the names of attributes that torch.compile sets on tensors to say which sizes may vary.
_COMPILER_MARKS = ("_dynamo", "_has_dynamo", "_specialize_on")
# Packages whose objects belong to the process: process groups, streams, context variables and loggers.
_OF_THE_PROCESS = re.compile(r"(torch\._C|torch\.distributed|_?contextvars|logging)($|\.)")
# Most objects in one copy; an object that leads to more probably leads to the whole program.
_MOST_OBJECTS = 50_000
# Packages whose classes' slots hold nothing that a pass changes.
_WITHOUT_SLOTS = ("torch", "builtins", "numpy", "collections")
# Most types whose properties are remembered.
_MOST_KINDS = 4096
# Frozen parameters up to this size in bytes (codebooks, running averages) are copied: a forward pass may write to them.
_FROZEN_BYTES = 2**25

TensorCopy = Callable[[torch.Tensor], torch.Tensor]
_T = TypeVar("_T")


class CopyError(Exception):
    """Error for an object that cannot be copied; the message names its type."""


class Copier:
    """Copier of objects that may refer to each other; each object is copied once.

    Args:
        tensor: function that returns the copy of a tensor.
    """

    def __init__(self, tensor: TensorCopy) -> None:
        self._tensor = tensor
        # References to the originals, so that their ids are not reused.
        self._known: dict[int, Any] = {}
        self._originals: list[Any] = []
        # Copies of dictionaries whose keys may be objects that are copied.
        self._keyed: list[dict[Any, Any]] = []

    def copy(self, value: Any) -> Any:
        """Return a copy of an object and everything that it refers to.

        Raises:
            CopyError: naming the type that cannot be copied.
        """
        try:
            made = self._copied(value)
            self._replace_keys()
        except CopyError:
            raise
        except any_error() as error:
            # Raised by code of the object's class, or by too deep a recursion.
            raise CopyError(type(value).__name__) from error
        return made

    def _replace_keys(self) -> None:
        """Replace keys of dictionaries that were copied as values elsewhere; others may be compared by identity."""
        for made in self._keyed:
            keys = [self._known.get(id(key), key) for key in made]
            if any(key is not former for key, former in zip(keys, made, strict=True)):
                items = list(zip(keys, made.values(), strict=True))
                kind: Any = OrderedDict if isinstance(made, OrderedDict) else dict
                kind.clear(made)
                for key, item in items:
                    kind.__setitem__(made, key, item)

    def _copied(self, value: Any) -> Any:
        way = _WAYS[type(value)]
        if way is None:
            return value
        if id(value) in self._known:
            return self._known[id(value)]
        if len(self._originals) >= _MOST_OBJECTS:
            raise CopyError(f"{type(value).__name__} that leads to {_MOST_OBJECTS} others")
        return way(self, value)

    def _tensor_copy(self, value: Any) -> Any:
        made = self.know(value, self._tensor(value))
        if made is not value and (isinstance(value, nn.Parameter) or has_scalar_attributes(value)):
            self._copy_attributes(value, made)
        return made

    def _generator(self, value: Any) -> Any:
        return self.know(value, value.clone_state())

    def _callable(self, value: Any) -> Any:
        return self.know(value, self._bound_again(value))

    def _bound_again(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            func, keywords = self._copied(value.func), self._copied(value.keywords)
            return functools.partial(func, *self._copied(value.args), **keywords)
        owner = value.__self__
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self._copied(owner))
        if owner is None or isinstance(owner, ModuleType | type):
            return value
        # A built-in method, such as ``found.append``, is bound to the copy.
        return getattr(self._copied(owner), value.__name__)

    def know(self, value: Any, made: Any) -> Any:
        """Register an object as the copy of another, and return it."""
        self._known[id(value)] = made
        self._originals.append(value)
        return made

    def _container(self, value: Any) -> Any:
        if isinstance(value, tuple | frozenset):
            items = [self._copied(item) for item in value]
            made = self.know(value, _constant(type(value), items))
            self._copy_attributes(value, made)
            return made
        # A shallow copy keeps what a subclass stores besides its items.
        made = self.know(value, value.copy() if type(value) in (list, dict) else copy.copy(value))
        if isinstance(value, dict) and not _SCALARS.issuperset(map(type, value)):
            self._keyed.append(made)
        if isinstance(value, defaultdict):
            made.default_factory = self._copied(value.default_factory)
        if has_scalars_only(value):
            pass
        elif isinstance(value, dict):
            for key, item in value.items():
                dict.__setitem__(made, key, self._copied(item))
        elif isinstance(value, set):
            made.clear()
            made.update(self._copied(item) for item in value)
        else:
            for place, item in enumerate(value):
                made[place] = self._copied(item)
        self._copy_attributes(value, made)
        return made

    def _plain_object(self, value: Any) -> Any:
        if is_named(value):
            return value
        # An object of the user's own class is made without calling its constructor.
        kind = type(value)
        made = self.know(value, SimpleNamespace() if kind is SimpleNamespace else object.__new__(kind))
        self._copy_attributes(value, made)
        return made

    def _copy_attributes(self, value: Any, made: Any) -> None:
        if type(value) in _PLAIN_CONTAINERS:
            return
        held = own_dict(value)
        if held is value:
            # A dictionary whose items are its attributes as well.
            object.__setattr__(made, "__dict__", made)
            return
        own = own_dict(made)
        for name, item in held.items():
            own[name] = self._copied(item)
        for name, item in _slot_values(value).items():
            _SLOTS[type(value)][name].__set__(made, self._copied(item))

    def _otherwise(self, value: Any) -> Any:
        if is_named(value):
            return value
        memo = dict(self._known)
        try:
            made = copy.deepcopy(value, memo)
        except any_error() as error:
            raise CopyError(type(value).__name__) from error
        # Parts of it may be referred to from elsewhere, too; deepcopy keeps a list of the originals.
        self._originals += memo.pop(id(memo), [])
        self._known = memo
        if made is value and not isinstance(value, random.Random):
            # An object that is its own deep copy is a constant.
            return self.know(value, value)
        return self.know(value, made)


def _constant(kind: Any, items: list[Any]) -> Any:
    """Return a tuple or frozen set of the given class and items."""
    try:
        # Without the constructor: a named tuple's takes the items as separate arguments.
        return (tuple if issubclass(kind, tuple) else frozenset).__new__(kind, items)
    except TypeError:
        # Torch's named results (``torch.return_types.max``) can be made only by their constructor.
        return kind(items)


def has_scalars_only(value: Any) -> bool:
    """Return whether a list, deque, set or dictionary contains only numbers, strings, bytes and ``None``."""
    return _SCALARS.issuperset(map(type, value.values() if isinstance(value, dict) else value))


def given_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that a tensor has been given, without the marks that ``torch.compile`` leaves."""
    return {name: value for name, value in vars(tensor).items() if not name.startswith(_COMPILER_MARKS)}


def has_scalar_attributes(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor has been given attributes, all of them numbers, strings, bytes or ``None``."""
    return type(tensor) is torch.Tensor and bool(given := given_attributes(tensor)) and has_scalars_only(given)


def copied(value: Any, tensor: TensorCopy = lambda tensor: tensor) -> Any:
    """Return a copy of any object and everything that it refers to.

    Args:
        value: the object.
        tensor: function that returns the copy of a tensor; by default, tensors are shared.

    Raises:
        CopyError: naming the type that cannot be copied.
    """
    return value if _is_shared(value) else Copier(tensor).copy(value)


def _is_shared(value: Any) -> bool:
    """Return whether copies share an object, by its actual type: a proxy's ``__class__`` is that of its target."""
    return _IS_SHARED[type(value)]


class Loans:
    """Lender of tensors to a pass that may write to them; their values are restored afterwards.

    On a host, copies are lent. On an accelerator, where the step may need all of the memory, strided tensors are lent
    themselves, and copies of their values stay on the host.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a leaf with a tensor's values."""
        if not is_accelerator(tensor.device) or tensor.layout is not torch.strided:
            return own_copy(tensor)
        self._lent.append((tensor, tensor.detach().cpu()))
        found = tensor.detach()
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(found, requires_grad=tensor.requires_grad)
        return found.requires_grad_(tensor.requires_grad)

    def take_back(self) -> None:
        """Restore the tensors that were written to."""
        for tensor, values in self._lent:
            if not same_bits(tensor.detach().cpu(), values):
                # .data does not count as a write: tensors that the run's own graph has saved get the same values again.
                tensor.data.copy_(values)
        self._lent = []


class Weights:
    """Backup of a module's trained weights, which the module's copies share and a pass may write to.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        trained = (one for one in module.parameters() if one.requires_grad)
        # On the host: the step may need all of the device's memory.
        self._then = [(part, part.detach().to("cpu", copy=True)) for one in trained for part in strided(one.detach())]

    def put_back(self) -> bool:
        """Restore the weights that were written to, and return whether there were any."""
        written = [(now, then) for now, then in self._then if not same_bits(now.detach().cpu(), then)]
        for now, then in written:
            now.data.copy_(then)
        return bool(written)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors have the same values; NaNs count as equal."""
    return bool(torch.isclose(one, two, 0, 0, True).all())


def twin_of(module: nn.Module, lend: TensorCopy) -> nn.Module:
    """Return a copy of a module that computes the same and shares only its trained and its large frozen weights.

    Args:
        module: the module.
        lend: function that returns the replacement for a tensor that a pass may write to.

    Raises:
        CopyError: naming the type that cannot be copied.
    """

    def alike(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) or (not tensor.requires_grad and tensor.nbytes <= _FROZEN_BYTES):
            return lend(tensor)
        return nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)

    copier = Copier(alike)
    # The module's own hooks are not copied, only those of its parts.
    for name, hooks in vars(module).items():
        if "hooks" in name and isinstance(hooks, OrderedDict):
            copier.know(hooks, OrderedDict())
    twin: nn.Module = copier.copy(module)
    return twin


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf with a tensor's values; a parameter stays a parameter, and an expanded tensor stays expanded."""
    made = tensor.detach()
    if tensor.layout is torch.strided and 0 in tensor.stride():
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
        made = made[once].clone().expand(tensor.shape)
    else:
        made = made.clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def dissolve(twin: nn.Module) -> None:
    """Clear a copy that is no longer needed: its reference cycles would wait for the garbage collector."""
    for part in list(twin.modules()):
        vars(part).clear()


def is_unchanged(value: Any, copy: Any) -> bool:
    """Return whether an object still has the contents of an earlier copy that shares its tensors."""
    return _is_unchanged(value, copy, set())


def _is_unchanged(value: Any, copy: Any, met: set[int]) -> bool:
    if value is copy or id(value) in met:
        return True
    if type(value) is not type(copy) or isinstance(value, torch.Tensor) or len(met) > _MOST_OBJECTS:
        return False
    if issubclass(type(value), bool | int | float | complex | str | bytes):
        return bool(value == copy)
    met.add(id(value))
    if isinstance(value, dict):
        if len(value) != len(copy):
            return False
        pairs = [*zip(value, copy, strict=True), *zip(value.values(), copy.values(), strict=True)]
    elif isinstance(value, list | tuple | deque):
        items, others = items_of(value), items_of(copy)
        if len(items) != len(others):
            return False
        pairs = list(zip(items, others, strict=True))
    elif _IS_PLAIN[type(value)] or has_slots(type(value)):
        pairs = []
    else:
        return False
    one, two = attributes_of(value), attributes_of(copy)
    if one.keys() != two.keys():
        return False
    return all(_is_unchanged(*pair, met) for pair in (*pairs, *((one[name], two[name]) for name in one)))


def state_of(value: Any) -> dict[str, Any]:
    """Return the values that an object leads to, by path: numbers, generator states, tensors and the like.

    Trained and large frozen parameters are left out. Copies of an object in the same state give equal values.
    """
    return dict(_state("", value, set()))


def _state(path: str, value: Any, met: set[int]) -> Iterator[tuple[str, Any]]:
    if _is_shared(value) and not issubclass(type(value), _WEAK):
        # It cannot change, only be replaced.
        yield path, value
        return
    if _is_shared(value) or _belongs_to_process(type(value)) or id(value) in met or len(met) > _MOST_OBJECTS:
        return
    met.add(id(value))
    if isinstance(value, torch.Tensor):
        yield from _state_of_tensor(path, value, met)
    elif isinstance(value, torch.Generator):
        yield path, value.get_state()
    elif isinstance(value, random.Random):
        yield path, value.getstate()
    elif isinstance(value, np.ndarray):
        yield path, value.copy()
    elif isinstance(value, np.random.Generator):
        yield path, repr(value.bit_generator.state)
    elif isinstance(value, np.random.RandomState):
        yield path, repr(value.get_state())
    else:
        yield from _state_of_parts(path, value, met)


def _state_of_tensor(path: str, value: torch.Tensor, met: set[int]) -> Iterator[tuple[str, Any]]:
    own = isinstance(value, nn.Parameter)
    if not own or (not value.requires_grad and value.nbytes <= _FROZEN_BYTES):
        # On the host, so that the passes have all of the device's memory.
        yield path, value.detach().cpu().clone()
    if value.is_leaf and value.grad is not None:
        yield f"{path}.grad", value.grad.detach().cpu().clone()
    for name, item in vars(value).items() if own or has_scalar_attributes(value) else ():
        yield from _state(f"{path}.{name}", item, met)


def _state_of_parts(path: str, value: Any, met: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, WEAK_DICTIONARIES):
        # Among its attributes is a function that each copy has of its own.
        value = dict(value)
    if isinstance(value, dict):
        yield f"{path}#", len(value)
        for place, (key, item) in enumerate(value.items()):
            # Keys of other types may be modules of a copy that is cleared before paths are compared.
            yield from _state(f"{path}[{key!r:.60}]" if type(key) in _SCALARS else f"{path}[key {place}]", item, met)
    elif isinstance(value, list | tuple | deque):
        items = items_of(value)
        yield f"{path}#", len(items)
        for place, item in enumerate(items):
            yield from _state(f"{path}[{place}]", item, met)
    elif isinstance(value, set | frozenset):
        yield f"{path}#", len(value)
        yield f"{path}{{}}", str(sorted(repr(item) for item in value if isinstance(item, str | bytes | int | float)))
    else:
        yield from _state_of_other(path, value, met)
    for name, item in attributes_of(value).items():
        yield from _state(f"{path}.{name}", item, met)


def items_of(value: Any) -> list[Any]:
    """Return the items of a list, tuple, set or deque, whose class may define another length, or none."""
    kind: Any = next(base for base in (list, tuple, set, frozenset, deque) if isinstance(value, base))
    return list(kind.__iter__(value))


def _state_of_other(path: str, value: Any, met: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield an object's state that is neither in a container nor in an attribute."""
    if isinstance(value, MethodType):
        yield f"{path}.__func__", value.__func__
        yield from _state(f"{path}.__self__", value.__self__, met)
    elif isinstance(value, BuiltinFunctionType):
        yield f"{path}.__name__", value.__name__
        yield from _state(f"{path}.__self__", value.__self__, met)
    elif isinstance(value, functools.partial):
        yield from _state(f"{path}.args", (value.args, value.keywords), met)
    elif isinstance(value, bytearray):
        yield path, bytes(value)
    elif isinstance(value, io.StringIO | io.BytesIO):
        yield path, value.getvalue()
    elif isinstance(value, Iterator) and type(value).__module__ in ("itertools", "builtins"):
        # What remains of the iterator, such as ``count(3)``.
        yield path, repr(value.__reduce__())


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes by name, from its ``__dict__`` and slots; a method has none."""
    if isinstance(value, MethodType):
        return {}
    return {**own_dict(value), **_slot_values(value)}


def _slot_values(value: Any) -> dict[str, Any]:
    """Return the values of those of an object's slots that are not empty."""
    found: dict[str, Any] = {}
    for name, slot in _SLOTS[type(value)].items():
        with suppress(AttributeError):
            found[name] = slot.__get__(value)
    return found


def put_attribute(value: Any, name: str, item: Any) -> None:
    """Set an attribute in an object's ``__dict__`` or slot, without running code of its class."""
    slot = _SLOTS[type(value)].get(name)
    if slot is None:
        own_dict(value)[name] = item
    else:
        slot.__set__(value, item)


def delete_attribute(value: Any, name: str) -> None:
    """Delete an attribute from an object's ``__dict__`` or slot, without running code of its class."""
    slot = _SLOTS[type(value)].get(name)
    if slot is None:
        own_dict(value).pop(name, None)
    else:
        slot.__delete__(value)


def own_dict(value: Any) -> dict[str, Any]:
    """Return an object's ``__dict__``, or an empty one, without running code of its class."""
    if isinstance(value, threading.local):
        # Each thread has its own.
        return value.__dict__
    try:
        found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


def has_slots(kind: type) -> bool:
    """Return whether objects of a class have slots, apart from those of torch's, numpy's and python's own classes."""
    return bool(_SLOTS[kind])


def _slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """Return the descriptors of a class's slots by name, as the class stores it: private names are longer there."""
    # Of a slot that a subclass declares again, objects have two, and use its own.
    own = (base for base in reversed(kind.__mro__) if base.__module__.partition(".")[0] not in _WITHOUT_SLOTS)
    members = ((name, one) for base in own if "__slots__" in vars(base) for name, one in vars(base).items())
    return {name: one for name, one in members if isinstance(one, MemberDescriptorType)}


def _is_plain(kind: type) -> bool:
    """Return whether all state of a class's objects is in their ``__dict__``."""
    if kind is SimpleNamespace or issubclass(kind, nn.Module):
        return not issubclass(kind, torch.jit.ScriptModule)
    return (
        (any("__dict__" in vars(base) for base in kind.__mro__) or has_slots(kind))
        and not hasattr(kind, "__deepcopy__")
        and getattr(kind, "__reduce_ex__", None) is _PLAIN_REDUCTION[0]
        and getattr(kind, "__reduce__", None) is _PLAIN_REDUCTION[1]
        and kind.__basicsize__ <= _PLAIN_SIZE + _POINTER * len(_SLOTS[kind])
    )


def is_named(value: Any) -> bool:
    """Return whether an object is a global of its class's module, such as a sentinel that code compares by identity.

    Copies share it.
    """
    if isinstance(value, nn.Module):
        return False
    held = vars(sys.modules.get(type(value).__module__) or _Plain)
    length, ids = _GLOBALS.get(type(value).__module__, (0, frozenset[int]()))
    if length != len(held):
        ids = frozenset(map(id, list(held.values())))
        _GLOBALS[type(value).__module__] = len(held), ids
    # An object that has ended may have had this id.
    return id(value) in ids and any(one is value for one in list(held.values()))


class _Plain:
    pass


class _ByKind(dict[type, _T]):
    """A property of types, found once for each type; types that no longer exist are dropped from time to time.

    Args:
        find: returns the property of a type.
    """

    def __init__(self, find: Callable[[type], _T]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, kind: type) -> _T:
        if len(self) > _MOST_KINDS:
            self.clear()
        found = self[kind] = self._find(kind)
        return found


def _way(kind: type) -> Callable[[Copier, Any], Any] | None:
    """Return how objects of a type are copied; ``None`` for those that copies share."""
    if _IS_SHARED[kind] or _belongs_to_process(kind):
        return None
    ways = (
        (torch.Tensor, Copier._tensor_copy),
        (torch.Generator, Copier._generator),
        ((MethodType, BuiltinFunctionType, functools.partial), Copier._callable),
        (_CONTAINERS, Copier._container),
    )
    found = next((way for kinds, way in ways if issubclass(kind, kinds)), None)
    return found or (Copier._plain_object if _IS_PLAIN[kind] else Copier._otherwise)


def _belongs_to_process(kind: type) -> bool:
    """Return whether objects of a type represent something that exists once per process."""
    own = issubclass(kind, torch.Tensor | torch.Generator | nn.Module)
    return not own and _OF_THE_PROCESS.match(kind.__module__) is not None


_IS_SHARED = _ByKind(lambda kind: kind is object or issubclass(kind, _SHARED))
_IS_PLAIN = _ByKind(_is_plain)
_SLOTS = _ByKind(_slots_of)
_WAYS = _ByKind(_way)
# By name of a module, the number of its globals and the ids of their values.
_GLOBALS: dict[str, tuple[int, frozenset[int]]] = {}
_PLAIN_REDUCTION: tuple[Any, Any] = (object.__reduce_ex__, object.__reduce__)
# Sizes of an object with a ``__dict__`` and weak references, and no further data in C, and of a slot.
_PLAIN_SIZE, _POINTER = _Plain.__basicsize__, struct.calcsize("P")
