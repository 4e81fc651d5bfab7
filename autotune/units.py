"""Name the tunable pieces of a model.

A *unit* is a module whose compute precision can be chosen. If it belongs to a run of like blocks, its activations can
also be recomputed. This file finds units in any ``nn.Module``; it does not depend on plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from autotune.errors import JobError
from autotune.io.documents import STRICT

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One tunable piece of a model.

    Attributes:
        name: the module's fully qualified name.
        kind: the module's class name.
        recomputable: whether ``storage`` can be chosen as well as ``precision``.
        parameter_names: fully qualified names of the unit's parameters; a parameter that several units share is
            counted only in the first of them.
        num_parameters: number of elements of those parameters.
    """

    __pydantic_config__ = STRICT

    name: str
    kind: str
    recomputable: bool
    parameter_names: tuple[str, ...]
    num_parameters: int


def find_units(model: nn.Module) -> tuple[Unit, ...]:
    """Find the units of a model, in the order in which its modules are registered.

    Every outermost run of two or more neighbouring siblings of one class, in a ``ModuleList`` or a
    ``Sequential``, gives units with precision and storage. A sibling that is itself a container with such a
    run inside (a stage of a ResNet) is searched instead. Blocks that come in turns (attention and feed-forward
    networks) in a ``ModuleList`` or a ``ModuleDict``, or in those within it, are such units as well, if two or more
    have the same class. Only a model that has none of these is searched for two or more of a kind among the blocks
    that a module holds as its attributes (``down1`` and ``down2`` of a U-Net).
    The largest remaining subtrees with parameters and without units (embedding, stem, head) become units with
    precision only; the model itself is never a unit. A module with several names is one unit, under its first name.
    """
    recomputable: list[str] = []
    taken: set[nn.Module] = set()
    found: set[nn.Module] = set()
    for name, module in list(_runs(model, "")) or _held(model, ""):
        if module not in taken and found.isdisjoint(module.modules()):
            recomputable.append(name)
            taken.update(module.modules())
            found.add(module)
    names = [*recomputable, *_remainders(model, "", taken)]
    order = {name: index for index, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    return _describe(model, sorted(names, key=order.__getitem__), frozenset(recomputable))


def units_of(model: nn.Module, names: Sequence[str] | None) -> tuple[Unit, ...]:
    """Return the units that a user named, or those of :func:`find_units` if ``names`` is ``None``.

    Raises:
        JobError: as :func:`name_units` does.
    """
    return find_units(model) if names is None else name_units(model, names)


def name_units(model: nn.Module, names: Sequence[str]) -> tuple[Unit, ...]:
    """Return the units that a user named; each can be recomputed.

    Raises:
        JobError: if a name is not a module of the model, or two of the modules overlap.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for index, name in enumerate(names):
        if not name or name not in modules:
            raise JobError(f"unit {name!r} is not a module of the model", where="units", allowed=_sample(modules))
        parts = set(modules[name].modules())
        for other in names[:index]:
            if modules[other] in parts or modules[name] in set(modules[other].modules()):
                raise JobError(f"units {other!r} and {name!r} overlap", where="units", allowed="disjoint modules")
    return _describe(model, names, frozenset(names))


def _describe(model: nn.Module, names: Sequence[str], recomputable: frozenset[str]) -> tuple[Unit, ...]:
    modules = dict(model.named_modules(remove_duplicate=False))
    counted: set[int] = set()
    units = []
    for name in names:
        own = [
            (f"{name}.{key}", parameter)
            for key, parameter in modules[name].named_parameters()
            if id(parameter) not in counted
        ]
        counted.update(id(parameter) for _, parameter in own)
        units.append(
            Unit(
                name=name,
                kind=type(modules[name]).__name__,
                recomputable=name in recomputable,
                parameter_names=tuple(key for key, _ in own),
                num_parameters=sum(parameter.numel() for _, parameter in own),
            )
        )
    return tuple(units)


def _runs(module: nn.Module, prefix: str, turns: Collection[nn.Module] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yield the members of every outermost run below a module, and the blocks that come in turns.

    Args:
        module: the module to search.
        prefix: the module's name.
        turns: the blocks that come in turns in the containers around it.
    """
    from torch import nn

    children = [(_join(prefix, key), child) for key, child in module.named_children()]
    if not _is_sequence(module):
        for name, child in children:
            yield from _runs(child, name)
        return
    turns = {*turns, *_in_turns(module)}
    is_ordered = not isinstance(module, nn.ModuleDict)
    for _, group in groupby(children, key=lambda item: type(item[1])):
        run = list(group)
        if is_ordered and len(run) >= 2 and not any(_opens(child) for _, child in run):
            # Consecutive activations or dropouts are not worth tuning.
            yield from ((name, child) for name, child in run if _has_parameters(child))
        else:
            for name, child in run:
                yield from ((name, child),) if child in turns else _runs(child, name, turns)


def _in_turns(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a list or dictionary, and of those within it, of whose class there are two or more.

    A block has two or more layers, and no run inside: a stage with one is searched instead.
    """
    found = [one for one in _members(module) if _num_layers(one) >= 2 and not _is_sequence(one)]
    kinds = Counter(map(type, found))
    return [one for one in found if kinds[type(one)] >= 2 and not any(True for _ in _runs(one, ""))]


def _held(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost blocks of two or more layers of which a module holds two or more of a kind as attributes.

    Args:
        module: the module to search.
        prefix: the module's name.
    """
    blocks = {_join(prefix, key): child for key, child in module.named_children() if _num_layers(child) >= 2}
    kinds = Counter(map(_kind, blocks.values()))
    for name, child in blocks.items():
        if kinds[_kind(child)] >= 2 and _is_callable(child):
            yield name, child
        else:
            yield from _held(child, name)


def _kind(module: nn.Module) -> tuple[type, ...]:
    """Return a module's class, and the classes of the members of a ``Sequential``."""
    from torch import nn

    return (type(module), *map(type, module if isinstance(module, nn.Sequential) else ()))


def _num_layers(module: nn.Module) -> int:
    """Return the number of modules that have parameters of their own."""
    return sum(any(True for _ in part.parameters(recurse=False)) for part in module.modules())


def _members(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in a list or dictionary, and in those within it."""
    from torch import nn

    for child in module.children() if isinstance(module, nn.ModuleList | nn.ModuleDict) else ():
        yield from _members(child) if _only_holds(child) else (child,)


def _opens(module: nn.Module) -> bool:
    """Return whether a sibling is a container to look into, not a unit."""
    return _only_holds(module) or (_is_sequence(module) and any(True for _ in _runs(module, "")))


def _only_holds(module: nn.Module) -> bool:
    """Return whether a module is a container that is not called itself."""
    from torch import nn

    return isinstance(module, nn.ModuleList) or (isinstance(module, nn.ModuleDict) and not _is_callable(module))


def _remainders(module: nn.Module, prefix: str, taken: set[nn.Module]) -> Iterator[str]:
    """Yield the largest subtrees with parameters and without units.

    Args:
        module: the module to search.
        prefix: the module's name.
        taken: the units so far and the modules in them; yielded subtrees are added.
    """
    for key, child in module.named_children():
        name = _join(prefix, key)
        if child in taken or not _has_parameters(child):
            continue
        parts = set(child.modules())
        if parts & taken or not _is_callable(child):
            yield from _remainders(child, name, taken)
        else:
            taken |= parts
            yield name


def _is_sequence(module: nn.Module) -> bool:
    from torch import nn

    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _is_callable(module: nn.Module) -> bool:
    """Return whether a module has a forward of its own (a ``ModuleList`` or ``ModuleDict`` has none)."""
    from torch import nn

    return getattr(type(module), "forward", None) is not nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _sample(modules: dict[str, nn.Module], limit: int = 12) -> list[str]:
    names = [name for name in modules if name]
    return names if len(names) <= limit else [*names[:limit], "..."]
