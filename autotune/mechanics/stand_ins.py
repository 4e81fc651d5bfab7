"""A callable in the place of a module's forward, which shows code that inspects it the forward that it stands for."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable
from typing import Any

from torch import nn


class StandIn:
    """Shadows the forward of a module by an instance attribute; what it lacks as attributes, the forward has.

    Attributes:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # A forward that somebody else put on the instance is called, and put back at the end.
        self._shadowed: Callable[..., Any] | None = module.__dict__.get("forward")
        self._of_class: Any = type(module).forward
        self._own: Callable[..., Any] = module.forward

    @property
    def original(self) -> Callable[..., Any]:
        """Return the forward that the module would have; its class may get another one, or the module another class."""
        kind = type(self.module)
        if self._shadowed is None and kind.forward is not self._of_class:
            self._of_class, found = kind.forward, inspect.getattr_static(kind, "forward")
            self._own = found.__get__(self.module, kind) if hasattr(found, "__get__") else found
        return self._own

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the forward whose signature this has."""
        return self.original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def _restore(self) -> None:
        """Give the module its former forward back, if it still has this one."""
        if self.module.__dict__.get("forward") is not self:
            # Somebody put another one on the instance, which may call this one.
            return
        if self._shadowed is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self._shadowed

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the copied module's plain forward: a copy of a model is not under control."""
        if self._shadowed is not None:
            return copy.deepcopy(self._shadowed, memo)
        copied = memo.get(id(self.module))
        return self.original if copied is None else type(copied).forward.__get__(copied)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the module's plain bound forward, so that no package of ours is needed to load it."""
        if self._shadowed is not None:
            return operator.getitem, ([self._shadowed], 0)
        return getattr, (self.module, "forward")
