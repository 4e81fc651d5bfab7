"""Record the state of one object, compare it with its state later, and restore it."""

from __future__ import annotations

import functools
import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CellType
from typing import Any

import numpy as np
import torch

from autotune.mechanics.copies import attributes_of, delete_attribute, put_attribute, same_bits

# Tensors up to this size are copied.
_MOST_BYTES = 2**27
PLAIN = (bool, int, float, complex, str, bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One object and its recorded state.

    Attributes:
        name: the name or path by which the code reaches it.
        now: returns its current state.
        then: its recorded state.
        put: sets it to a state; the return value is ignored.
        same: returns whether two states are the same.
    """

    name: str
    now: Callable[[], Any]
    then: Any
    put: Callable[[Any], object]
    same: Callable[[Any, Any], bool]

    def is_same(self, *, grown: bool = False) -> bool:
        """Return whether the object is in its recorded state.

        Args:
            grown: whether to ignore items that were added at its end.
        """
        now = self.now()
        if grown and self.same in (_same_items, _same_pairs):
            now = now[: len(self.then)]
        return self.same(now, self.then)


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """A tensor, its version counter, and a copy of its values; ``None`` if they were not copied."""

    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None


def snapshot_of(name: str, value: Any) -> Seen | None:
    """Return a container, array, tensor or generator with its current state; ``None`` for any other object."""
    return next((seen(name, value) for kinds, seen in _KINDS if isinstance(value, kinds)), None)


def _sequence(name: str, value: Any) -> Seen:
    return Seen(name, lambda: list(value), list(value), lambda then: _refill(value, then), _same_items)


def mapping_seen(name: str, value: Any) -> Seen:
    """Return a mapping with its current items."""
    return Seen(name, lambda: list(value.items()), list(value.items()), lambda t: _refill(value, t), _same_pairs)


def object_seen(name: str, value: Any, named: frozenset[str] | None = None) -> Seen:
    """Return an object with its current attributes, including those in slots."""

    def put(then: Sequence[tuple[str, Any]]) -> None:
        for key in dict(now()).keys() - dict(then).keys():
            delete_attribute(value, key)
        for key, held in then:
            put_attribute(value, key, held)

    def now() -> list[tuple[str, Any]]:
        return [(key, held) for key, held in attributes_of(value).items() if named is None or key in named]

    return Seen(name, now, now(), put, _same_pairs)


def _bytes(name: str, value: Any) -> Seen:
    def put(then: bytes) -> None:
        value[:] = then

    return Seen(name, lambda: bytes(value), bytes(value), put, operator.eq)


def cell_seen(name: str, cell: CellType) -> Seen:
    """Return a variable of a function's closure, which may have no value yet, with its current value."""

    def now() -> list[Any]:
        try:
            return [cell.cell_contents]
        except ValueError:
            return []

    def put(then: list[Any]) -> None:
        if then:
            cell.cell_contents = then[0]

    return Seen(name, now, now(), put, _same_items)


def _array(name: str, value: Any) -> Seen:
    if value.dtype.hasobject:
        # Its items are compared by identity: they may be arrays of other shapes.
        return Seen(name, lambda: value.ravel().tolist(), value.ravel().tolist(), _put_items(value), _same_items)
    return Seen(name, value.copy, value.copy(), functools.partial(np.copyto, value), _same_arrays)


def _put_items(array: Any) -> Callable[[list[Any]], None]:
    def put(then: list[Any]) -> None:
        for place, item in zip(np.ndindex(array.shape), then, strict=True):
            array[place] = item

    return put


def _same_arrays(one: Any, two: Any) -> bool:
    return bool(np.array_equal(one, two, equal_nan=one.dtype.kind in "fc"))


def _set(name: str, value: Any) -> Seen:
    return Seen(name, lambda: set(value), set(value), lambda then: _refill(value, then), operator.eq)


def _torch_generator(name: str, value: Any) -> Seen:
    return Seen(name, value.get_state, value.get_state(), value.set_state, torch.equal)


def _python_generator(name: str, value: Any) -> Seen:
    return Seen(name, value.getstate, value.getstate(), value.setstate, operator.eq)


def _old_numpy_generator(name: str, value: Any) -> Seen:
    return Seen(name, value.get_state, value.get_state(), value.set_state, lambda one, two: repr(one) == repr(two))


def _numpy_generator(name: str, value: Any) -> Seen:
    bits = value.bit_generator
    put = functools.partial(setattr, bits, "state")
    return Seen(name, lambda: bits.state, bits.state, put, lambda one, two: repr(one) == repr(two))


def _tensor(name: str, value: Any) -> Seen:
    dense = value.layout is torch.strided
    copy = value.detach().to("cpu", copy=True) if not dense or value.nbytes <= _MOST_BYTES else None

    def same(one: Values, two: Values) -> bool:
        # By value as well: writes through `.data` do not increase the version.
        return one.version == two.version and (copy is None or not dense or same_bits(value.detach().cpu(), copy))

    then = Values(value, value._version, copy)
    return Seen(name, lambda: Values(value, value._version, None), then, lambda then: _write(value, then.copy), same)


def _refill(value: Any, then: Any) -> None:
    """Replace a container's items, without running code of its class."""
    kind: Any = next(kind for kind in (list, deque, set, OrderedDict, dict) if isinstance(value, kind))
    kind.clear(value)
    if kind is set:
        set.update(value, then)
    elif kind in (list, deque):
        kind.extend(value, then)
    else:
        for key, item in then:
            kind.__setitem__(value, key, item)


def _write(value: torch.Tensor, then: torch.Tensor | None) -> None:
    if then is not None:
        # Through .data, which autograd ignores: the run's own graph needs exactly these values.
        value.data.copy_(then)


def same(one: Any, two: Any) -> bool:
    """Return whether two values are the same object, or equal numbers or texts."""
    return one is two or (type(one) is type(two) and isinstance(one, PLAIN) and one == two)


def _same_items(one: list[Any], two: list[Any]) -> bool:
    return len(one) == len(two) and all(map(same, one, two))


def _same_pairs(one: list[tuple[Any, Any]], two: list[tuple[Any, Any]]) -> bool:
    return len(one) == len(two) and all(
        same(key, other) and same(value, item) for (key, value), (other, item) in zip(one, two, strict=True)
    )


GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_KINDS: tuple[tuple[Any, Callable[[str, Any], Seen]], ...] = (
    ((list, deque), _sequence),
    (dict, mapping_seen),
    (set, _set),
    (bytearray, _bytes),
    (CellType, cell_seen),
    (torch.Generator, _torch_generator),
    (random.Random, _python_generator),
    (np.random.Generator, _numpy_generator),
    (np.random.RandomState, _old_numpy_generator),
    (np.ndarray, _array),
    (torch.Tensor, _tensor),
)
