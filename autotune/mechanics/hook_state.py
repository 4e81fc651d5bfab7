"""What hooks on parts of a unit keep between calls, which a recomputation must not change a second time.

A probe finds hooks that change something from the first step on. Others begin later: statistics after a warm-up, a log
every hundred steps.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from autotune.mechanics.buffers import version_of
from autotune.mechanics.copies import attributes_of
from autotune.mechanics.seen_state import object_seen, snapshot_of

_CONTAINERS = (list, dict, set, deque, tuple)
# The most objects that are looked at, and the most items of one that are.
_MOST_OBJECTS, _MOST_ITEMS = 256, 4096
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "autotune"})


class HookState:
    """What the hooks of a call keep, apart from modules.

    Args:
        roots: what the hooks refer to.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self._roots = roots
        self._versions = {id(one): version_of(one) for one in self._tensors()}
        self._written: list[torch.Tensor] = []

    def has_run(self) -> None:
        """Note which tensors the first run has written to; a recomputation writes to the same."""
        self._written = [one for one in self._tensors() if version_of(one) != self._versions.get(id(one), 0)]

    def _tensors(self) -> list[torch.Tensor]:
        return [one for one in _reached(self._roots) if isinstance(one, torch.Tensor)]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Run the body, and undo what it changes."""
        values = [one for one in _reached(self._roots) if not isinstance(one, torch.Tensor | tuple)]
        seen = [snapshot_of("", one) or object_seen("", one) for one in [*values, *self._written]]
        try:
            yield
        finally:
            for one in seen:
                if not one.is_same():
                    one.put(one.then)


def state_of_hooks(parts: Sequence[nn.Module]) -> HookState | None:
    """Return what the forward hooks on modules keep; ``None`` if there are no hooks of the user's own.

    Args:
        parts: the modules.
    """
    hooks = [
        hook for part in parts for kind in (part._forward_pre_hooks, part._forward_hooks) for hook in kind.values()
    ]
    roots = [root for hook in hooks for root in _roots_of(hook)]
    return HookState(roots) if roots else None


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


def _reached(roots: Sequence[Any]) -> list[Any]:
    """Return the containers, tensors and objects of the user's own classes that roots lead to, without modules."""
    waiting, found = list(roots), dict[int, Any]()
    while waiting and len(found) < _MOST_OBJECTS:
        one = waiting.pop()
        if id(one) in found:
            continue
        if isinstance(one, torch.Tensor):
            if not isinstance(one, nn.Parameter):
                found[id(one)] = one
        elif isinstance(one, _CONTAINERS):
            if len(one) <= _MOST_ITEMS:
                found[id(one)] = one
                waiting += one.values() if isinstance(one, dict) else one
        elif not isinstance(one, nn.Module | type | FunctionType | MethodType) and not _is_librarys(
            type(one).__module__
        ):
            found[id(one)] = one
            waiting += attributes_of(one).values()
    return list(found.values())


def _is_librarys(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
