"""A digest of the code that a training step may run, so that an edit of it makes a cached profile invalid."""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import importlib.util
import json
import re
import sys
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
_SETTINGS = (tuple, list, dict, set, frozenset, enum.Enum, torch.dtype, torch.device, torch.Tensor)
_METHODS = (FunctionType, staticmethod, classmethod, property, functools.cached_property)
# Attributes of every module, which follow from its parts.
_OF_MODULES = frozenset(vars(nn.Module()))
# Methods that change what containers contain.
_CHANGING = frozenset(
    ("append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "popleft", "remove", "clear")
)
# Longer containers are told by their length, larger tensors by their shape.
_MOST_ITEMS, _FEW_NUMBERS = 256, 16
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
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

    It covers the code of functions outside of installed packages and of this one, their defaults, and the settings that
    they find in closures, globals, modules, classes and objects, except those that some of this code changes. It is the
    same in every process.

    Args:
        roots: callables, and modules of a model.
    """
    found, changed = list[tuple[str, Any]](), set[str]()
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
                changed |= _changed_in(code)
                variables = dict(_variables(function))
                if _changes_items(code):
                    changed |= {name for name, value in variables.items() if isinstance(value, list | dict | set)}
                found += [("constant", [name, _plain(value)]) for name, value in variables.items() if _is_told(value)]
                found += [("import", [name, _source_digest(name)]) for name in sorted(_imported_in(code))]
            waiting += _named(function)
        waiting += _within(one)
        held = _held(one)
        found += [("constant", [name, _plain(value)]) for name, value in held.items() if _is_told(value)]
        waiting += [value for value in held.values() if not isinstance(value, _PLAIN)]
    kept = {json.dumps([kind, told]) for kind, told in found if kind != "constant" or told[0] not in changed}
    return hashlib.sha256("\n".join(sorted(kept)).encode()).hexdigest()


def _is_told(value: Any) -> bool:
    """Return whether a value is a setting that can be told as text, rather than code."""
    return isinstance(value, (*_PLAIN, *_SETTINGS)) or _is_configuration(value)


def _held(one: Any) -> dict[str, Any]:
    """Return the settings and objects by name that an object or a class of the user's holds, or a partial function."""
    if isinstance(one, functools.partial):
        return {**{f"argument {place}": value for place, value in enumerate(one.args)}, **one.keywords}
    if isinstance(one, type):
        held: dict[str, Any] = {}
        for base in reversed(one.__mro__):
            if not _is_foreign(sys.modules.get(base.__module__)):
                held |= {name: value for name, value in vars(base).items() if not name.startswith("__")}
        return {name: value for name, value in held.items() if _is_told(value)}
    if isinstance(one, ModuleType | FunctionType | MethodType | nn.Module | torch.Tensor):
        return {}
    own = type(one).__module__.partition(".")[0] == "autotune"
    users = not _is_foreign(sys.modules.get(type(one).__module__))
    return {**_held(type(one)), **own_dict(one)} if users else own_dict(one) if own else {}


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
    """Return a setting as text that is the same in every process; of other objects, only the type."""
    if isinstance(value, str):
        return _ADDRESS.sub("", repr(value))
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name} {_plain(value.value, depth - 1)}" if depth else value.name
    if isinstance(value, (*_PLAIN, torch.dtype, torch.device, torch.Size)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        few = value.layout is torch.strided and value.numel() <= _FEW_NUMBERS and value.device.type != "meta"
        return f"tensor {tuple(value.shape)} {value.dtype} {value.detach().tolist() if few else ''}"
    if depth and isinstance(value, (tuple, list, set, frozenset, dict)):
        return _plain_items(value, depth)
    if depth and _is_configuration(value):
        held = {name: one for name, one in own_dict(value).items() if not _is_hash(one)}
        return f"{type(value).__qualname__} {_plain_items(held, depth)}"
    return type(value).__qualname__


def _plain_items(value: Any, depth: int) -> str:
    if len(value) > _MOST_ITEMS:
        return f"{type(value).__qualname__} of {len(value)}"
    if isinstance(value, dict):
        pairs = (f"{_plain(key, depth - 1)}: {_plain(one, depth - 1)}" for key, one in value.items())
        return f"{{{', '.join(sorted(pairs))}}}"
    if isinstance(value, (set, frozenset)):
        return f"set {sorted(_plain(one, depth - 1) for one in value)}"
    return f"({', '.join(_plain(one, depth - 1) for one in value)})"


@functools.cache
def _changed_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals, outer variables and attributes that a function's code assigns.

    What is assigned when an object is made counts as its setting.
    """
    inner = (_changed_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    making = code.co_name in ("__init__", "__post_init__", "__new__", "__setstate__")
    own = (
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_ATTR", "DELETE_ATTR") and not making
    )
    return bound_in(code) | _rebound_in(code) | frozenset(own).union(*inner)


@functools.cache
def _changes_items(code: CodeType) -> bool:
    """Return whether a function's code may change what lists and dictionaries contain."""
    if any(step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") for step in dis.get_instructions(code)):
        return True
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return not _CHANGING.isdisjoint(code.co_names) or any(map(_changes_items, inner))


@functools.cache
def _imported_in(code: CodeType) -> frozenset[str]:
    """Return the names of the modules that a function's code imports when it runs."""
    inner = (_imported_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    own = (step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME" and step.argval)
    return frozenset(own).union(*inner)


def _source_digest(name: str) -> str:
    """Return a SHA-256 of a module's source; of an installed module, or one that cannot be found, nothing."""
    try:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None or not found.has_location or _is_installed(found.origin):
            return ""
        return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()
    except (ImportError, ValueError, OSError):
        return ""


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
        if isinstance(value, (*_PLAIN, *_SETTINGS)) and name not in _OF_MODULES and not _is_hash(value)
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
        known, names = function.__globals__, sorted(names_in(function.__code__))
        for name in names:
            if name in known:
                yield name, known[name]
                if isinstance(known[name], ModuleType) and not _is_foreign(known[name]):
                    held = vars(known[name])
                    yield from ((other, held[other]) for other in names if other in held and _is_told(held[other]))


def _named(function: FunctionType) -> list[Any]:
    """Return the objects that a function may use: functions, classes, containers and modules of a model."""
    # In an order that does not depend on the process.
    names, found = sorted(names_in(function.__code__)), []
    for _, value in _variables(function):
        if isinstance(value, ModuleType):
            found += [vars(value)[name] for name in names if name in vars(value) and not _is_foreign(value)]
        elif not isinstance(value, _PLAIN):
            found.append(value)
    return found


def _is_foreign(module: ModuleType | None) -> bool:
    """Return whether a module is installed, or has no file, as the main module of a notebook."""
    file = getattr(module, "__file__", None)
    return not isinstance(file, str) or _is_installed(file)


def _within(value: Any) -> list[Any]:
    """Return the object of a method, what a partial function calls, the functions of a class, or a module's parts."""
    if isinstance(value, FunctionType):
        return []
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func]
    if isinstance(value, (tuple, list, set, frozenset, dict)):
        items = list(value.values()) if isinstance(value, dict) else list(value)
        return [one for one in items[:_MOST_ITEMS] if not isinstance(one, _PLAIN)]
    if isinstance(value, property):
        return [one for one in (value.fset, value.fdel) if one is not None]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, nn.Module):
        own = [one for one in own_dict(value).values() if isinstance(one, FunctionType | MethodType)]
        return [type(value), *own, *value._modules.values()]
    kind = value if isinstance(value, type) else type(value)
    return [
        one
        for base in kind.__mro__
        for one in vars(base).values()
        if isinstance(one, _METHODS) and _is_of_the_user(one)
    ]


def _is_of_the_user(found: Any) -> bool:
    found = found.func if isinstance(found, functools.cached_property) else found
    return any(not _is_installed(one.__code__.co_filename) for one in plain_functions(found))
