"""Keep those arguments of a unit that its recomputation needs, without keeping other units' activations alive.

A cache that all blocks share contains tensors that each of them computed: a plain copy would keep all their activations
alive. Only the values of such tensors are kept, and only of those that the unit used.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from autotune.mechanics.buffers import version_of
from autotune.mechanics.copies import Copier, CopyError, TensorCopy, copied, has_scalars_only, items_of, own_dict

_HARMLESS = {"__get__", "size", "numel", "nelement", "element_size", "untyped_storage", "data_ptr"}
# Keys that are values.
_KEYS = (str, bytes, int, float, tuple, type(None), Enum, torch.dtype, torch.device)
# Containers in which functions of torch are given tensors.
_NESTS = (list, tuple, dict)
# Containers that a call may change, and how many of their items are copied at each call.
_MUTABLE = (list, dict, set, deque)
_MOST_ITEMS, _MOST_SCALARS = 256, 4096
# The largest array that is copied at each call, and the most objects within others that are restored.
_MOST_ARRAY_BYTES, _MOST_OBJECTS = 2**16, 64
_WEAK = (weakref.ReferenceType, *weakref.ProxyTypes)
_COMMON = frozenset({type(None), bool, int, float, str, list, dict, set, OrderedDict, torch.Tensor, *_WEAK})
# The attributes that every module has.
OF_MODULES = frozenset(vars(nn.Module()))
_LIBRARIES = ("builtins", "torch", "numpy", "autotune", "collections", "functools", "weakref", "_thread", "threading")


class Kept:
    """A call's arguments, with copies until it is known whether they are written to before backward.

    Args:
        leaves: the leaves of the arguments; tensors within objects are included.
        copies: whether copies of the tensors are kept.

    Raises:
        CopyError: for an object whose contents cannot be read.
    """

    def __init__(self, leaves: Sequence[Any], *, copies: bool = True) -> None:
        self._leaves = leaves
        self._tensors = _tensors_within(leaves)
        self._versions = [version_of(tensor) for tensor in self._tensors]
        # On the host: the step may need all of the device's memory.
        self._copies = {id(one): one.detach().to("cpu", copy=True) for one in self._tensors} if copies else {}

    @property
    def written(self) -> bool:
        """Return whether the tensors have been written to since."""
        return self._versions != [version_of(tensor) for tensor in self._tensors]

    def settle(self) -> None:
        """Drop the copies if the tensors have not been written to."""
        if not self.written:
            self._copies = {}

    def drop(self, unused: TensorCopy) -> None:
        """Replace the tensors, and drop those whose replacement is :class:`Absent`.

        Args:
            unused: function that returns the replacement for a tensor.
        """
        self._leaves = ()
        kept = ((tensor, unused(tensor)) for tensor in self._tensors)
        self._tensors = [left for _, left in kept if not isinstance(left, Absent)]
        self._versions = [version_of(tensor) for tensor in self._tensors]

    def leaves(self) -> list[Any]:
        """Return the leaves, with tensors in their original state."""
        return [self.then(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]

    def then(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in its original state."""
        made = self._copies.get(id(tensor))
        return tensor if made is None or not self.written else _back(made, tensor)


def flattened(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of a call's arguments, and how they are nested.

    A tuple with attributes is a leaf, and so is a dictionary with objects as keys, which are copied with their values.
    """
    return tree_flatten((tuple(args), dict(kwargs)), is_leaf=_is_leaf)


def _is_leaf(one: Any) -> bool:
    if isinstance(one, tuple):
        return bool(own_dict(one))
    return isinstance(one, dict) and any(not isinstance(key, _KEYS) for key in one)


def _tensors_within(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among leaves and within them."""
    found: list[torch.Tensor] = []

    def met(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, Absent):
            found.append(tensor)
        return tensor

    copied(list(leaves), met)
    return found


def _back(copy: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return copy.detach().to(like.device).requires_grad_(like.requires_grad)


class Reads(TorchFunctionMode):
    """Mode that records which tensors within objects are used while it is active, among those that require a gradient.

    Attributes:
        met_all: all tensors within objects, without parameters.
        tensors: those that require a gradient, by id.
        used: ids of those that were used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met_all: list[torch.Tensor] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self.used: set[int] = set()

    def met(self, tensor: torch.Tensor) -> torch.Tensor:
        """Register a tensor of an object, and return it."""
        if not isinstance(tensor, Absent | nn.Parameter):
            self.met_all.append(tensor)
            if tensor.requires_grad:
                self.tensors[id(tensor)] = tensor
        return tensor

    def left(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what to keep of a tensor: its values if it was used, otherwise an :class:`Absent` one."""
        if id(tensor) not in self.tensors:
            return tensor
        return without_graph(tensor) if id(tensor) in self.used else torch.Tensor._make_subclass(Absent, torch.empty(0))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for one in (*args, *kwargs.values()):
            if id(one) in self.tensors:
                self.used.add(id(one))
            elif isinstance(one, _NESTS):
                self.used.update(id(leaf) for leaf in tree_leaves(one) if id(leaf) in self.tensors)
        return function(*args, **kwargs)


class Absent(torch.Tensor):
    """Placeholder for a tensor that a unit did not use, and that would keep other units' activations alive.

    Its attributes and size can be read, since some code inspects all tensors of a process.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise RuntimeError("a recomputed unit uses a tensor of another one, which its forward pass did not")


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf that shares a tensor's storage and version counter, but keeps no graph alive."""
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()


@dataclass(frozen=True, slots=True)
class Objects:
    """A unit's non-tensor arguments, and its attributes that a pass may change.

    Attributes:
        handed: the arguments, by place among the leaves.
        attributes: the attributes, by place of their part and by name.
    """

    handed: Mapping[int, Any]
    attributes: Mapping[int, Mapping[str, Any]]

    def copied(self, tensor: TensorCopy, known: Mapping[int, Any] | None = None) -> Objects:
        """Return copies of all objects, which refer to each other as the originals do.

        Args:
            tensor: function that returns the copy of a tensor.
            known: objects to use instead of copies of arguments, by place.

        Raises:
            CopyError: naming a type that cannot be copied, or an attribute that is too large to copy at each call.
        """
        if not self.handed and not self.attributes:
            return self
        copier = Copier(tensor)
        for place, value in (known or {}).items():
            copier.know(self.handed[place], value)
        handed = {place: copier.copy(value) for place, value in self.handed.items()}
        return Objects(
            handed,
            {
                place: {name: copier.copy(_few(value)) for name, value in attributes.items()}
                for place, attributes in self.attributes.items()
            },
        )


def _few(value: Any) -> Any:
    """Return an attribute; raise if it is too large to copy at each call."""
    if isinstance(value, _MUTABLE) and len(value) > _MOST_ITEMS:
        most = _MOST_SCALARS if has_scalars_only(value) else _MOST_ITEMS
        if len(value) > most:
            raise CopyError(f"{type(value).__name__} of over {most} items")
    return value


def is_carrier(value: Any) -> bool:
    """Return whether a value is a mutable container or a small array, or leads to a tensor that has a graph.

    A value that leads to a module does not count, since it leads to everything in the module.
    """
    carries, waiting = isinstance(value, _MUTABLE), [value]
    if isinstance(value, np.ndarray):
        return value.nbytes <= _MOST_ARRAY_BYTES and not value.dtype.hasobject
    met: set[int] = set()
    while waiting and len(met) <= _MOST_ITEMS:
        one = waiting.pop()
        if type(one) in weakref.ProxyTypes:
            continue
        if isinstance(one, nn.Module):
            return False
        if isinstance(one, torch.Tensor):
            carries = carries or one.grad_fn is not None
        elif id(one) not in met and not isinstance(one, str | bytes | type):
            met.add(id(one))
            waiting += items_of(one) if isinstance(one, list | tuple | set | frozenset | deque) else ()
            waiting += one.values() if isinstance(one, dict) else own_dict(one).values()
    return carries


def own_containers(parts: Sequence[nn.Module]) -> list[Any]:
    """Return the lists, dictionaries and sets that are attributes of modules, apart from those of every module."""
    return [
        value
        for part in parts
        for name, value in part.__dict__.items()
        if isinstance(value, _MUTABLE) and value and name not in OF_MODULES
    ]


def own_values(parts: Sequence[nn.Module]) -> list[Any]:
    """Return the attributes of modules that are neither those of every module nor numbers, texts or plain containers.

    Tuples, which nothing restores as a whole, are included.
    """
    return [
        value
        for part in parts
        for name, value in part.__dict__.items()
        if name not in OF_MODULES and type(value) not in _COMMON
    ]


def objects_of(values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the ``__dict__`` of each object of the user's own classes among values, or among such objects' values.

    Args:
        values: attributes of modules.
    """
    held = {id(one): one for one in values if _is_users_own(one)}
    # An object without a ``__dict__`` gives an empty one.
    inner = (one for holder in [*held.values()] for one in own_dict(holder).values() if _is_users_own(one))
    held.update((id(one), one) for one in itertools.islice(inner, _MOST_OBJECTS))
    return [own_dict(one) for one in held.values()]


def _is_users_own(value: Any) -> bool:
    kind = type(value)
    # Nearly all attributes of modules have one of these types.
    if kind in _COMMON or kind is tuple:
        return False
    return kind.__module__.partition(".")[0] not in _LIBRARIES and not isinstance(value, nn.Module | type)
