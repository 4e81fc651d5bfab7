"""A callable that replaces a module's forward, and shows the original forward to code that inspects it."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable
from typing import Any

from torch import nn


class StandIn:
    """Callable that shadows a module's forward as an instance attribute; attributes that it lacks are the forward's.

    Attributes:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # A forward that other code set on the instance is called, and restored at the end.
        self._shadowed: Callable[..., Any] | None = module.__dict__.get("forward")
        self._of_class: Any = type(module).forward
        self._own: Callable[..., Any] = module.forward

    @property
    def original(self) -> Callable[..., Any]:
        """Return the module's own forward, even after its class or its class's forward was replaced."""
        kind = type(self.module)
        if self._shadowed is None and kind.forward is not self._of_class:
            self._of_class, found = kind.forward, inspect.getattr_static(kind, "forward")
            self._own = found.__get__(self.module, kind) if hasattr(found, "__get__") else found
        return self._own

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the original forward, whose signature ``inspect`` then shows."""
        return self.original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def _restore(self) -> None:
        """Restore the module's former forward, if this one is still in place."""
        if self.module.__dict__.get("forward") is not self:
            # Other code set another forward on the instance, which may call this one.
            return
        if self._shadowed is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self._shadowed

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the copied module's plain forward: copies of a model are not controlled."""
        if self._shadowed is not None:
            return copy.deepcopy(self._shadowed, memo)
        copied = memo.get(id(self.module))
        return self.original if copied is None else type(copied).forward.__get__(copied)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the module's plain bound forward, which loads without this package."""
        if self._shadowed is not None:
            return operator.getitem, ([self._shadowed], 0)
        return getattr, (self.module, "forward")
