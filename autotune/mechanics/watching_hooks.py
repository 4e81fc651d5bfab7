"""Hooks that only observe: they are removed where hooks are forbidden, and do nothing in copies of a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import _StopRecomputationError

from autotune.mechanics.ambient import recorded
from autotune.mechanics.buffers import version_of

Pack = Callable[[torch.Tensor], torch.Tensor]
_WRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: [{} {}] is at "
    "version {}; expected version {} instead."
)

# Those who observe what units with hooks of their own for saved tensors keep.
_observers: list[Callable[[Iterable[torch.Tensor]], None]] = []

# A pickled hook becomes this function of the standard library, which takes any arguments and does nothing.
_INERT = nullcontext().__exit__


class WatchingHook:
    """A hook on a module that is not copied or pickled with the module.

    Args:
        watch: function that the hook calls.
        watched: the module; calls of others, which may share its dictionary of hooks, are ignored.
        copies: list to which references to copies of the module are added, for :func:`clear_copies`; ``None`` leaves
            a function that does nothing in the copies.
    """

    def __init__(self, watch: Callable[..., None], watched: nn.Module, copies: list[Any] | None = None) -> None:
        self._watch = watch
        self._module = watched
        self._copies = copies

    def __call__(self, *args: Any) -> None:
        """Call the function, unless torch records a program, which must be the user's own."""
        if torch.compiler.is_compiling():
            return
        if args[0] is self._module and not recorded():
            self._watch(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Return a function that does nothing."""
        copied = memo.get(id(self._module))
        if copied is not None and self._copies is not None:
            self._copies.append(weakref.ref(copied))
        return _INERT

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a function that does nothing, which loads without this package."""
        return getattr, (nullcontext(), "__exit__")


def clear_copies(copies: list[Any]) -> None:
    """Remove from copied modules the functions that replaced the hooks.

    Args:
        copies: references to the modules; the list is emptied.
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
    """Observe the tensors that autograd saves for backward while the body runs, unless the body forbids hooks.

    ``torch.func`` and ``disable_saved_tensors_hooks()`` raise if hooks are set, so the hooks are removed before.
    Autograd leaves it to hooks to check that nobody writes to a saved tensor, so that is checked here.

    Whoever ends a context of hooks removes the latest ones, whatever they are. So nothing is observed within hooks of
    the caller, which may end before the body does; and hooks that the caller has set within the body are left to it.

    Args:
        pack: function that receives each tensor and returns the one to save.
        gave_way: function that is called if nothing is observed, or nothing more.
    """
    autograd: Any = torch._C._autograd
    disable = autograd._saved_tensors_hooks_disable

    def packed(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        kept = pack(tensor)
        return kept, version_of(kept)

    def ours_on_top() -> bool:
        top = autograd._top_saved_tensors_default_hooks(True)
        return top is not None and top[0] is packed

    def give_way(*args: Any, **kwargs: Any) -> None:
        if ours_on_top():
            autograd._pop_saved_tensors_default_hooks()
            gave_way()
        disable(*args, **kwargs)

    def remove() -> None:
        later = []
        while (top := autograd._top_saved_tensors_default_hooks(True)) is not None and not ours_on_top():
            later.append(top)
            autograd._pop_saved_tensors_default_hooks()
        if top is not None:
            autograd._pop_saved_tensors_default_hooks()
        for pair in reversed(later):
            autograd._push_saved_tensors_default_hooks(*pair)

    if autograd._top_saved_tensors_default_hooks(True) is not None or not autograd._saved_tensors_hooks_is_enabled():
        gave_way()
        yield
        return
    autograd._push_saved_tensors_default_hooks(packed, _unpacked)
    autograd._saved_tensors_hooks_disable = give_way
    try:
        yield
    finally:
        autograd._saved_tensors_hooks_disable = disable
        remove()


@contextmanager
def seeing_saved(see: Pack, at_end: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Pass each tensor that autograd saves while the body runs to a function, and then to the active hooks, if any.

    Args:
        see: function that receives the tensor and returns the one for the hooks.
        at_end: function that is called when the hooks, which are a checkpoint's, raise to end its recomputation.
    """
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(False)
    if top is None:
        yield
        return
    pack, unpack = top
    has_ended = False

    def packed(tensor: torch.Tensor) -> Any:
        nonlocal has_ended
        if has_ended:
            # The body has caught the exception and goes on, though a checkpoint refuses to save anything more.
            return tensor.detach()
        try:
            return pack(see(tensor))
        except _StopRecomputationError:
            has_ended = True
            at_end()
            raise

    with saved_tensors_hooks(packed, unpack):
        yield


@contextmanager
def reporting_writes() -> Iterator[None]:
    """Run the body with autograd's check that nobody writes to saved tensors, which the active hooks do not keep.

    The backward pass raises as it does without hooks.
    """
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(False)
    if top is None:
        yield
        return
    pack, unpack = top

    def packed(tensor: torch.Tensor) -> tuple[Any, torch.Tensor | None, int]:
        own = tensor.detach() if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_inference() else None
        if own is not None:
            # It keeps the count of writes to the tensor, but not the tensor's memory. A CSR tensor has two dimensions.
            own.data = own.new_empty([0] * max(own.dim(), 1))
        return pack(tensor), own, version_of(tensor)

    def unpacked(kept: tuple[Any, torch.Tensor | None, int]) -> Any:
        inner, own, version = kept
        if own is not None:
            _unpacked((own, version))
        return unpack(inner)

    with saved_tensors_hooks(packed, unpacked):
        yield


@contextmanager
def observing_kept(observe: Callable[[Iterable[torch.Tensor]], None]) -> Iterator[None]:
    """Observe the tensors that units keep as they are by other means than autograd, while the body runs.

    Args:
        observe: function that receives the tensors, within the unit's forward pass.
    """
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)


def keeps(kept: Iterable[torch.Tensor]) -> None:
    """Tell observers which tensors the running unit keeps as they are until its backward pass.

    Args:
        kept: the tensors; not read if nobody observes.
    """
    told = list(kept) if _observers else []
    for observe in _observers:
        observe(told)


def _unpacked(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = saved
    if version_of(tensor) != version:
        shape = list(tensor.shape)
        raise RuntimeError(_WRITTEN.format(tensor.type(), shape, version_of(tensor), version))  # as autograd does
    return tensor
