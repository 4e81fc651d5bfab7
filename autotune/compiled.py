"""Compile a module's forward in place, so that the module can still be copied and pickled; tell compiled modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class CompiledForward:
    """A module's compiled ``forward``.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._run: Callable[..., Any] = torch.compile(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, compiled for the given arguments."""
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the compiled forward of the copied module, or this one if the module was not copied."""
        copied = memo.get(id(self._module))
        return self if copied is None else CompiledForward(copied)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the module's plain forward, so that loading does not need this package."""
        return getattr, (self._module, "forward")


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called: its calls then run code that was compiled from its forward."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of a module run compiled code, after ``torch.compile(module)`` or ``module.compile()``."""
    return type(module).__name__ == "OptimizedModule" or is_compiled_in_place(module)
