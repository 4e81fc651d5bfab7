"""Hooks for whoever only watches: they give way to what forbids them, and leave nothing in copies of a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

Pack = Callable[[torch.Tensor], torch.Tensor]

# Takes whatever a hook takes, does nothing, and belongs to the standard library: what a pickled hook becomes.
_INERT = nullcontext().__exit__


class WatchingHook:
    """A hook on a module that is never copied or pickled with the module.

    Args:
        watch: Is called as the hook.
        watched: The module.
        copies: Takes in the copies that are made of the module, for :func:`clear_copies`; ``None`` leaves what does
            nothing in them.
    """

    def __init__(
        self, watch: Callable[..., None], watched: nn.Module | None = None, copies: list[Any] | None = None
    ) -> None:
        self._watch = watch
        self._module = watched
        self._copies = copies

    def __call__(self, *args: Any) -> None:
        """Watch."""
        self._watch(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Return what does nothing."""
        copied = memo.get(id(self._module))
        if copied is not None and self._copies is not None:
            self._copies.append(weakref.ref(copied))
        return _INERT

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as what does nothing, for which no package of ours is needed."""
        return getattr, (nullcontext(), "__exit__")


def clear_copies(copies: list[Any]) -> None:
    """Take off copied modules what became of the hooks in them.

    Args:
        copies: References to the modules.
    """
    for module in (reference() for reference in copies):
        if module is None:
            continue
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = getattr(module, kind)
            for key in [key for key, hook in hooks.items() if hook == _INERT]:
                del hooks[key]
                getattr(module, f"{kind}_with_kwargs").pop(key, None)
    copies.clear()


@contextmanager
def yielding_saved_hooks(pack: Pack, gave_way: Callable[[], None]) -> Iterator[None]:
    """Show what autograd saves for backward while the body runs, unless the body forbids to look.

    ``torch.func`` and ``disable_saved_tensors_hooks()`` refuse to begin under anybody's hooks, so these are taken off.

    Args:
        pack: Is handed each tensor, and returns what is saved in its place.
        gave_way: Is called when the hooks are taken off.
    """
    autograd: Any = torch._C._autograd
    hooks = (pack, _unpacked)
    disable = autograd._saved_tensors_hooks_disable

    def ours_on_top() -> bool:
        top = autograd._top_saved_tensors_default_hooks(True)
        return top is not None and top[0] is pack

    def give_way(*args: Any, **kwargs: Any) -> None:
        if ours_on_top():
            autograd._pop_saved_tensors_default_hooks()
            gave_way()
        disable(*args, **kwargs)

    autograd._push_saved_tensors_default_hooks(*hooks)
    autograd._saved_tensors_hooks_disable = give_way
    try:
        yield
    finally:
        autograd._saved_tensors_hooks_disable = disable
        if ours_on_top():
            autograd._pop_saved_tensors_default_hooks()


def _unpacked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
