"""Follow by name what a unit's forward pass may call, to find what recomputation neither restores nor undoes.

A probe cannot see draws or files that begin only after a warm-up, but the code must name its generator, or ``open``.
"""

from __future__ import annotations

import dis
import functools
import io
import itertools
import random
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import _GeneratorContextManager
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverloadPacket

from autotune.mechanics.copies import WEAK_DICTIONARIES, own_dict

# Libraries whose functions are assumed to use only their arguments, and are not looked into.
TRUSTED = (
    "torch",
    "numpy",
    "triton",
    "einops",
    "builtins",
    "math",
    "functools",
    "itertools",
    "typing",
    "collections",
    "tempfile",
    "tqdm",
    "autotune",
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_THE_PROCESS: tuple[Any, ...] = (random, np.random, random._inst, np.random.mtrand._rand)
_OF_ITS_OWN = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_HOST, _OWN = "Python's or NumPy's generator", "a generator of its own"
_CALLED_UNNAMED = (
    *("__init__", "__call__", "__enter__", "__exit__", "__iter__", "__next__"),
    *("__getitem__", "__setitem__"),
)
# What autograd calls of a function of the user's own, and a custom operator of its definition.
_CALLED_BY_AUTOGRAD = ("forward", "backward", "setup_context", "jvp", "vmap")
_OF_AN_OPERATOR = ("_init_fn", "_setup_context_fn", "_backward_fn")
_WEAK_CONTAINERS = (*WEAK_DICTIONARIES, weakref.WeakSet)
_CONSTANT_INITIALS = {"constant_", "dirac_", "eye_", "ones_", "zeros_"}
# Transforms of torch.func within which hooks for saved tensors raise.
_FORBID_HOOKS = {"grad", "grad_and_value", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "linearize"}
# Operations of a scripted function from which torch may make one, which rounds otherwise.
_FUSED = 3
_MOST_FUNCTIONS = 2000
# Builtins with which code reaches what a probe does not see, and packages that report elsewhere.
_DEEDS = {
    "open": "open a file",
    "globals": "change globals by name",
    "exec": "run any code",
    "eval": "run any code",
}
_TRACKERS = ("wandb", "mlflow", "neptune", "comet_ml", "clearml", "aim")


@functools.cache
def is_trusted(module: str | None) -> bool:
    """Return whether a module, given its name, belongs to a trusted library."""
    return (module or "").partition(".")[0] in TRUSTED


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that a function's code uses, including its inner functions."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.cache
def bound_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals that a function's code assigns or deletes, including its inner functions."""
    inner = (bound_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    own = (step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"))
    return frozenset(own).union(*inner)


@functools.cache
def _read_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals and builtins that a function's code reads, including its inner functions."""
    inner = (_read_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    own = (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return frozenset(own).union(*inner)


def plain_functions(found: Any) -> list[FunctionType]:
    """Return the functions behind a method, a property or a decorated function: wrappers, and what they wrap."""
    if isinstance(found, property):
        return [one for each in (found.fget, found.fset) for one in plain_functions(each)]
    if isinstance(found, functools.partial):
        return plain_functions(found.func)
    if isinstance(found, MethodType | staticmethod | classmethod):
        found = found.__func__
    functions: list[FunctionType] = []
    while found is not None and found not in functions:
        if isinstance(found, FunctionType):
            functions.append(found)
        # Not getattr(): an object's class may provide an attribute of any name.
        found = own_dict(found).get("__wrapped__")
    return functions


def forward_of(part: nn.Module) -> Any:
    """Return the forward that others have set on a module instance, beneath this package's own; or ``None``."""
    found: Any = vars(part).get("forward")
    while is_trusted(type(found).__module__) and hasattr(found, "original"):
        found = found.original
    return found


def source_of(module: nn.Module) -> str | None:
    """Return which generator, except torch's default ones, a unit's forward pass may use, or ``None``."""
    parts = list(module.modules())
    return _source_in(_reached(parts), parts)


def may_draw(function: Any) -> bool:
    """Return whether a function, or one that it calls by name, may draw random numbers."""
    functions = list(_followed([function], ()))
    drawing = any(_is_drawing(name) for one in functions for name in names_in(one.__code__))
    return drawing or _source_in(functions, ()) is not None


@functools.cache
def _is_drawing(name: str) -> bool:
    """Return whether torch's operators or initialisations of this name draw random numbers."""
    if name.endswith("_") and isinstance(vars(nn.init).get(name), FunctionType):
        return name not in _CONSTANT_INITIALS
    operator = getattr(torch.ops.aten, name, None)
    overloads = operator.overloads() if isinstance(operator, OpOverloadPacket) else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(operator, kind).tags for kind in overloads)


def _source_in(functions: Iterable[FunctionType], parts: Sequence[nn.Module]) -> str | None:
    for function in functions:
        names = names_in(function.__code__)
        if _imports_one(function.__code__):
            return _HOST
        for found in _named(function, names, parts):
            if _is_generator(found, names):
                return _HOST
            if isinstance(found, _OF_ITS_OWN):
                return _OWN
    return None


def deed_of(module: nn.Module) -> str | None:
    """Return what a unit's code may do outside of itself that cannot be undone, or ``None``.

    Only functions of the files that the unit's classes and hooks are from are looked at: libraries read files and look
    up modules where nothing depends on it.
    """
    parts = list(module.modules())
    if any(_is_optimised(found) for one in _reached(parts) for found in _named(one, names_in(one.__code__), parts)):
        return "run a scripted function, which torch optimises after some runs"
    for name in sorted(frozenset[str]().union(*(names_in(one.__code__) for one in _reached(parts)))):
        kinds = (type(vars(part).get(name)) for part in parts)
        weak = next((kind for kind in kinds if issubclass(kind, _WEAK_CONTAINERS)), None)
        if weak is not None:
            # What it held before a call is not restored: it would have to be kept alive.
            return f"change {name}, a {weak.__name__}"
    own: set[str | None] = {kind.__module__ for part in parts for kind in type(part).__mro__}
    own |= {one.__module__ for found in _called_first(parts) for one in plain_functions(found)}
    methods = [one for part in parts for kind in type(part).__mro__ for one in vars(kind).values()]
    for function in _reached(parts, own):
        names = names_in(function.__code__)
        if "acquire" in names and function not in methods:
            # Recomputation ends early where the unit's own methods acquire nothing.
            return "hold a lock without a with statement"
        for name in _DEEDS.keys() & _read_in(function.__code__):
            if name not in function.__globals__:
                return _DEEDS[name]
        for found in _named(function, names, parts):
            deed = _deed_with(found, names)
            if deed is not None:
                return deed
    return None


def transform_of(module: nn.Module) -> str | None:
    """Return a transform that a unit's code may call and that forbids hooks for saved tensors, or ``None``."""
    parts = list(module.modules())
    for function in _reached(parts):
        names = names_in(function.__code__)
        for found in _named(function, names, parts):
            if found is torch and "func" in names and (called := sorted(_FORBID_HOOKS & names)):
                return f"torch.func.{called[0]}"
            own = getattr(found, "__name__", None) if isinstance(found, FunctionType) else None
            if own in _FORBID_HOOKS and found.__module__.startswith("torch._functorch"):
                return f"torch.func.{own}"
    return None


def _is_optimised(found: Any) -> bool:
    """Return whether an object is a scripted function that torch may come to compute with other rounding."""
    if not isinstance(found, torch.jit.ScriptFunction):
        return False
    return sum(node.kind().startswith("aten::") for node in found.graph.nodes()) >= _FUSED


def _deed_with(found: Any, names: frozenset[str]) -> str | None:
    """Return what code that uses names may do with an object, or ``None``."""
    if found is sys and "modules" in names:
        return "change a module that it looks up in sys.modules"
    if isinstance(found, ModuleType) and found.__name__.partition(".")[0] in _TRACKERS:
        return f"report to {found.__name__}"
    if isinstance(found, FunctionType) and "register" in names and hasattr(found, "registry"):
        return f"register a function with {found.__name__}()"
    is_file = isinstance(found, io.IOBase) and not isinstance(found, io.StringIO | io.BytesIO)
    return "write to an open file" if is_file else None


def _called_first(parts: Sequence[nn.Module]) -> list[Any]:
    """Return the forwards of a unit's parts, and the hooks on them."""
    hooks = [hook for part in parts[1:] for kind in HOOKS for hook in vars(part).get(kind, {}).values()]
    return [*(found for part in parts for found in (type(part).forward, forward_of(part))), *hooks]


def _reached(parts: Sequence[nn.Module], within: Collection[str | None] | None = None) -> Iterator[FunctionType]:
    """Yield the functions that a unit's forward pass may call by name.

    Args:
        parts: the unit's modules.
        within: names of the Python modules whose functions are followed; ``None`` for all.
    """
    yield from _followed(_called_first(parts), parts, within)


def _followed(
    waiting: list[Any], parts: Sequence[nn.Module], within: Collection[str | None] | None = None
) -> Iterator[FunctionType]:
    """Yield functions, and those that they may call by name, as :func:`_reached` does."""
    met = set[int]()
    while waiting and len(met) < _MOST_FUNCTIONS:
        for function in plain_functions(waiting.pop()):
            if id(function) in met or is_trusted(function.__module__):
                continue
            met.add(id(function))
            if within is not None and function.__module__ not in within:
                continue
            yield function
            names = names_in(function.__code__)
            for found in _named(function, names, parts):
                waiting += functions_of(found, names)


def _named(function: FunctionType, names: frozenset[str], parts: Sequence[nn.Module]) -> Iterator[Any]:
    """Yield the objects that names in a function's code, or variables of its closure, may refer to."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue
    for name in names:
        if name in function.__globals__ and not _is_a_part(name, function.__code__, parts):
            yield function.__globals__[name]
        for part in parts:
            if name in vars(part):
                yield vars(part)[name]
            for base in type(part).__mro__:
                if name in vars(base) and not is_trusted(base.__module__):
                    yield vars(base)[name]


def _is_a_part(name: str, code: CodeType, parts: Sequence[nn.Module]) -> bool:
    """Return whether a name in a method's code can only mean a module or tensor of its own, not a global of that name.

    A global may be reached through any other object, and an attribute of the same name may wrap it.
    """
    if name not in _own_names(code):
        return False
    held = any(name in kept for part in parts for kept in (part._modules, part._parameters, part._buffers))
    return held and not any(name in vars(one) for part in parts for one in (part, *type(part).__mro__))


@functools.cache
def _own_names(code: CodeType) -> frozenset[str]:
    """Return the names that a method's code uses in ``self.name`` alone, its inner functions included."""
    first = code.co_varnames[0] if code.co_argcount else None
    own, others = set[str](), set[str]()
    for before, step in itertools.pairwise(dis.get_instructions(code)):
        if step.argval not in code.co_names:
            continue
        loads = step.opname in ("LOAD_ATTR", "LOAD_METHOD") and before.opname in ("LOAD_FAST", "LOAD_FAST_BORROW")
        (own if loads and before.argval == first else others).add(step.argval)
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(own - others).difference(*inner)


def functions_of(found: Any, names: frozenset[str]) -> list[Any]:
    """Return the functions that code with these names may call on an object."""
    if type(found) in weakref.ProxyTypes:
        return []
    if isinstance(found, FunctionType | MethodType | property | staticmethod | classmethod | functools.partial):
        return [found]
    if isinstance(found, ModuleType):
        return [] if is_trusted(found.__name__) else [vars(found)[name] for name in names if name in vars(found)]
    if isinstance(found, nn.Module):
        # Parts of the unit are followed separately; this may also be a module that the unit does not own.
        return [type(found).forward]
    if isinstance(found, _GeneratorContextManager):
        # Until it is entered, the function that made its generator.
        return [one for name, one in vars(found).items() if name == "func"]
    kind = found if isinstance(found, type) else type(found)
    if issubclass(kind, CustomOpDef):
        return [one for name in _OF_AN_OPERATOR if (one := vars(found).get(name)) is not None]
    if issubclass(kind, torch.autograd.Function):
        names = names.union(_CALLED_BY_AUTOGRAD)
    if is_trusted(kind.__module__):
        return []
    return [
        vars(base)[name]
        for base in kind.__mro__
        if not is_trusted(base.__module__)
        for name in (*names, *_CALLED_UNNAMED)
        if name in vars(base)
    ]


def _is_generator(found: Any, names: frozenset[str]) -> bool:
    if found is np:
        return "random" in names
    return any(found is one or getattr(found, "__self__", None) is one for one in _OF_THE_PROCESS)


@functools.cache
def _imports_one(code: CodeType) -> bool:
    """Return whether code, when it runs, imports Python's or NumPy's generator."""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME" and step.argval in ("random", "numpy.random"):
            return True
        if step.opname == "IMPORT_NAME" and step.argval == "numpy" and "random" in code.co_names:
            return True
    return any(_imports_one(constant) for constant in code.co_consts if isinstance(constant, CodeType))
