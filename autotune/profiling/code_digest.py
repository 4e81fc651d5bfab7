"""A digest of the code that a training step may run, so that an edit of it makes a cached profile invalid."""

from __future__ import annotations

import dis
import functools
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from autotune.mechanics.copies import own_dict
from autotune.profiling.reachable_code import bound_in, names_in, plain_functions

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LARGEST_SETTING = 2**31
# Afterwards, no further code is followed.
_MOST_OBJECTS = 5000
_INSTALLED = tuple(
    str(Path(folder).resolve()) + "/"
    for folder in {*(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))}
)
_OWN = str(Path(__file__).resolve().parents[1]) + "/"


def code_digest(roots: Iterable[Any]) -> str:
    """Return a SHA-256 of what functions, methods, classes and modules may run, followed by name.

    It covers the code of functions outside of installed packages and of this one, their defaults, and the constants in
    their closures and globals, except those that some of this code assigns. It is the same in every process.

    Args:
        roots: callables, and modules of a model.
    """
    found, assigned = list[tuple[str, Any]](), set[str]()
    waiting, met = list(roots), dict[int, Any]()
    while waiting and len(met) < _MOST_OBJECTS:
        one = waiting.pop()
        if id(one) in met:
            continue
        # The object is kept, so that no other one gets its id.
        met[id(one)] = one
        for function in plain_functions(one):
            code = function.__code__
            if not _is_installed(code.co_filename):
                found.append(("code", _code(code)))
                assigned |= bound_in(code) | _rebound_in(code)
                found += [("constant", [name, _plain(value)]) for name, value in _constants(function)]
            waiting += _named(function)
        waiting += _within(one)
        # What a job of a user's own objects holds, such as a loader or a list of batches.
        held = own_dict(one) if type(one).__module__.partition(".")[0] == "autotune" else {}
        found += [("constant", [name, _plain(value)]) for name, value in held.items()]
        waiting += [value for value in held.values() if not isinstance(value, _PLAIN)]
    kept = {json.dumps([kind, told]) for kind, told in found if kind == "code" or told[0] not in assigned}
    return hashlib.sha256("\n".join(sorted(kept)).encode()).hexdigest()


@functools.cache
def _is_installed(file: str) -> bool:
    path = str(Path(file).resolve())
    return path.startswith((*_INSTALLED, _OWN)) or file.startswith("<frozen")


def _code(code: CodeType) -> list[Any]:
    """Return what a function does, without its place in a file."""
    constants = [_code(one) if isinstance(one, CodeType) else _plain(one) for one in code.co_consts]
    names = [list(code.co_names), list(code.co_varnames), list(code.co_freevars)]
    return [code.co_name, code.co_code.hex(), constants, names]


def _plain(value: Any, depth: int = 4) -> str:
    """Return a constant as text that is the same in every process; of other objects, only the type."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if depth and isinstance(value, (tuple, list)):
        return f"({', '.join(_plain(one, depth - 1) for one in value)})"
    if depth and isinstance(value, (set, frozenset)):
        return f"set {sorted(_plain(one, depth - 1) for one in value)}"
    return type(value).__qualname__


@functools.cache
def _rebound_in(code: CodeType) -> frozenset[str]:
    """Return the names of outer functions' variables that a function's code assigns, including its inner functions."""
    inner = (_rebound_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    own = (step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_DEREF", "DELETE_DEREF"))
    return frozenset(name for name in own if name in code.co_freevars).union(*inner)


def settings_of(module: nn.Module) -> list[list[str]]:
    """Return names and values of a module's plain attributes, and of those of its configuration.

    They decide what a forward pass does although the code is the same: the probability of a dropout, the implementation
    of an attention.
    """
    held = {"": module, **{name: one for name, one in vars(module).items() if _is_configuration(one)}}
    return [
        [owner, name, _plain(value)]
        for owner, one in held.items()
        for name, value in own_dict(one).items()
        if isinstance(value, (*_PLAIN, tuple, list)) and name != "training" and not _is_hash(value)
    ]


def _is_hash(value: Any) -> bool:
    """Return whether a value may be a hash or an address, which differ from process to process."""
    return isinstance(value, int) and abs(value) >= _LARGEST_SETTING


def _is_configuration(value: Any) -> bool:
    """Return whether an object of a module only holds settings."""
    if isinstance(value, (type, nn.Module, torch.Tensor, ModuleType)) or callable(value):
        return False
    return bool(own_dict(value))


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a function's closure, its defaults, and the globals that it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue
    for place, value in enumerate(function.__defaults__ or ()):
        yield f"default {place}", value
    yield from (function.__kwdefaults__ or {}).items()
    if not _is_installed(function.__code__.co_filename):
        known = function.__globals__
        yield from ((name, known[name]) for name in names_in(function.__code__) if name in known)


def _constants(function: FunctionType) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in _variables(function) if isinstance(value, (*_PLAIN, tuple)))


def _named(function: FunctionType) -> list[Any]:
    """Return the objects that a function may use: functions, classes and modules of a model."""
    names, found = names_in(function.__code__), []
    for _, value in _variables(function):
        if isinstance(value, ModuleType):
            found += [vars(value)[name] for name in names if name in vars(value) and not _is_foreign(value)]
        elif not isinstance(value, (*_PLAIN, tuple)):
            found.append(value)
    return found


def _is_foreign(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return not isinstance(file, str) or _is_installed(file)


def _within(value: Any) -> list[Any]:
    """Return the object of a method, what a partial function calls, the functions of a class, or a module's parts."""
    if isinstance(value, FunctionType):
        return []
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, nn.Module):
        own = [one for one in own_dict(value).values() if isinstance(one, FunctionType | MethodType)]
        return [type(value), *own, *value._modules.values()]
    kind = value if isinstance(value, type) else type(value)
    return [
        one
        for base in kind.__mro__
        for one in vars(base).values()
        if isinstance(one, FunctionType | staticmethod | classmethod | property) and _is_of_the_user(one)
    ]


def _is_of_the_user(found: Any) -> bool:
    return any(not _is_installed(one.__code__.co_filename) for one in plain_functions(found))
