"""Probe, on the run's own first batch, which units may be recomputed: and lock, with the reason, what may not.

A unit is probed where it is called: its forward and backward passes run on copies of the unit and of what it is handed,
once saving and once recomputing. Every gradient and output, all that the copies hold afterwards and the generators must
come out the same to the last bit, and nothing outside of the copies may change; nor may what it reads there be another
one by the time of its backward pass. What cannot be copied is not probed, and locked.

Where the device itself does not repeat to the last bit (flash attention's backward pass adds in any order, as do sums
by atomics), two passes that both save say by how much; recomputing may then differ as they do, and not more.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

from autotune.live.reachable import source_of
from autotune.live.signals import any_error
from autotune.live.surroundings import Surroundings
from autotune.mechanics import randomness
from autotune.mechanics.activations import WRITTEN, Kept, Recomputation, hooks_within, is_carrier, undone
from autotune.mechanics.ambient import interception, saving_hook
from autotune.mechanics.controls import ControlledForward
from autotune.mechanics.copies import CopyError, Loans, TensorCopy, copied, dissolve, state_of, twin_of
from autotune.mechanics.devices import is_out_of_memory
from autotune.mechanics.memory_meter import strided

# Relative differences, by 2-norms, up to which two passes over one input differ by rounding alone: so many units in the
# last place (sums that cancel lose as many), and never what dropout does (a rate of 0.1 differs by 0.4).
_ROUNDING_ULPS, _ROUNDING_FRAC = 32.0, 0.2
_DRAWS = "it draws from python's or numpy's generator, which recomputation does not repeat"
# So many passes are a sample of what passes differ by, which may be so many times as much.
_REPEATS, _PASSES_LIKE_THEM = 3, 4.0


class UnitProbe:
    """Stand in a unit's forward for one call, and find out whether its activations may be recomputed.

    Attributes:
        reason: why they may not; ``None`` if they may, or while no call was seen.
        calls: calls that were probed.
        autocast: the dtype of the user's own autocast round the call; ``None`` for none.
        hooks: how many hooks the unit's parts had in that call.
        spent_s: seconds that the probe took of the forward pass.

    Args:
        module: the unit.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.reason: str | None = structural_lock(module)
        self.calls = 0
        self.autocast: torch.dtype | None = None
        self.spent_s = 0.0
        self.hooks = 0
        self._inner: Callable[..., Any] = module.forward
        self._shadowed: Callable[..., Any] | None = module.__dict__.get("forward")
        self._kept: list[Kept] = []
        # Why calls were not probed, and what the unit's code could reach after the one that was.
        self._intercepted: str | None = None
        self._around: Surroundings | None = None
        # What a pass over copies returned, until the call itself has.
        self._copied: list[torch.Tensor] | None = None
        module.__dict__["forward"] = self

    def remove(self) -> None:
        """Give the unit its forward back."""
        if self.calls == 0:
            self.reason = self.reason or self._intercepted
        if isinstance(self._inner, ControlledForward):
            self._inner.recomputation.around = None
        if self._shadowed is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self._shadowed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Probe the first call that may be trained on, then run it as if nothing had been."""
        if torch.compiler.is_compiling():
            return self._inner(*args, **kwargs)
        trains = torch.is_grad_enabled()
        intercepted = interception(self.module) if trains else None
        if intercepted is not None:
            self._intercepted = intercepted
            with self._uncontrolled():
                return self._inner(*args, **kwargs)
        try:
            if self.calls == 0 and trains:
                self.calls = 1
                self._probe(args, kwargs)
            if self.reason is None:
                # What another call of the step finds otherwise would be put back to what the first one found.
                self.reason = self._read_otherwise()
            if self.reason is None:
                self._watch(args, kwargs)
        except any_error() as error:  # whatever it is, the unit is left alone
            self.reason = _told(error)
        if self.reason is not None:
            # The plan of the step was made before anybody knew.
            with self._uncontrolled():
                return self._inner(*args, **kwargs)
        found = self._inner(*args, **kwargs)
        if self._copied is not None:
            self._compare(found, tree_leaves((args, kwargs)))
        if trains and self._around is None:
            self._look_round(tree_leaves((args, kwargs)))
        return found

    def _probe(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Find out whether a call may be recomputed."""
        self.hooks = hooks_within(self.module)
        device = _device_type(self.module, args, kwargs)
        self.autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if self.reason is None and saving_hook() is not None:
            self.reason = "a checkpoint of the loop's own, or hooks on what is saved, decide already what it keeps"
        if self.reason is None:
            began = time.perf_counter()
            with self._uncontrolled():
                # The probe is one of the unit's own attributes, which passes compare: it does not change meanwhile.
                outputs: list[torch.Tensor] = []
                self.reason = storage_lock(self.module, self._inner, args, kwargs, outputs)
                self._copied = outputs
            self.spent_s = time.perf_counter() - began

    def _compare(self, found: Any, handed: Sequence[Any]) -> None:
        """Compare what a call returned with what it returned for copies, which code may tell from the originals."""
        copies, self._copied = self._copied or [], None
        own = [leaf.detach().cpu() for leaf in _tensors_in(found)]
        if len(own) == len(copies) and all(_apart(*pair) <= 1 for pair in zip(own, copies, strict=True)):
            return
        self.reason = self.reason or "it returns something else for copies of what it is handed"
        if isinstance(self._inner, ControlledForward):
            self._inner.recomputation.hand_originals(handed)

    def _watch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look out for writes to what a call is handed."""
        if isinstance(self._inner, ControlledForward):
            self._inner.recomputation.keeps = True
        else:
            self._kept.append(Kept(tree_flatten((args, kwargs))[0], copies=False))

    def _look_round(self, handed: Sequence[Any]) -> None:
        """Note what the unit's code can reach, and what it reads there.

        Args:
            handed: what it is handed.
        """
        try:
            # Copies of the others are made at each call.
            self._around = Surroundings(
                self.module, itself=lambda value: not is_carrier(value), handed=handed, named=True
            )
        except any_error() as error:  # whatever it is, the unit is left alone
            self.reason = _told(error)
        if isinstance(self._inner, ControlledForward):
            self._inner.recomputation.around = self._around

    def settle(self) -> None:
        """Be told that backward begins: what was written to since the unit was handed it speaks against recomputing.

        So does what its code can reach and somebody has set back since: a context manager round the forward pass, say.
        """
        if isinstance(self._inner, ControlledForward):
            recomputation = self._inner.recomputation
            recomputation.settle()
            recomputation.keeps = False
            self.reason = self.reason or recomputation.barred
        elif any(kept.written for kept in self._kept):
            self.reason = self.reason or WRITTEN
        self._kept = []
        try:
            self.reason = self.reason or self._read_otherwise()
        except any_error() as error:  # whatever it is, the unit is left alone
            self.reason = _told(error)

    def _read_otherwise(self) -> str | None:
        """Return what speaks against recomputing: that its code reads something else now than in its first call."""
        changed = None if self._around is None else self._around.changed(grown=True)
        return None if changed is None else f"it reads {changed}, which is another one by the time of its backward pass"

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
    return None


def storage_lock(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: list[torch.Tensor] | None = None,
) -> str | None:
    """Return why a unit's activations may not be recomputed; ``None`` if they may.

    Args:
        module: the unit.
        forward: its forward; one that is not its class's (compiled, or put there by somebody) has no copy.
        args: what it was called with.
        kwargs: the same, by keyword.
        outputs: takes in what a pass that saves returned, on the host.
    """
    own = forward.original if isinstance(forward, ControlledForward) else forward
    itself = getattr(own, "__self__", None) is not module
    try:
        around = Surroundings(module, itself=_all if itself else None)
        if around.refusal is not None:
            return around.refusal
        before = randomness.capture()
    except any_error() as error:  # whatever it is, the unit is left alone
        return _told(error)
    made = [] if outputs is None else outputs
    unit = _Unit(module, forward if itself else None, args, kwargs, before, copy_context(), made)
    restore = randomness.restore
    try:
        with _casts_left_alone(_device_type(module, args, kwargs)):
            reason = Context().run(_compared, unit)
        reason = reason or _named_source(module)
    except any_error() as error:  # whatever it is, the unit is left alone
        return _told(error)
    else:
        if reason != _DRAWS:
            # What changed python's and numpy's generators is another thread.
            restore = randomness.restore_torch
        return reason
    finally:
        around.restore()
        restore(before)


def _all(_value: Any) -> bool:
    return True


def _named_source(module: nn.Module) -> str | None:
    """Return what speaks against a unit that draws perhaps later, after its warm-up say; ``None`` for nothing."""
    source = source_of(module)
    return None if source is None else f"its code can come to draw from {source}, which recomputation does not repeat"


def _told(error: Exception) -> str:
    """Return what a probe's exception says of a unit."""
    if isinstance(error, CopyError):
        return f"it cannot be probed: a {error} cannot be copied"
    return "ran out of memory while probed" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"


@contextmanager
def _casts_left_alone(device_type: str) -> Iterator[None]:
    """Run the body so that no weight which the caller's autocast has cast is cast anew: gradients would be summed anew.

    A thread of a device's own counts its autocasts by itself, and the last one that it leaves forgets all casts.
    """
    enabled = torch.is_autocast_cache_enabled()
    # Where nothing is cast, a compiled unit would only be compiled again.
    casts = any(map(torch.is_autocast_enabled, dict.fromkeys(["cpu", device_type])))
    torch.set_autocast_cache_enabled(enabled and not casts)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """Hold a unit and what it was called with.

    Attributes:
        module: the unit.
        forward: its forward, where no copy can be made of it; ``None`` where one can.
        args: what it was called with.
        kwargs: the same, by keyword.
        before: the generators' states.
        context: the context variables that it was called with.
        outputs: what its first pass returned, on the host.
    """

    module: nn.Module
    forward: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    before: randomness.RandomState
    context: Context
    outputs: list[torch.Tensor]

    def passes(self, *, recomputes: bool) -> _Outcome:
        """Return what the unit's passes come to; of itself nothing is changed."""
        randomness.restore_torch(self.before)
        loans = Loans()
        try:
            handed = copied((self.args, dict(self.kwargs)), loans.lend)
            passes = functools.partial(_passes, recomputes=recomputes, context=_like(self.context, loans.lend))
            if self.forward is not None:
                with undone(self.module):
                    return passes(self.module, self.forward, *handed)
            twin = twin_of(self.module, loans.lend)
            try:
                return passes(twin, twin.forward, *handed)
            finally:
                dissolve(twin)
        finally:
            loans.take_back()


def _like(context: Context, lend: TensorCopy) -> Context:
    """Return a context with copies of what a context holds, as far as that can be copied."""
    made = Context()
    for variable, value in context.items():
        try:
            made.run(variable.set, copied(value, lend))
        except CopyError:
            continue
    return made


def _compared(unit: _Unit) -> str | None:
    """Return what speaks against a unit's recomputation, by passes over copies."""
    found: list[_Outcome] = []
    if randomness.draws_on_host(lambda: found.append(unit.passes(recomputes=False))):
        return _DRAWS
    saved = found[0]
    unit.outputs.extend(saved.outputs)
    if saved.writes:
        return WRITTEN
    # What is only made once, such as a table that is kept, is there by now.
    around = Surroundings(unit.module, itself=None if unit.forward is None else _all)
    recomputed = unit.passes(recomputes=True)
    if recomputed.barred is not None:
        return recomputed.barred
    changed = around.changed()
    if changed is not None:
        return f"it changes {changed}, which recomputation would change once more"
    if saved.same(recomputed):
        return None
    return _judged(saved, recomputed, [unit.passes(recomputes=False) for _ in range(_REPEATS)])


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
    """Hold what a forward and backward pass came to.

    Attributes:
        tensors: gradients and outputs.
        outputs: the latter alone.
        state: all that the unit and what it was handed hold afterwards, by path.
        generators: their states.
        writes: whether it wrote to tensors that it was handed.
        barred: why it could not be recomputed at all; ``None`` if it could.
    """

    tensors: Sequence[torch.Tensor | None]
    outputs: Sequence[torch.Tensor]
    state: Mapping[str, Any]
    generators: Sequence[torch.Tensor]
    writes: bool
    barred: str | None

    def same(self, other: _Outcome) -> bool:
        return self._like(other) and all(
            _equal(one, two) for one, two in zip(self._values(), other._values(), strict=True)
        )

    def apart(self, other: _Outcome) -> float:
        """Return the largest difference of two tensors over what rounding explains; above 1 it is something else."""
        if not self._like(other):
            return math.inf
        return max((_apart(one, two) for one, two in zip(self._values(), other._values(), strict=True)), default=0.0)

    def _values(self) -> list[torch.Tensor | None]:
        return [*self.tensors, *(value for value in self.state.values() if isinstance(value, torch.Tensor))]

    def _like(self, other: _Outcome) -> bool:
        """Tell whether all but tensors are the same."""
        drawn = all(torch.equal(one, two) for one, two in zip(self.generators, other.generators, strict=True))
        return (
            drawn
            and self.state.keys() == other.state.keys()
            and all(map(_alike, self.state.values(), other.state.values()))
        )


def _alike(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) or type(one) is not type(two):
        return isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, two, equal_nan=one.dtype.kind in "fc"))
    return one is two or one == two or one != one


def _passes(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    recomputes: bool,
    context: Context,
) -> _Outcome:
    """Run a unit forward and backward on what it may write to; forward in a context of its own."""
    inputs = _tensors_in((args, kwargs))
    versions = [tensor._version for tensor in inputs]
    recomputation = Recomputation(module)
    if recomputes:
        outputs = context.run(recomputation.run, forward, args, kwargs)
    else:
        outputs = context.run(forward, *args, **kwargs)
    # What it was handed may have taken up some of what it computes.
    met = {id(tensor) for tensor in inputs}
    found = [tensor for tensor in _tensors_in((outputs, args, kwargs)) if id(tensor) not in met]
    roots = [leaf for leaf in found if leaf.requires_grad]
    wanted = [tensor for tensor in (*inputs, *module.parameters()) if tensor.requires_grad]
    gradients: Sequence[torch.Tensor | None] = ()
    if roots and wanted:
        # Anything but constant: a constant hides what a normalisation layer does.
        gradients = torch.autograd.grad(roots, wanted, [_weights(leaf) for leaf in roots], allow_unused=True)
    # On the host: what is compared takes no room that the passes need.
    values = [
        *(None if gradient is None else gradient.cpu() for gradient in gradients),
        *(leaf.detach().cpu() for leaf in found),
    ]
    made = [leaf.detach().cpu() for leaf in _tensors_in(outputs)]
    writes = versions != [tensor._version for tensor in inputs]
    state, generators = state_of((module, args, kwargs)), randomness.drawn_states()
    return _Outcome(values, made, state, generators, writes, recomputation.barred)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors that an object leads to, whatever it is."""
    found: list[torch.Tensor] = []

    def met(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    copied(value, met)
    return found


def _weights(leaf: torch.Tensor) -> torch.Tensor:
    """Return what an output is weighed with; along its last dimension, where that will do, which takes no room."""
    count = leaf.shape[-1] if leaf.dim() and leaf.shape[-1] > 1 else leaf.numel()
    along = torch.linspace(-1, 1, count, device=leaf.device).to(leaf.dtype)
    return along.expand_as(leaf) if leaf.dim() and leaf.shape[-1] > 1 else along.view_as(leaf)


def _equal(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    if one is None or two is None:
        return one is two
    if one.dtype != two.dtype or one.shape != two.shape or one.layout != two.layout:
        return False
    parts = zip(strided(one), strided(two), strict=True)
    return all(a.shape == b.shape and bool(torch.isclose(a, b, 0, 0, True).all()) for a, b in parts)


def _apart(one: torch.Tensor | None, two: torch.Tensor | None) -> float:
    if _equal(one, two):
        return 0.0
    if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype or not one.is_floating_point():
        return math.inf
    if one.layout is not torch.strided or two.layout is not torch.strided:
        return math.inf
    size, gap = (float(torch.linalg.vector_norm(value.double())) for value in (one, one.double() - two.double()))
    # What is not a number is no rounding.
    found = gap / size / min(_ROUNDING_ULPS * torch.finfo(one.dtype).eps, _ROUNDING_FRAC) if size else math.inf
    return found if math.isfinite(found) else math.inf


def _device_type(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return where a unit computes."""
    leaves = [*module.parameters(), *tree_flatten((args, dict(kwargs)))[0]]
    return next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
