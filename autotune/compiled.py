"""Compile a module's forward in place, so that copies of the module are whole and can be pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class CompiledForward:
    """Stand in a module's ``forward`` and run it compiled.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._run: Callable[..., Any] = torch.compile(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, compiled for what it is handed."""
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the copied module's own forward, compiled anew."""
        copied = memo.get(id(self._module))
        return self if copied is None else CompiledForward(copied)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the module's plain forward, so that no package of ours is needed to load it."""
        return getattr, (self._module, "forward")
