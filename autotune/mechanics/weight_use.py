"""Find out how a loss uses a model's weights, to know which modules can gather their own on several ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autotune.errors import JobError
from autotune.mechanics.trees import tensors

# Operations whose names end like those that write to a tensor.
_KEEPING = ("requires_grad_", "detach_")
_WRITING = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightUse:
    """How a loss uses a model.

    Attributes:
        contained: the modules whose weights are used by their own forward alone, and are not shared with others.
        calls: the named modules in the order of their calls.
    """

    contained: tuple[str, ...]
    calls: tuple[str, ...]


def weight_use(
    model: nn.Module, names: Sequence[str], run: Callable[[], object], *, where: str = "engine fsdp2"
) -> WeightUse:
    """Return how a loss uses a model.

    Only weights of contained modules can be gathered when the module is called, and released after that. Modules whose
    output is written to in place are not contained: the write may remove the hook on the output that gathers weights
    for backward. Neither are those whose output holds tensors that torch does not find.

    Args:
        model: the model.
        names: names of modules that do not overlap.
        run: function that computes the loss once.
        where: what needs to know it, for errors.

    Raises:
        JobError: if the loss uses parts of the model before it calls the model, or without calling it, or if it writes
            to a weight.
    """
    owners: dict[int, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        inside = next((one for one in names if name == one or name.startswith(f"{one}.")), "")
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(inside)
    shared = {one for found in owners.values() if len(found) > 1 for one in found}
    weights = {one.untyped_storage().data_ptr(): name for name, one in model.named_parameters() if one.numel()}
    watched = _Watched(
        {key: next(iter(found)) if len(found) == 1 else "" for key, found in owners.items()},
        weights,
    )
    with watched.of(model, names), watched:
        run()
    if not watched.called_model:
        raise _uncalled("but not the model", where)
    if watched.early:
        raise _uncalled("before it calls the model", where)
    if watched.changed:
        raise JobError(
            f"loss writes to parameter {watched.changed[0]}, of which it has only a gathered copy",
            where=where,
            allowed="a model whose weights only the optimizer changes, or --engine torch",
        )
    left = shared | watched.elsewhere | watched.hidden | watched.written()
    called = set(watched.calls)
    return WeightUse(
        contained=tuple(name for name in names if name in called and name not in left), calls=tuple(watched.calls)
    )


def _uncalled(how: str, where: str) -> JobError:
    return JobError(
        f"loss calls parts of the model, {how}" if how.startswith("but") else f"loss uses parts of the model {how}",
        where=where,
        allowed="a loss that first calls the model, which gathers the weights that belong to no unit",
    )


class _Watched(TorchFunctionMode):
    """Mode that finds the modules whose weights are used while none of them runs.

    Args:
        own: the name of the module that each weight belongs to, by the weight's id; empty for none or several.
        weights: the name of each weight by its address.

    Attributes:
        changed: names of the weights that were written to.
        elsewhere: names of the modules whose weights were used elsewhere.
        hidden: names of the modules whose outputs hold tensors that torch does not find.
        calls: names of the modules that were called, in that order.
        called_model: whether the model was called.
        early: whether a part of the model was used before the model was called.
    """

    def __init__(self, own: Mapping[int, str], weights: Mapping[int, str]) -> None:
        super().__init__()
        self._own = own
        self._weights = weights
        self.changed: list[str] = []
        self._running: list[str] = []
        self.elsewhere: set[str] = set()
        self.hidden: set[str] = set()
        self.calls: list[str] = []
        self.called_model = self.early = False
        # Each output's module and version when it was returned.
        self._outputs: list[tuple[str, torch.Tensor, int]] = []

    @contextmanager
    def of(self, model: nn.Module, names: Sequence[str]) -> Iterator[None]:
        """Watch a model's calls during the body."""
        handles = [hook for name in names for hook in self._watch(model.get_submodule(name), name)]
        handles.append(model.register_forward_pre_hook(self._called, prepend=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def written(self) -> set[str]:
        """Return the names of the modules whose outputs were written to in place."""
        return {name for name, output, version in self._outputs if output._version != version}

    def _called(self, *_: object) -> None:
        self.called_model = True

    def _watch(self, module: nn.Module, name: str) -> list[Any]:
        def begin(*_: object) -> None:
            self._running.append(name)
            self.calls.append(name)
            self.early |= not self.called_model

        def end(_module: nn.Module, _args: object, output: Any) -> None:
            self._running.pop()
            self._outputs += [(name, one, one._version) for one in tensors(output)]
            if len(_found_by_torch(output)) < len(_all_tensors(output)):
                self.hidden.add(name)

        return [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _WRITING or (name.endswith("_") and not name.endswith("__") and name not in _KEEPING):
            written = tensors([args[:1], (kwargs or {}).get("out")])
            places = [one.untyped_storage().data_ptr() for one in written if one.layout is torch.strided]
            self.changed += [self._weights[place] for place in places if place in self._weights]
        # Reading an attribute, such as a dtype, needs no gathered weight.
        if name != "__get__" or isinstance(found, torch.Tensor):
            used = {id(value) for value in tensors([args, kwargs or {}])}.intersection(self._own)
            self.early |= bool(used) and not self.called_model
            self.elsewhere |= {self._own[one] for one in used}.difference(self._running, {""})
        return found


def _found_by_torch(output: Any) -> list[torch.Tensor]:
    """Return the tensors that FSDP2 finds in a module's output."""
    if isinstance(output, torch.Tensor):
        return [output]
    return [one for part in _entries(output) for one in _found_by_torch(part)]


def _all_tensors(output: Any, depth: int = 4) -> list[torch.Tensor]:
    """Return the tensors in a module's output, those in attributes of objects included."""
    if isinstance(output, torch.Tensor):
        return [output]
    parts = _entries(output) or list(getattr(output, "__dict__", {}).values())
    return [one for part in parts for one in _all_tensors(part, depth - 1)] if depth else []


def _entries(output: Any) -> list[Any]:
    if isinstance(output, dict):
        return list(output.values())
    if isinstance(output, list | tuple):
        return list(output)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, field.name) for field in dataclasses.fields(output)]
    return []
