"""Follow by name what a unit's forward pass may call, to find random generators that recomputation does not restore.

A probe cannot see draws that begin only after a warm-up, but code that draws must name its generator.
"""

from __future__ import annotations

import dis
import functools
import random
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from autotune.mechanics.copies import own_dict

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
    "autotune",
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_THE_PROCESS: tuple[Any, ...] = (random, np.random, random._inst, np.random.mtrand._rand)
_OF_ITS_OWN = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_HOST, _OWN = "Python's or NumPy's generator", "a generator of its own"
_CALLED_UNNAMED = ("__init__", "__call__", "__enter__", "__exit__", "__iter__", "__next__")
_MOST_FUNCTIONS = 2000


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


def plain_functions(found: Any) -> list[FunctionType]:
    """Return the functions behind a method, a property or a decorated function: wrappers, and what they wrap."""
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, MethodType | staticmethod | classmethod):
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
    waiting = [found for part in parts for found in (type(part).forward, forward_of(part))]
    waiting += [
        hook for part in parts if part is not module for kind in HOOKS for hook in vars(part).get(kind, {}).values()
    ]
    met: set[int] = set()
    while waiting and len(met) < _MOST_FUNCTIONS:
        for function in plain_functions(waiting.pop()):
            if id(function) in met or is_trusted(function.__module__):
                continue
            met.add(id(function))
            found = _source_in(function, parts, waiting)
            if found is not None:
                return found
    return None


def _source_in(function: FunctionType, parts: list[nn.Module], waiting: list[Any]) -> str | None:
    """Return which generator a function names, or ``None``.

    Args:
        function: the function.
        parts: the unit's modules.
        waiting: list to which the functions that it may call are added.
    """
    names = names_in(function.__code__)
    if _imports_one(function.__code__):
        return _HOST
    for found in _named(function, names, parts):
        if _is_generator(found, names):
            return _HOST
        if isinstance(found, _OF_ITS_OWN):
            return _OWN
        waiting += functions_of(found, names)
    return None


def _named(function: FunctionType, names: frozenset[str], parts: list[nn.Module]) -> Iterator[Any]:
    """Yield the objects that names in a function's code, or variables of its closure, may refer to."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue
    for name in names:
        if name in function.__globals__:
            yield function.__globals__[name]
        for part in parts:
            if name in vars(part):
                yield vars(part)[name]
            for base in type(part).__mro__:
                if name in vars(base) and not is_trusted(base.__module__):
                    yield vars(base)[name]


def functions_of(found: Any, names: frozenset[str]) -> list[Any]:
    """Return the functions that code with these names may call on an object."""
    if type(found) in weakref.ProxyTypes:
        return []
    if isinstance(found, FunctionType | MethodType | property | staticmethod | classmethod):
        return [found]
    if isinstance(found, ModuleType):
        return [] if is_trusted(found.__name__) else [vars(found)[name] for name in names if name in vars(found)]
    if isinstance(found, nn.Module):
        # Parts of the unit are followed separately; this may also be a module that the unit does not own.
        return [type(found).forward]
    kind = found if isinstance(found, type) else type(found)
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
