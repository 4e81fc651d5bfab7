"""Walk over trees of tensors: tuples, lists, dicts, other mappings (as tokenizers return), dataclasses, objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

_LIBRARIES = ("builtins", "enum", "types")


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return a tree's tensors, in order."""
    # Most batches are one of these two, and the general walk takes ten times as long.
    if type(tree) is torch.Tensor:
        return [tree]
    if type(tree) in (tuple, list) and all(type(leaf) is torch.Tensor for leaf in tree):
        return list(tree)
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif parts := _parts(leaf):
            found += tensors(list(parts.values()))
    return found


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return a copy of a tree with each tensor replaced; mappings keep their types, other leaves are unchanged."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        parts = _parts(leaf)
        if not parts:
            return leaf
        mapped = copy.copy(leaf)
        for key, value in parts.items():
            changed = map_tensors(change, value)
            if isinstance(leaf, MutableMapping):
                mapped[key] = changed
            else:
                # This also works on frozen dataclasses.
                object.__setattr__(mapped, key, changed)
        return mapped

    return tree_map(visit, tree)


def _parts(leaf: Any) -> Mapping[str, Any]:
    """Return a leaf's parts by name: entries of a mapping, fields of a dataclass, or tensor attributes of an object."""
    if isinstance(leaf, MutableMapping):
        return leaf
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    if isinstance(leaf, torch.nn.Module | type) or callable(leaf) or type(leaf).__module__ in _LIBRARIES:
        return {}
    # Code of the object's own may answer to a name that it does not have.
    found = getattr(leaf, "__dict__", {}) if type(leaf).__dictoffset__ else {}
    # An object's other attributes may lead anywhere.
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
