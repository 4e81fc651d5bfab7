"""Probe on the run's own first batch which units may be recomputed, and give a reason to lock the others.

A unit is probed where it is called: its forward and backward passes run on copies of the unit and its arguments, once
saving and once recomputing. Gradients, outputs, the copies' states afterwards and the random generators must be bitwise
equal, and nothing outside the copies may change. What the unit reads outside must not change before its backward pass
either. If something cannot be copied, the unit is locked.

Some operations are not deterministic (flash attention's backward pass and atomic sums add in any order). Then repeated
passes that save show by how much results differ, and recomputing may differ by a small multiple of that.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any

import torch
from torch import nn

from autotune.compiled import is_compiled_in_place
from autotune.mechanics import randomness
from autotune.mechanics.activations import WRITTEN, hooks_within
from autotune.mechanics.ambient import interception, recorded, runs_backward, saving_hook
from autotune.mechanics.controls import ControlledForward
from autotune.mechanics.copies import CopyError
from autotune.mechanics.devices import is_out_of_memory
from autotune.mechanics.kept import Kept, flattened, is_carrier
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.muting import muted, telling
from autotune.mechanics.stand_ins import StandIn
from autotune.profiling.outside_state import Surroundings, own_attributes
from autotune.profiling.passes import DRAWS, Unit, compared, distance, tensors_in
from autotune.profiling.reachable_code import deed_of, source_of, transform_of


class UnitProbe(StandIn):
    """Replaces a unit's forward for one step, and determines whether its activations may be recomputed.

    Attributes:
        reason: why they may not be recomputed; ``None`` if they may, or if no call was probed yet.
        calls: number of probed calls, at most 1.
        autocast: the dtype of the user's own autocast around the probed call; ``None`` for none.
        hooks: number of hooks on the unit's parts in the probed call.
        spent_s: seconds that the probe added to the forward pass.
        runs_untrained: whether it was called without gradients.

    Args:
        module: the unit.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.reason: str | None = structural_lock(module)
        self.calls = 0
        self.autocast: torch.dtype | None = None
        self.spent_s = 0.0
        self.runs_untrained = False
        self.hooks = 0
        self._controlled = self._own if isinstance(self._own, ControlledForward) else None
        self._kept: list[Kept] = []
        # Why calls could not be probed, and the objects that the unit's code could reach after its first call.
        self._intercepted: str | None = None
        self._around: Surroundings | None = None
        self._weights: dict[int, str] = {}
        # What the passes over copies have logged, and the call itself has not yet.
        self._untold: list[logging.LogRecord] = []
        # The outputs for copies, until they are compared with those of the call itself.
        self._copied: list[torch.Tensor] | None = None
        self.place()

    def remove(self) -> None:
        """Restore the unit's own forward."""
        if self.calls == 0:
            self.reason = self.reason or self._intercepted
        if self._controlled is not None:
            self._controlled.recomputation.around = None
        self._restore()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Probe the first call with gradients enabled; run every call on the original arguments."""
        if torch.compiler.is_compiling():
            return self._own(*args, **kwargs)
        if (other := self._of_other()) is not None:
            return other(*args, **kwargs)
        if recorded():
            return self.original(*args, **kwargs)
        trains = torch.is_grad_enabled()
        self.runs_untrained |= not trains
        if not self._is_free(args, kwargs, trains=trains):
            # The step's plan was chosen before it was known that it may not recompute the unit.
            untold, self._untold = self._untold, []
            with self._uncontrolled(), telling(untold):
                return self.original(*args, **kwargs)
        untold, self._untold = self._untold, []
        with telling(untold):
            found = self.original(*args, **kwargs)
        try:
            if self._copied is not None:
                self._compare(found, flattened(args, kwargs)[0])
            if trains and self._around is None:
                self._look_round(flattened(args, kwargs)[0])
        except any_error() as error:  # whatever the error, the unit is locked
            self.reason = _told(error)
        return found

    def _is_free(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, trains: bool) -> bool:
        """Return whether a call may run under the step's plan; probe the first call with gradients enabled."""
        intercepted = interception(self.module) if trains else None
        if intercepted is not None:
            self._intercepted = intercepted
            return False
        try:
            if self.calls == 0 and trains:
                self.calls = 1
                self._probe(args, kwargs)
            if self.reason is None:
                # Recomputation restores the state that the first call read, so later calls must read the same.
                self.reason = self._read_otherwise()
            if self.reason is None:
                self._watch(args, kwargs)
        except any_error() as error:  # whatever the error, the unit is locked
            self.reason = _told(error)
        return self.reason is None

    def _probe(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Determine whether a call may be recomputed; record its hooks and autocast."""
        self.hooks = hooks_within(self.module)
        device = _device_type(self.module, args, kwargs)
        self.autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        # A reentrant checkpoint calls units with gradients only in the backward pass.
        if self.reason is None and (saving_hook() is not None or runs_backward()):
            self.reason = "the loop's own checkpointing or saved-tensor hooks already decide what it keeps"
        if self.reason is None and any(one.is_nested for one in tensors_in((args, kwargs))):
            self.reason = "it is handed a nested tensor, which cannot be copied"
        if self.reason is None:
            began = time.perf_counter()
            with self._uncontrolled(), muted(self._untold):
                # A local list, because the passes compare the unit's attributes, of which this probe is one.
                outputs: list[torch.Tensor] = []
                self.reason = storage_lock(self.module, self.original, args, kwargs, outputs)
                self._copied = outputs
            self.spent_s = time.perf_counter() - began

    def _compare(self, found: Any, handed: Sequence[Any]) -> None:
        """Compare the outputs of a call with those for copies: code may treat copies differently from originals."""
        copies, self._copied = self._copied or [], None
        own = [leaf.detach().cpu() for leaf in tensors_in(found)]
        if len(own) == len(copies) and all(distance(*pair) <= 1 for pair in zip(own, copies, strict=True)):
            return
        self.reason = self.reason or "its outputs differ when its arguments are copied"
        if self._controlled is not None:
            self._controlled.recomputation.hand_originals(handed)

    def _watch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Watch the arguments of a call for writes."""
        if self._controlled is not None:
            self._controlled.recomputation.keeps = True
        else:
            self._kept.append(Kept(flattened(args, kwargs)[0], copies=False))

    def _look_round(self, handed: Sequence[Any]) -> None:
        """Record the state of what the unit's code can reach, and of its weights.

        Args:
            handed: the flattened arguments of the call.
        """
        # Of a carrier, only the tensors are watched: recomputation copies the rest of it at each call.
        own: list[tuple[str, Any]] = []
        for name, value in own_attributes(self.module):
            own += [(name, one) for one in tensors_in(value)] if is_carrier(value) else [(name, value)]
        self._around = Surroundings(self.module, own=own, handed=handed, named=True)
        self._weights = _norms(self.module)
        if self._controlled is not None:
            self._controlled.recomputation.around = self._around

    def settle(self) -> None:
        """Check, when backward begins, that nothing which the unit reads has changed since it was called.

        Its arguments may have been written to, or a context manager around the forward pass may have reset a global.
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
        except any_error() as error:  # whatever the error, the unit is locked
            self.reason = _told(error)
        self._weights = {}

    def _read_otherwise(self) -> str | None:
        """Return a reason not to recompute if what its code reads has changed since the first call, or ``None``."""
        changed = None if self._around is None else self._around.changed(grown=True)
        return None if changed is None else f"it reads {changed}, which has changed by the time of its backward pass"

    def _weighs_otherwise(self) -> str | None:
        """Return a reason not to recompute if the weights have changed since the first call, or ``None``."""
        then, now = self._weights, _norms(self.module) if self._weights else {}
        if any(then.get(weight, norm) != norm for weight, norm in now.items()):
            return "its weights have other values by the time of its backward pass"
        return None

    @contextmanager
    def _uncontrolled(self) -> Iterator[None]:
        """Run the body with the unit's own forward, whatever the plan."""
        if self._controlled is not None:
            self._controlled.suspended = True
        try:
            yield
        finally:
            if self._controlled is not None:
                self._controlled.suspended = False


def _norms(module: nn.Module) -> dict[int, str]:
    """Return the 2-norm of each trained weight by id; skip sharded weights that are not gathered now."""
    weights = [one for one in module.parameters() if one.requires_grad and type(one) is nn.Parameter]
    here = [one for one in weights if one.untyped_storage().size() > 0]
    with torch.no_grad():
        return {id(one): repr(float(torch.linalg.vector_norm(one))) for one in here}


def structural_lock(module: nn.Module) -> str | None:
    """Return why a unit cannot be recomputed, as known without a probe; ``None`` if there is no such reason."""
    if is_compiled_in_place(module):
        return "it is compiled in place; compile it as `block = torch.compile(block)` instead"
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    if any(isinstance(part, sharded) for part in module.modules() if part is not module):
        return "fully_shard() was called on a part of it, whose weights only the part's own hooks gather"
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
        forward: its forward; if it is not the unit's own method (compiled, or replaced by others), no copy is made.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        outputs: list to which the outputs of a pass that saves are added, on the host.
    """
    own = forward.original if isinstance(forward, ControlledForward) else forward
    itself = getattr(own, "__self__", None) is not module
    try:
        deed = deed_of(module)
        if deed is not None:
            return f"its code may {deed}, which recomputation would do a second time"
        transform = transform_of(module)
        if transform is not None:
            return f"its code may call {transform}, which forbids the hooks that recomputation needs"
        handed = flattened(args, kwargs)[0]
        around = Surroundings(module, own=own_attributes(module) if itself else (), handed=handed)
        if around.refusal is not None:
            return around.refusal
        before = randomness.capture()
    except any_error() as error:  # whatever the error, the unit is locked
        return _told(error)
    made = [] if outputs is None else outputs
    unit = Unit(module, forward if itself else None, args, kwargs, before, copy_context(), made)
    restore = randomness.restore
    try:
        with _casts_left_alone(_device_type(module, args, kwargs)):
            reason = Context().run(compared, unit)
        reason = reason or _named_source(module)
    except any_error() as error:  # whatever the error, the unit is locked
        return _told(error)
    else:
        if reason != DRAWS:
            # Only another thread can have changed Python's and NumPy's generators: leave them.
            restore = randomness.restore_torch
        return reason
    finally:
        around.restore()
        restore(before)


def _named_source(module: nn.Module) -> str | None:
    """Return a reason to lock a unit if its code may draw random numbers later, as after a warm-up; or ``None``."""
    source = source_of(module)
    return None if source is None else f"its code may draw from {source}, which recomputation does not repeat"


def _told(error: Exception) -> str:
    """Return a reason to lock a unit whose probe raised an exception."""
    if isinstance(error, CopyError):
        return f"it cannot be probed: a {error} cannot be copied"
    if is_out_of_memory(error):
        return "ran out of memory while probed"
    try:
        return f"a probe of it raised {type(error).__name__}: {error}"
    except any_error():  # a message may show objects of the probe, of which not all is there any more
        return f"a probe of it raised {type(error).__name__}: it may look up things by its modules"


@contextmanager
def _casts_left_alone(device_type: str) -> Iterator[None]:
    """Run the body without clearing the caller's cache of cast weights: casting again changes how gradients are summed.

    A device's autograd thread counts nested autocasts separately, and clears the cache when it leaves the last one.
    """
    enabled = torch.is_autocast_cache_enabled()
    # Without autocast, the cache setting stays, since a compiled unit would be compiled again if it changed.
    casts = any(map(torch.is_autocast_enabled, dict.fromkeys(["cpu", device_type])))
    torch.set_autocast_cache_enabled(enabled and not casts)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _device_type(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the device type of a unit's first parameter or, without one, of its first tensor argument."""
    leaves = [*module.parameters(), *flattened(args, kwargs)[0]]
    return next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
