"""Probe, on the run's own first batch, which units may be recomputed: and lock, with the reason, what may not.

A unit is probed where it is called: its forward and backward passes run twice on copies of its inputs, once saving and
once recomputing, and every gradient, buffer and generator must come out the same to the last bit. Nothing of it stays.

Where the device itself does not repeat to the last bit (flash attention's backward pass adds in any order, as do sums
by atomics), two passes that both save say by how much; recomputing may then differ as they do, and not more.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from autotune.mechanics import devices, randomness
from autotune.mechanics.activations import Recomputation, foreign_argument, without_empty_cache
from autotune.mechanics.buffers import copy_buffers, write_buffers
from autotune.mechanics.controls import ControlledForward
from autotune.mechanics.devices import is_out_of_memory

# Relative differences, by 2-norms, up to which two passes over one input differ by rounding alone: so many units in the
# last place (sums that cancel lose as many), and never what dropout does (a rate of 0.1 differs by 0.4).
_ROUNDING_ULPS, _ROUNDING_FRAC = 32.0, 0.2
# So many passes are a sample of what passes differ by, which may be so many times as much.
_REPEATS, _PASSES_LIKE_THEM = 3, 4.0


class UnitProbe:
    """Stand in a unit's forward for one call, and find out whether its activations may be recomputed.

    Attributes:
        reason: why they may not; ``None`` if they may, or while no call was seen.
        calls: calls that were probed.
        autocast: the dtype of the user's own autocast round the call; ``None`` for none.

    Args:
        module: the unit.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.reason: str | None = structural_lock(module)
        self.calls = 0
        self.autocast: torch.dtype | None = None
        self._inner: Callable[..., Any] = module.forward
        self._shadowed: Callable[..., Any] | None = module.__dict__.get("forward")
        module.__dict__["forward"] = self

    def remove(self) -> None:
        """Give the unit its forward back."""
        if self._shadowed is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self._shadowed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Probe the first call in training, then run it as if nothing had been."""
        if self.calls == 0 and torch.is_grad_enabled() and self.module.training:
            self.calls = 1
            device = _device_type(args, kwargs)
            self.autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            if self.reason is None:
                with self._uncontrolled():
                    self.reason = storage_lock(self.module, self._inner, args, kwargs)
        if self.reason is None:
            return self._inner(*args, **kwargs)
        # The plan of the step was made before anybody knew.
        with self._uncontrolled():
            return self._inner(*args, **kwargs)

    @contextmanager
    def _uncontrolled(self) -> Iterator[None]:
        """Run the body with the unit's own forward, whatever plan it is under."""
        controlled = self._inner if isinstance(self._inner, ControlledForward) else None
        if controlled is not None:
            controlled.suspended = True
        try:
            yield
        finally:
            if controlled is not None:
                controlled.suspended = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the copied module's plain forward."""
        copied = memo.get(id(self.module))
        return self._inner if copied is None else type(copied).forward.__get__(copied)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the module's plain bound forward."""
        return getattr, (self.module, "forward")


def structural_lock(module: nn.Module) -> str | None:
    """Return why a unit cannot be recomputed whatever a probe says; ``None`` if nothing is in the way."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "it is compiled in place; compile it as `block = torch.compile(block)` instead"
    for name, part in module.named_modules():
        hooked = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        if any(hooked):
            inside = f"its part {name!r}" if name else "it"
            return f"{inside} has hooks of its own, which recomputation would call twice"
    return None


def storage_lock(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    """Return why a unit's activations may not be recomputed; ``None`` if they may.

    Args:
        module: the unit.
        forward: its forward.
        args: what it was called with.
        kwargs: the same, by keyword.
    """
    foreign = foreign_argument(module, args, kwargs)
    if foreign is not None:
        return f"it is handed a {foreign}, which it may change: recomputed, it would change it twice"
    # The passes below must leave the run's own cache as it is.
    kwargs = without_empty_cache(module, kwargs)
    before = randomness.capture()
    buffers = copy_buffers(module)
    recomputation = Recomputation(module)

    def plainly() -> _Outcome:
        return _passes(module, lambda a, k: forward(*a, **k), args, kwargs)

    def again() -> _Outcome:
        return _passes(module, lambda a, k: recomputation.run(forward, a, k), args, kwargs)

    def undo() -> None:
        randomness.restore(before)
        write_buffers(module, buffers)

    try:
        saved = plainly()
        if saved.python_drawn:
            return "it draws from python's or numpy's generator, which recomputation does not repeat"
        undo()
        recomputed = again()
        if saved.same(recomputed):
            return None
        repeated = []
        for _ in range(_REPEATS):
            undo()
            repeated.append(plainly())
        return _judged(saved, recomputed, repeated)
    except Exception as error:  # noqa: BLE001 - whatever it is, the unit is left alone
        return "ran out of memory while probed" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
    finally:
        undo()


def _judged(saved: _Outcome, recomputed: _Outcome, repeated: Sequence[_Outcome]) -> str | None:
    """Return what speaks against a recomputed pass that differs from a saved one; ``None`` if saved ones do as well."""
    if all(saved.same(other) for other in repeated):
        return "recomputed, its gradients, buffers or generators differ"
    apart = max(saved.apart(other) for other in repeated)
    if apart > 1:
        return "two passes over one input differ: it has a randomness of its own"
    if saved.apart(recomputed) > min(_PASSES_LIKE_THEM * apart, 1.0):
        return "recomputed, its gradients differ by more than two passes that save"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """Hold what a forward and backward pass came to."""

    tensors: Sequence[torch.Tensor | None]
    generators: Sequence[torch.Tensor]
    python_drawn: bool

    def same(self, other: _Outcome) -> bool:
        return self._drew_like(other) and all(
            _equal(one, two) for one, two in zip(self.tensors, other.tensors, strict=True)
        )

    def apart(self, other: _Outcome) -> float:
        """Return the largest difference of two tensors over what rounding explains; above 1 it is something else."""
        if not self._drew_like(other):
            return math.inf
        return max((_apart(one, two) for one, two in zip(self.tensors, other.tensors, strict=True)), default=0.0)

    def _drew_like(self, other: _Outcome) -> bool:
        return all(torch.equal(one, two) for one, two in zip(self.generators, other.generators, strict=True))


def _passes(
    module: nn.Module,
    run: Callable[[tuple[Any, ...], Mapping[str, Any]], Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> _Outcome:
    inputs: list[torch.Tensor] = []

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        copied = value.detach().clone()
        if value.requires_grad:
            inputs.append(copied.requires_grad_())
        return copied

    own_args, own_kwargs = tree_map(own, args), tree_map(own, dict(kwargs))
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - user code may draw from it
    outputs = [leaf for leaf in tree_flatten(run(own_args, own_kwargs))[0] if isinstance(leaf, torch.Tensor)]
    drawn = states[0] != random.getstate() or not _same_numpy(states[1], np.random.get_state())  # noqa: NPY002
    roots = [leaf for leaf in outputs if leaf.requires_grad]
    wanted = [*inputs, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    gradients: Sequence[torch.Tensor | None] = ()
    if roots and wanted:
        # Anything but constant: a constant hides what a normalisation layer does.
        gradients = torch.autograd.grad(roots, wanted, [_weights(leaf) for leaf in roots], allow_unused=True)
    # On the host: what is compared takes no room that the passes need.
    values = [
        *(None if gradient is None else gradient.cpu() for gradient in gradients),
        *(leaf.detach().cpu() for leaf in outputs),
        *(buffer.detach().cpu().clone() for buffer in module.buffers()),
    ]
    return _Outcome(values, [torch.get_rng_state(), *devices.random_states()], drawn)


def _weights(leaf: torch.Tensor) -> torch.Tensor:
    """Return what an output is weighed with; along its last dimension, where that will do, which takes no room."""
    count = leaf.shape[-1] if leaf.dim() and leaf.shape[-1] > 1 else leaf.numel()
    along = torch.linspace(-1, 1, count, device=leaf.device).to(leaf.dtype)
    return along.expand_as(leaf) if leaf.dim() and leaf.shape[-1] > 1 else along.view_as(leaf)


def _same_numpy(one: Any, two: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def _equal(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    if one is None or two is None:
        return one is two
    return one.dtype == two.dtype and one.shape == two.shape and bool(torch.isclose(one, two, 0, 0, True).all())


def _apart(one: torch.Tensor | None, two: torch.Tensor | None) -> float:
    if _equal(one, two):
        return 0.0
    if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype or not one.is_floating_point():
        return math.inf
    size, gap = (float(torch.linalg.vector_norm(value.double())) for value in (one, one.double() - two.double()))
    # What is not a number is no rounding.
    found = gap / size / min(_ROUNDING_ULPS * torch.finfo(one.dtype).eps, _ROUNDING_FRAC) if size else math.inf
    return found if math.isfinite(found) else math.inf


def _device_type(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    leaves = tree_flatten((args, dict(kwargs)))[0]
    return next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
