"""A callable that replaces a module's forward, and shows the original forward to code that inspects it."""

from __future__ import annotations

import copy
import inspect
import operator
import sys
from collections.abc import Callable
from types import CodeType
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

    def place(self) -> None:
        """Shadow the module's forward; copies, pickles and scripts of the module are made without this one."""
        attributes = self.module.__dict__
        attributes["forward"] = self
        attributes.setdefault("__getstate__", _plain_state_of(self.module))
        attributes.setdefault("__prepare_scriptable__", _plain_itself(self.module))

    @property
    def original(self) -> Callable[..., Any]:
        """Return the module's own forward, even after its class or its class's forward was replaced."""
        kind = type(self.module)
        if self._shadowed is None and kind.forward is not self._of_class:
            self._of_class, found = kind.forward, inspect.getattr_static(kind, "forward")
            self._own = found.__get__(self.module, kind) if hasattr(found, "__get__") else found
        return self._own

    def _of_other(self) -> Callable[..., Any] | None:
        """Return the plain forward of the module that is called, if that is another one; called by ``__call__`` alone.

        Libraries of meta-learning copy a module by its ``__dict__``, and with it the attribute that is this object.
        """
        frame = sys._getframe(2)
        called = frame.f_locals.get("self", self.module) if frame.f_code in _CALLS else self.module
        if called is self.module:
            return None
        shadowed: Any = self._shadowed
        while isinstance(shadowed, StandIn):
            shadowed = shadowed._shadowed
        plain: Callable[..., Any] = shadowed or type(called).forward.__get__(called)
        return plain

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the original forward, whose signature ``inspect`` then shows."""
        return self.original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def _restore(self) -> None:
        """Restore the module's former forward, if this one is still in place."""
        attributes = self.module.__dict__
        # Other code may have set another forward on the instance, which may call this one.
        is_in_place = attributes.get("forward") is self
        if not isinstance(self._shadowed if is_in_place else attributes.get("forward"), StandIn):
            # These go first: after an interrupt, a second attempt finds the module by the forward that is still here.
            for name in [name for name in _BESIDE if _is_ours(attributes.get(name))]:
                attributes.pop(name, None)
        if is_in_place and self._shadowed is None:
            del attributes["forward"]
        elif is_in_place:
            attributes["forward"] = self._shadowed

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


# The code in which torch calls a module's forward.
_CALLS = {nn.Module._call_impl.__code__}
_CALLS |= {one for one in nn.Module._call_impl.__code__.co_consts if isinstance(one, CodeType)}
_BESIDE = ("__getstate__", "__prepare_scriptable__")


def _is_ours(value: Any) -> bool:
    return getattr(value, "__module__", None) == __name__


def _plain_state_of(module: nn.Module) -> Callable[[], Any]:
    """Return a function that ``copy`` and ``pickle`` call for a module's state: the state without stand-ins."""

    def state() -> Any:
        found: Any = type(module).__getstate__(module)
        if not isinstance(found, dict):
            return found
        plain = {name: value for name, value in found.items() if name not in _BESIDE or not _is_ours(value)}
        while isinstance(plain.get("forward"), StandIn):
            shadowed = plain.pop("forward")._shadowed
            if shadowed is not None:
                plain["forward"] = shadowed
        return plain

    return state


def _plain_itself(module: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that ``torch.jit.script`` calls first: it restores the module's own forward, and returns it."""

    def itself() -> nn.Module:
        while isinstance(found := module.__dict__.get("forward"), StandIn):
            found._restore()
        prepare: Any = getattr(module, "__prepare_scriptable__", None)
        return module if prepare is None else prepare()

    return itself
