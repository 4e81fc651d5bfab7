"""Run a unit's forward through ``torch.compile``, whose partitioner keeps what a budget allows.

The partitioner finds a minimum cut between what the forward pass makes and what the backward pass needs, and under a
budget below 1 chooses what to compute again (a knapsack). The unit's precision is set around the compiled code, which
torch compiles once for each precision, shape and mode; like units share it. Random numbers are drawn by the operations
of uncompiled code, so that they are the same, and are always kept: torch would draw others when it repeats some.

A unit that cannot be compiled as a whole, or is compiled anew from call to call, runs uncompiled, and its reason is
kept. Nothing is compiled where gradients are off.

Source: PyTorch's min-cut partitioner (``torch._functorch.partitioners``) and its ``activation_memory_budget``.
"""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from autotune.mechanics.activations import Recomputation
from autotune.mechanics.precision import InPrecision
from autotune.mechanics.selective import has_compiled_code
from autotune.mechanics.trees import tensors

# Compiled versions of all units together, above which torch would refuse; each takes seconds and is kept.
_VERSIONS = 1024
# How often a unit may be compiled for the same shapes: at first, and when its first call has set something.
SAME = 2
_ANEW = "it is compiled anew for the same shapes: something that it reads changes from call to call"

_WRITES = "it writes to a buffer or to what it is given, from which torch would compute again"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compilations:
    """What this process has compiled.

    Attributes:
        versions: number of compiled versions of units.
        seconds: seconds of the calls that compiled, their own work included.
    """

    versions: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Unit:
    """What is known of a unit.

    Attributes:
        has_compiled_code: whether it contained compiled code at its first call.
        refused: why it is not compiled under a budget, by budget.
        versions: number of its calls that compiled, by what they compiled for.
    """

    has_compiled_code: bool
    refused: dict[float, str] = field(default_factory=dict)
    versions: dict[Any, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Done:
    versions: int = 0
    seconds: float = 0.0


_done = _Done()
_units: WeakKeyDictionary[nn.Module, _Unit] = WeakKeyDictionary()


def compilations() -> Compilations:
    """Return what this process has compiled so far."""
    return Compilations(_done.versions, _done.seconds)


def refusal(module: nn.Module, budget: float) -> str | None:
    """Return why a unit runs uncompiled under a budget; ``None`` if it is compiled or was not called yet.

    Args:
        module: the unit.
        budget: the budget.
    """
    return _units[module].refused.get(budget) if module in _units else None


def missing_compiler() -> str | None:
    """Return why this machine cannot compile units; ``None`` if it has a C++ compiler."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError):
        return "torch.compile finds no C++ compiler; install g++, or name one in the variable CXX"
    return None


def compiled(
    unit: Recomputation, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, budget: float
) -> Any:
    """Call a unit's forward, compiled under a budget.

    Args:
        unit: the unit's module.
        forward: its forward.
        args: positional arguments.
        kwargs: keyword arguments.
        budget: the budget, above 0 and at most 1.
    """
    known = _units.get(unit.module)
    if known is None:
        known = _units[unit.module] = _Unit(has_compiled_code(unit.module))
    if budget in known.refused:
        return forward(*args, **kwargs)
    before, began = _done.versions, time.perf_counter()
    try:
        result = _within(forward, unit.module, known, budget)(*args, **kwargs)
    except _failures() as error:
        reason = _told(error)
    else:
        if _done.versions > before:
            _done.seconds += time.perf_counter() - began
            precision = forward.precision if isinstance(forward, InPrecision) else None
            if _often(known, (budget, precision, unit.module.training, _shapes(args, kwargs))):
                known.refused[budget] = _told_once(unit.module, _ANEW)
        return result
    # Nothing of the forward has run.
    known.refused[budget] = _told_once(unit.module, reason)
    return forward(*args, **kwargs)


def _within(forward: Callable[..., Any], module: nn.Module, known: _Unit, budget: float) -> Callable[..., Any]:
    """Return a forward in its precision, with the unit's own code compiled.

    Raises:
        _NotCompilableError: if it is not the method of the module's class, or contains compiled code.
    """
    own = forward.original if isinstance(forward, InPrecision) else forward
    if not isinstance(own, MethodType) or own.__self__ is not module:
        raise _NotCompilableError("its forward is not a method of its class")
    if known.has_compiled_code:
        raise _NotCompilableError("it contains compiled code already")
    program = functools.partial(_program(own.__func__, budget), module)
    return replace(forward, original=program) if isinstance(forward, InPrecision) else program


class _NotCompilableError(Exception):
    """A unit cannot be compiled."""


@functools.cache
def _failures() -> tuple[type[Exception], ...]:
    """Return the exceptions of the compiler, raised before any of the compiled code has run."""
    from torch._dynamo import exc

    return _NotCompilableError, exc.TorchDynamoException, exc.FailOnRecompileLimitHit


@functools.cache
def _program(forward: Callable[..., Any], budget: float) -> Callable[..., Any]:
    """Return a function of a module and the arguments of its forward, compiled under a budget at its first call."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, _VERSIONS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, _VERSIONS)

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    return torch.compile(run, backend=_backend(budget), fullgraph=True, dynamic=False)


@functools.cache
def _backend(budget: float) -> Callable[..., Any]:
    """Return the backend of a budget; torch tells compiled versions of a function apart by their backend."""
    with warnings.catch_warnings():
        # Torch warns of its own deprecated parts.
        warnings.simplefilter("ignore")
        from torch._functorch import config as functorch
        from torch._inductor import compile_fx, config

    def compile_graph(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        # The backward pass at once, under the same settings. One thread: torch's pool of processes would stay.
        partition = {"activation_memory_budget": budget, "force_non_lazy_backward_lowering": True}
        settings = {"fallback_random": True, "joint_custom_pre_pass": _drawing_once(), "compile_threads": 1}
        with functorch.patch(partition), config.patch(settings):
            found = compile_fx.compile_fx(graph, inputs)
        _done.versions += 1
        return found

    return compile_graph


@functools.cache
def _drawing_once() -> Any:
    """Return a pass over joint graphs that keeps what random operations draw, and refuses units that write to inputs.

    Torch never repeats some random operations, but does not know ``bernoulli``, from which dropout follows: under a
    budget below 1, the backward pass would draw another mask. And it computes again from buffers that the forward pass
    has written to since (torch 2.13).
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch.utils.checkpoint import CheckpointPolicy

    class DrawingOnce(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            if any(map(_writes_to_input, graph.nodes)):
                raise _NotCompilableError(_WRITES)
            for node in graph.nodes:
                if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                    node.meta.update(recompute=CheckpointPolicy.MUST_SAVE)

        def uuid(self) -> Any:
            return "autotune keeps what random operations draw and refuses writes, 2"

    return DrawingOnce()


def _writes_to_input(node: fx.Node) -> bool:
    """Return whether a node of a joint graph writes to a placeholder, or returns what one is to become."""
    if node.op == "output":
        return any(type(one).__name__.startswith("InputMutation") for one in node.meta.get("desc") or ())
    schema = getattr(node.target, "_schema", None)
    first = node.args[0] if node.args else None
    return schema is not None and schema.is_mutable and isinstance(first, fx.Node) and first.op == "placeholder"


def _often(known: _Unit, version: Any) -> bool:
    """Count a call that compiled; return whether as many compiled for the same as would not happen to steady code."""
    known.versions[version] = known.versions.get(version, 0) + 1
    return known.versions[version] > SAME


def _shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((one.shape, one.dtype, one.requires_grad) for one in tensors((args, dict(kwargs))))


def _told_once(module: nn.Module, reason: str) -> str:
    _warn(type(module).__name__, reason)
    return reason


@functools.cache
def _warn(kind: str, reason: str) -> None:
    logger.warning("units of class %s run uncompiled: %s", kind, reason)


def _told(error: Exception) -> str:
    """Return the first line of an exception that says something."""
    error = getattr(error, "inner_exception", error)
    lines = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next(filter(None, lines), '')}".removeprefix("_NotCompilableError: ")
