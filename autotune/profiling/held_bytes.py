"""Bytes that a model and its optimizer hold between steps, counted cheaply enough for each step.

They grow after a run was profiled where optimizers begin to keep more (Lookahead), where buffers collect, and where
parameters are replaced by larger ones (grids that are refined, splats that are split).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from autotune.mechanics.memory_meter import content_bytes

# Counts after which a model's modules are listed again, and the most steps without a count.
_WALK_EVERY = 16
# Containers in which optimizers keep tensors.
_CONTAINERS = (list, tuple, dict, deque)
# Counting may take this share of a run's time, or these seconds per step.
_SHARE, _SECONDS = 0.002, 4e-5
# A model that grows by this factor is another one: what its units compute may have grown with it.
_OTHERS = 1.02
# What a step needs for each byte of a model: a parameter's gradient and two values in the update, or what a unit
# computes from a buffer.
_BESIDE = 3


@dataclass(frozen=True, slots=True)
class Held:
    """What a model and its optimizer hold.

    Attributes:
        total: bytes of parameters, buffers and the optimizer's state.
        model: bytes of parameters and buffers alone.
    """

    total: int = 0
    model: int = 0

    def beyond(self, other: Held) -> int:
        """Return how many bytes more a step needs than it did when the other was held; at least 0."""
        return max(self.total - other.total, 0) + _BESIDE * max(self.model - other.model, 0)

    def outgrows(self, other: Held) -> bool:
        """Return whether the model has grown so much that what a step needs is no longer known."""
        return self.model > _OTHERS * other.model


class HeldBytes:
    """Counts what a model and its optimizer hold.

    Modules that are added or removed are noticed after ``_WALK_EVERY`` counts at the latest.

    Args:
        model: the model.
        optimizer: its optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._owners: list[dict[str, Any]] = []
        # What was there when the optimizer's items were last looked at: which of them are tensors beside the model's.
        self._there: list[object] = []
        self._are_new: list[bool] = []
        self._has_containers = False
        self._counts = self._pause = 0
        self._cost_s = math.inf
        self._latest = Held()

    def latest(self, step_s: float) -> Held:
        """Return what is held now, or was at the last count: long lists are not counted before each short step.

        Args:
            step_s: mean seconds of a step.
        """
        if self._pause > 0:
            self._pause -= 1
            return self._latest
        began = time.perf_counter()
        found = self.count()
        # A count that the machine interrupted takes longer than it need.
        self._cost_s = min(self._cost_s, time.perf_counter() - began)
        self._pause = min(int(self._cost_s / max(_SHARE * step_s, _SECONDS)), _WALK_EVERY)
        return found

    def count(self) -> Held:
        """Return what is held now."""
        if self._counts % _WALK_EVERY == 0:
            parts = (owner for part in self._model.modules() for owner in (part._parameters, part._buffers))
            # DeepSpeed's ZeRO-3 gathers weights when its own kind of dictionary is read.
            self._owners = [owner for owner in parts if owner and type(owner) is dict]
        self._counts += 1
        own = {id(one): one for owner in self._owners for one in owner.values() if one is not None}
        kept = [one for group in self._optimizer.param_groups for one in group["params"]]
        kept += [one for entry in self._optimizer.state.values() if isinstance(entry, dict) for one in entry.values()]
        # Another object may have come to the address of one that is gone.
        there = [*own, *map(id, kept), *map(type, kept)]
        if there != self._there:
            self._there = there
            self._has_containers = any(isinstance(one, _CONTAINERS) for one in kept)
            met = set(own)
            self._are_new = [self._is_new(one, met) for one in kept]
        if self._has_containers:
            # What they hold may change while they stay.
            others: Collection[Any] = {id(one): one for one in _tensors_in(kept) if id(one) not in own}.values()
        else:
            others = [*compress(kept, self._are_new)]
        model = _bytes_of(own.values())
        self._latest = Held(model + _bytes_of(others), model)
        return self._latest

    @staticmethod
    def _is_new(one: object, met: set[int]) -> bool:
        """Return whether an item is a tensor that was not met, and note that it is now."""
        is_new = isinstance(one, torch.Tensor) and id(one) not in met
        met.add(id(one))
        return is_new


def _bytes_of(tensors: Collection[torch.Tensor]) -> int:
    try:
        return sum(map(attrgetter("nbytes"), tensors))
    except RuntimeError:
        # Only strided tensors know their bytes.
        return sum(one.nbytes if one.layout is torch.strided else content_bytes([one]) for one in tensors)


def _tensors_in(items: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among items and in containers among them; a general walk of trees takes ten times as long."""
    for one in items:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, _CONTAINERS):
            yield from _tensors_in(one.values() if isinstance(one, dict) else one)
