"""Probe, on the run's own first batch, which units may be recomputed: and lock, with the reason, what may not.

A unit is probed where it is called: its forward and backward passes run on copies of the unit and of what it is handed,
once saving and once recomputing. Every gradient and output, all that the copies hold afterwards and the generators must
come out the same to the last bit, and nothing outside of the copies may change; nor may what it reads there be another
one by the time of its backward pass. What cannot be copied is not probed, and locked.

Where the device itself does not repeat to the last bit (flash attention's backward pass adds in any order, as do sums
by atomics), two passes that both save say by how much; recomputing may then differ as they do, and not more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any

import torch
from torch import nn

from autotune.mechanics import randomness
from autotune.mechanics.activations import WRITTEN, hooks_within
from autotune.mechanics.ambient import interception, saving_hook
from autotune.mechanics.controls import ControlledForward
from autotune.mechanics.copies import CopyError
from autotune.mechanics.devices import is_out_of_memory
from autotune.mechanics.kept import Kept, flattened, is_carrier
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.stand_ins import StandIn
from autotune.profiling.outside_state import Surroundings, own_attributes
from autotune.profiling.passes import DRAWS, Unit, compared, distance, tensors_in
from autotune.profiling.reachable_code import source_of


class UnitProbe(StandIn):
    """Stands in for a unit's forward for one step, and finds out whether its activations may be recomputed.

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
        super().__init__(module)
        self.reason: str | None = structural_lock(module)
        self.calls = 0
        self.autocast: torch.dtype | None = None
        self.spent_s = 0.0
        self.hooks = 0
        self._controlled = self._own if isinstance(self._own, ControlledForward) else None
        self._kept: list[Kept] = []
        # Why calls were not probed, and what the unit's code could reach after the one that was.
        self._intercepted: str | None = None
        self._around: Surroundings | None = None
        self._weights: dict[int, str] = {}
        # What a pass over copies returned, until the call itself has.
        self._copied: list[torch.Tensor] | None = None
        module.__dict__["forward"] = self

    def remove(self) -> None:
        """Give the unit its forward back."""
        if self.calls == 0:
            self.reason = self.reason or self._intercepted
        if self._controlled is not None:
            self._controlled.recomputation.around = None
        self._restore()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Probe the first call that may be trained on, then run it as if nothing had been."""
        if torch.compiler.is_compiling():
            return self._own(*args, **kwargs)
        trains = torch.is_grad_enabled()
        if not self._is_free(args, kwargs, trains=trains):
            # The plan of the step was made before anybody knew.
            with self._uncontrolled():
                return self.original(*args, **kwargs)
        found = self.original(*args, **kwargs)
        try:
            if self._copied is not None:
                self._compare(found, flattened(args, kwargs)[0])
            if trains and self._around is None:
                self._look_round(flattened(args, kwargs)[0])
        except any_error() as error:  # whatever it is, the unit is left alone
            self.reason = _told(error)
        return found

    def _is_free(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, trains: bool) -> bool:
        """Tell whether a call may run under the plan of its step; the first one that is trained on is probed."""
        intercepted = interception(self.module) if trains else None
        if intercepted is not None:
            self._intercepted = intercepted
            return False
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
        return self.reason is None

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
                self.reason = storage_lock(self.module, self.original, args, kwargs, outputs)
                self._copied = outputs
            self.spent_s = time.perf_counter() - began

    def _compare(self, found: Any, handed: Sequence[Any]) -> None:
        """Compare what a call returned with what it returned for copies, which code may tell from the originals."""
        copies, self._copied = self._copied or [], None
        own = [leaf.detach().cpu() for leaf in tensors_in(found)]
        if len(own) == len(copies) and all(distance(*pair) <= 1 for pair in zip(own, copies, strict=True)):
            return
        self.reason = self.reason or "it returns something else for copies of what it is handed"
        if self._controlled is not None:
            self._controlled.recomputation.hand_originals(handed)

    def _watch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look out for writes to what a call is handed."""
        if self._controlled is not None:
            self._controlled.recomputation.keeps = True
        else:
            self._kept.append(Kept(flattened(args, kwargs)[0], copies=False))

    def _look_round(self, handed: Sequence[Any]) -> None:
        """Note what the unit's code can reach, and what it reads there.

        Args:
            handed: what it is handed.
        """
        # Copies of the others, but for tensors, are made at each call.
        own: list[tuple[str, Any]] = []
        for name, value in own_attributes(self.module):
            own += [(name, one) for one in tensors_in(value)] if is_carrier(value) else [(name, value)]
        self._around = Surroundings(self.module, own=own, handed=handed, named=True)
        self._weights = _norms(self.module)
        if self._controlled is not None:
            self._controlled.recomputation.around = self._around

    def settle(self) -> None:
        """Note that backward begins: an input that was written to since its unit was called speaks against recomputing.

        So does what its code can reach and somebody has set back since: a context manager round the forward pass, say.
        """
        if self._controlled is not None:
            recomputation = self._controlled.recomputation
            recomputation.settle()
            recomputation.keeps = False
            self.reason = self.reason or recomputation.barred
        elif any(kept.written for kept in self._kept):
            self.reason = self.reason or WRITTEN
        self._kept = []
        try:
            self.reason = self.reason or self._read_otherwise() or self._weighs_otherwise()
        except any_error() as error:  # whatever it is, the unit is left alone
            self.reason = _told(error)
        self._weights = {}

    def _read_otherwise(self) -> str | None:
        """Return what speaks against recomputing: that its code reads something else now than in its first call."""
        changed = None if self._around is None else self._around.changed(grown=True)
        return None if changed is None else f"it reads {changed}, which is another one by the time of its backward pass"

    def _weighs_otherwise(self) -> str | None:
        """Return what speaks against recomputing: that its weights have other values than in its first call."""
        then, now = self._weights, _norms(self.module) if self._weights else {}
        if any(then.get(weight, norm) != norm for weight, norm in now.items()):
            return "its weights have other values by the time of its backward pass"
        return None

    @contextmanager
    def _uncontrolled(self) -> Iterator[None]:
        """Run the body with the unit's own forward, whatever plan it is under."""
        if self._controlled is not None:
            self._controlled.suspended = True
        try:
            yield
        finally:
            if self._controlled is not None:
                self._controlled.suspended = False


def _norms(module: nn.Module) -> dict[int, str]:
    """Return the 2-norm of each trained weight that is here now, by identity; shards are gathered and let go again."""
    weights = [one for one in module.parameters() if one.requires_grad and type(one) is nn.Parameter]
    here = [one for one in weights if one.untyped_storage().size() > 0]
    with torch.no_grad():
        return {id(one): repr(float(torch.linalg.vector_norm(one))) for one in here}


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
        handed = flattened(args, kwargs)[0]
        around = Surroundings(module, own=own_attributes(module) if itself else (), handed=handed)
        if around.refusal is not None:
            return around.refusal
        before = randomness.capture()
    except any_error() as error:  # whatever it is, the unit is left alone
        return _told(error)
    made = [] if outputs is None else outputs
    unit = Unit(module, forward if itself else None, args, kwargs, before, copy_context(), made)
    restore = randomness.restore
    try:
        with _casts_left_alone(_device_type(module, args, kwargs)):
            reason = Context().run(compared, unit)
        reason = reason or _named_source(module)
    except any_error() as error:  # whatever it is, the unit is left alone
        return _told(error)
    else:
        if reason != DRAWS:
            # What changed python's and numpy's generators is another thread.
            restore = randomness.restore_torch
        return reason
    finally:
        around.restore()
        restore(before)


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


def _device_type(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return where a unit computes."""
    leaves = [*module.parameters(), *flattened(args, kwargs)[0]]
    return next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
