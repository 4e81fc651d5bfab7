"""Apply a plan to a model, idempotently and reversibly.

A controlled unit has one instance attribute, ``forward``, that shadows its class's method. There are no wrapper
modules and no hooks, and no parameter, buffer, module name or ``state_dict`` key changes; a copied or pickled model
gets its plain forward back. This file knows nothing of steps, batches or measurements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import _StopRecomputationError

from autotune.compiled import is_compiled_in_place
from autotune.errors import PlanError
from autotune.mechanics.activations import Recomputation
from autotune.mechanics.ambient import interception, recorded, transformed
from autotune.mechanics.buffers import forget_constants, forget_copies
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.precision import InPrecision
from autotune.mechanics.stand_ins import StandIn
from autotune.mechanics.storage_acts import ACTS
from autotune.plan import Plan, Precision, Storage


class ControlledForward(StandIn):
    """A unit's forward under a plan.

    Attributes:
        module: the unit.
        precision: the precision that the next call runs in.
        storage: the storage that the next call uses.
        passes_16_bit: whether 16-bit outputs are returned without a cast to fp32.
        calls: bytes of the tensors that each call in training was handed; ``None`` if calls are not counted.
        failures: list of the exceptions that calls under the plan raise, after which the unit's original forward runs;
            ``None`` lets exceptions propagate.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.precision = Precision.INHERIT
        self.storage = Storage.SAVE
        self.passes_16_bit = False
        self.suspended = False
        self.calls: list[int] | None = None
        self.failures: list[Exception] | None = None
        self.recomputation = Recomputation(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the unit's own forward in the plan's precision and storage."""
        if torch.compiler.is_compiling():
            return self._own(*args, **kwargs)
        if (other := self._of_other()) is not None:
            return other(*args, **kwargs)
        if self.suspended or transformed() or recorded():
            return self.original(*args, **kwargs)
        trains = torch.is_grad_enabled()
        if trains and self.calls is not None:
            given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
            self.calls.append(sum(map(_computed_bytes, given)))
        try:
            run = self._bind(self.precision)
            act = ACTS.get(self.storage) if trains else None
            if act is not None and interception(self.module) is None:
                return act(self.recomputation, run, args, kwargs)
            return run(*args, **kwargs)
        except any_error() as error:
            if self.failures is None or isinstance(error, _StopRecomputationError):
                # A checkpoint of the user's own has recomputed all that it needs.
                raise
            # Without the traceback, whose frames keep tensors alive.
            self.failures.append(error.with_traceback(None))
        return self.original(*args, **kwargs)

    def _bind(self, precision: Precision) -> Callable[..., Any]:
        """Return the forward in a fixed precision, so that a later switch does not affect a live graph."""
        if precision is Precision.INHERIT:
            return self.original
        return InPrecision(self.module, self.original, precision, self.passes_16_bit)

    def release(self) -> None:
        """Restore the module's former forward, if this one is still in place; this one then only calls the former."""
        forget_copies(self.module)
        self.precision, self.storage, self.failures = Precision.INHERIT, Storage.SAVE, None
        self._restore()


def apply(model: nn.Module, plan: Plan, *, fp32_borders: bool = False) -> None:
    """Make a model run under a plan, from its next forward pass on.

    A unit that the plan does not name, or leaves at ``inherit`` and ``save``, is released. A unit with a precision
    returns fp32, so that no unit depends on how others compute. If the plan puts every parameter of the model under one
    16-bit precision, tensors pass between units without a cast, as under plain autocast, and only the last unit returns
    fp32. Call it only between steps, while no graph of the model is alive.

    Args:
        model: the model whose module names the plan uses.
        plan: the plan, its units in forward order.
        fp32_borders: whether units return fp32 in any case; for profiling.

    Raises:
        PlanError: if the plan names a module that the model does not have, or sets a precision for a unit with 16-bit
            parameters; the model is left unchanged.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    names = dict.fromkeys([*plan.precision, *plan.storage])
    for name in names:
        _check(name, plan, modules)
    kept = {id(modules[name]) for name in names}
    for forward in list(_controlled(model)):
        if id(forward.module) not in kept:
            forward.release()
    passing = frozenset() if fp32_borders else _passing(model, plan, modules)
    for name in names:
        _set(modules[name], plan.precision_of(name), plan.storage_of(name), passes_16_bit=name in passing)


class Switcher:
    """Applier of successive plans to a model whose modules do not change, without looking them up again.

    Units with a precision return fp32 under every plan, so that measurements under one plan are valid for others.

    Attributes:
        hooks: number of hooks on a unit's parts when it was probed, by unit.

    Args:
        model: the model.
        names: the units that plans may name.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._modules = {name: model.get_submodule(name) for name in names}
        self._forwards: dict[str, ControlledForward] = {}
        self._places = _places(model, self._modules)
        self.hooks: dict[str, int] = {}
        self._counted: tuple[str, ...] = ()
        # The ``__dict__`` of each unit that the plan recomputes, with its name, and of each controlled unit.
        self._recomputed: list[tuple[str, dict[str, Any]]] = []
        self._attributes: list[dict[str, Any]] = []

    def count(self, names: Iterable[str]) -> None:
        """Count the calls of units from now on, under every plan, but for units compiled in place, whose calls hide."""
        self._counted = tuple(name for name in names if not is_compiled_in_place(self._modules[name]))

    def calls(self) -> dict[str, list[int]]:
        """Return the calls of each counted unit in training since this method was last called.

        Each is the bytes of the tensors that it was handed, in the format that the loop computes in.
        """
        found: dict[str, list[int]] = {}
        for name in self._counted:
            forward = self._modules[name].__dict__.get("forward")
            if isinstance(forward, ControlledForward):
                found[name], forward.calls = forward.calls or [], []
        return found

    def apply(self, plan: Plan) -> None:
        """Apply a plan like :func:`apply`, without its checks; the plan must name only the switcher's units."""
        former, self._forwards, self._recomputed = self._forwards, {}, []
        for name, module in self._modules.items():
            counted, storage = name in self._counted, plan.storage_of(name)
            _set(module, plan.precision_of(name), storage, passes_16_bit=False, stays=counted)
            if storage.recomputes:
                self._recomputed.append((name, module.__dict__))
            forward = module.__dict__.get("forward")
            if isinstance(forward, ControlledForward):
                forward.recomputation.checks = True
                forward.recomputation.hooks = self.hooks.get(name, forward.recomputation.hooks)
                self._forwards[name] = forward
            if name in former and former[name] is not forward:
                former[name].release()
        self._attributes = [self._modules[name].__dict__ for name in self._forwards]

    def remove(self) -> None:
        """Restore every module, including those that are no longer in the model."""
        for forward in self._forwards.values():
            forward.release()
        for module in self._modules.values():
            forget_constants(module)
        self._forwards, self._attributes = {}, []

    def stands(self) -> bool:
        """Return whether the modules still have the forwards that the last plan gave them."""
        present = [attributes.get("forward") for attributes in self._attributes]
        return all(map(operator.is_, present, self._forwards.values()))

    def change(self) -> str | None:
        """Return the first replaced, removed or added module found since construction; ``None`` if there is none."""
        for name, parent, watched, whole in self._places:
            present = parent._modules
            same = all(map(operator.is_, map(present.get, watched), watched.values()))
            if same and (not whole or len(present) == len(watched)):
                continue
            for key, module in watched.items():
                if present.get(key) is not module:
                    place = f"{name}.{key}" if name else key
                    return f"the module {place} was {'replaced' if present.get(key) is not None else 'removed'}"
            if whole and len(present) != len(watched):
                return f"modules were added to {name or 'the model'}"
        return None

    def barred(self) -> dict[str, str]:
        """Return, by unit, why units are no longer recomputed although the plan says so."""
        return {
            name: forward.recomputation.barred
            for name, attributes in self._recomputed
            if isinstance(forward := attributes.get("forward"), ControlledForward)
            and forward.recomputation.barred is not None
        }

    @contextmanager
    def trying(self, plan: Plan) -> Iterator[list[Exception]]:
        """Run the body under a plan that units may fail under, for example for lack of a 16-bit operation.

        Yields:
            The exceptions raised; after one, the unit's original forward runs.
        """
        self.apply(plan)
        failures: list[Exception] = []
        forwards = [module.__dict__.get("forward") for module in self._modules.values()]
        tried = [forward for forward in forwards if isinstance(forward, ControlledForward)]
        for forward in tried:
            forward.failures = failures
        try:
            yield failures
        finally:
            for forward in tried:
                forward.failures = None


def remove(model: nn.Module) -> None:
    """Release every unit of a model, so that nothing of a plan is left in it."""
    for forward in list(_controlled(model)):
        forward.release()


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Run the body with every unit's original forward, for example to evaluate in full precision."""
    forwards = list(_controlled(model))
    for forward in forwards:
        forward.suspended = True
    try:
        yield
    finally:
        for forward in forwards:
            forward.suspended = False


def recomputations(model: nn.Module) -> dict[str, int]:
    """Return how often each controlled unit was recomputed since it came under control."""
    counts = {id(forward.module): forward.recomputation.count for forward in _controlled(model)}
    return {name: counts[id(module)] for name, module in model.named_modules() if id(module) in counts}


def forward_order(
    model: nn.Module,
    names: Iterable[str],
    run: Callable[[], object],
    on_call: Callable[[str, tuple[Any, ...], Mapping[str, Any]], object] | None = None,
) -> dict[str, int]:
    """Return how often each module is called while ``run`` runs, in the order of the first calls.

    Args:
        model: the model.
        names: the modules to watch.
        run: function that runs the model once.
        on_call: function that receives each call's module name, positional and keyword arguments.

    Returns:
        Calls by name; modules that were not called come last, with 0.
    """
    calls: dict[str, int] = {}

    def watch(name: str) -> Any:
        module = model.get_submodule(name)

        def hook(called: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
            # Modules may share a dictionary of hooks.
            if called is not module:
                return
            calls[name] = calls.get(name, 0) + 1
            if on_call is not None:
                on_call(name, args, kwargs)

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    names = list(names)
    handles = [watch(name) for name in names]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {**calls, **{name: 0 for name in names if name not in calls}}


def _computed_bytes(given: torch.Tensor) -> int:
    """Return the bytes of a tensor in the format that autocast, if it is enabled, makes of it."""
    kind, width = given.device.type, given.element_size()
    if torch.is_autocast_enabled(kind) and given.is_floating_point():
        width = torch.get_autocast_dtype(kind).itemsize
    return given.numel() * width


def _controlled(model: nn.Module) -> Iterator[ControlledForward]:
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, ControlledForward):
            yield forward


def _places(
    model: nn.Module, names: Iterable[str]
) -> list[tuple[str, nn.Module, Mapping[str, nn.Module | None], bool]]:
    """Return the ancestors of named modules: each one's name, module, watched children, and whether these are all.

    All children of a ``ModuleList`` or ``Sequential`` are watched: they may become units.
    """
    found: dict[str, tuple[nn.Module, dict[str, nn.Module | None]]] = {}
    for name in names:
        parent, path = model, ""
        for key in name.split("."):
            whole = isinstance(parent, nn.ModuleList | nn.Sequential)
            children = found.setdefault(path, (parent, dict(parent._modules) if whole else {}))[1]
            children[key] = parent._modules.get(key)
            parent, path = parent.get_submodule(key), f"{path}.{key}" if path else key
    return [
        (path, parent, children, isinstance(parent, nn.ModuleList | nn.Sequential))
        for path, (parent, children) in found.items()
    ]


def _check(name: str, plan: Plan, modules: dict[str, nn.Module]) -> None:
    if name not in modules:
        raise PlanError(f"unit {name!r} is not a module of the model", where="plan", allowed="names of modules")
    precision = plan.precision_of(name)
    if precision is not Precision.INHERIT and has_16_bit_parameters(modules[name]):
        raise PlanError(
            f"precision of {name!r} is {str(precision)!r} but its parameters are 16-bit",
            where="plan",
            allowed="inherit",
        )


def has_16_bit_parameters(module: nn.Module) -> bool:
    """Return whether a module has any parameter in a 16-bit format, and so no fp32 master of it."""
    return any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in module.parameters())


def _passing(model: nn.Module, plan: Plan, modules: dict[str, nn.Module]) -> frozenset[str]:
    """Return the units that return 16-bit tensors: all but the last, if one 16-bit precision covers the model."""
    if plan.uniform_reduced is None:
        return frozenset()
    covered = {id(parameter) for name in plan.precision for parameter in modules[name].parameters()}
    if any(id(parameter) not in covered for parameter in model.parameters()):
        return frozenset()
    return frozenset(list(plan.precision)[:-1])


def _set(
    module: nn.Module, precision: Precision, storage: Storage, *, passes_16_bit: bool, stays: bool = False
) -> None:
    forward = module.__dict__.get("forward")
    if precision is Precision.INHERIT and storage is Storage.SAVE and not stays:
        if isinstance(forward, ControlledForward):
            forward.release()
        return
    if not isinstance(forward, ControlledForward):
        forward = ControlledForward(module)
        forward.place()
    forward.precision = precision
    forward.storage = storage
    forward.passes_16_bit = passes_16_bit
    forward.calls = (forward.calls or []) if stays else None
