"""Walk over trees of tensors: tuples, lists, dicts, and mappings of other types, as tokenizers return them."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return a tree's tensors, in order."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, MutableMapping):
            found += tensors(list(leaf.values()))
    return found


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return the tree with each tensor replaced; mappings keep their types, other leaves pass as they are."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if isinstance(leaf, MutableMapping):
            mapped = copy.copy(leaf)
            for key, value in leaf.items():
                mapped[key] = map_tensors(change, value)
            return mapped
        return leaf

    return tree_map(visit, tree)
