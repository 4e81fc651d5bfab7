"""Settings of ``attach`` that few users change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ParamSpec, TypeVar, get_args

from autotune.choices import STORAGES
from autotune.errors import AttachError
from autotune.job import Batching, LearningRateRule
from autotune.report_to import LIBRARIES

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of an attached run whose defaults are right for most.

    Attributes:
        units: names of the modules to tune; ``None`` finds them automatically.
        accumulation_choices: the k that plans may choose from, where the mode allows it; use ``(1,)`` for a loss that
            couples the samples of a batch, such as a contrastive one.
        batching: ``fixed``: k cuts each batch. ``adaptive``, in mode ``tolerant``: a step consumes k batches, as the
            gradient's noise warrants, and ``step()`` returns ``False`` until it has them.
        lr_rule: under adaptive batching, ``linear`` or ``sqrt`` multiply the learning rate of a step by its samples
            over a batch's; ``none`` leaves it.
        storages: names of storages that plans may choose beside ``save`` and ``recompute``. ``selective`` and
            ``rebuild`` are bit-identical. ``compress8`` and ``compress4`` round activations and need mode ``tolerant``;
            passes beside some steps show in which units they change no gradient by more than a fifth.
        name: name of the run; ``None`` for the name of the model's class.
        report_to: ``mlflow``, ``tensorboard`` or ``wandb``: a separate process sends the decision log there during the
            run. ``none``: the log is only written.

    Raises:
        AttachError: if the value of a setting is not allowed.
    """

    units: Sequence[str] | None = None
    accumulation_choices: Sequence[int] = (1, 2, 4, 8)
    batching: Batching = "fixed"
    lr_rule: LearningRateRule = "none"
    storages: Sequence[str] = ()
    name: str | None = None
    report_to: str = "none"

    def __post_init__(self) -> None:
        if self.units is not None:
            listed = isinstance(self.units, Sequence) and not isinstance(self.units, str)
            good = listed and all(isinstance(name, str) for name in self.units)
            _require(good, "units", self.units, "names of modules, or None")
            object.__setattr__(self, "units", tuple(self.units))
        choices = tuple(self.accumulation_choices) if isinstance(self.accumulation_choices, Sequence) else ()
        whole = bool(choices) and all(type(k) is int and k >= 1 for k in choices)
        ascending = whole and sorted(set(choices)) == list(choices)
        _require(ascending, "accumulation_choices", self.accumulation_choices, "whole numbers >= 1, ascending")
        object.__setattr__(self, "accumulation_choices", choices)
        known = [
            str(storage)
            for storage in STORAGES
            if not (storage.needs_accelerator or storage.keeps_gathered or storage.compile_budget)
        ]
        named = isinstance(self.storages, Sequence) and not isinstance(self.storages, str)
        good = named and all(one in known for one in self.storages)
        _require(good, "storages", self.storages, f"some of {', '.join(known)}")
        object.__setattr__(self, "storages", tuple(self.storages))
        _require(self.batching in get_args(Batching), "batching", self.batching, ", ".join(get_args(Batching)))
        rules = get_args(LearningRateRule)
        _require(self.lr_rule in rules, "lr_rule", self.lr_rule, ", ".join(rules))
        follows = self.lr_rule == "none" or self.batching == "adaptive"
        _require(follows, "lr_rule", self.lr_rule, "none, but for adaptive batching")
        _require(self.name is None or isinstance(self.name, str), "name", self.name, "text, or None")
        _require(self.report_to in tuple(LIBRARIES), "report_to", self.report_to, ", ".join(LIBRARIES))


def settings_of(settings: object) -> Settings:
    """Return the settings given to ``attach``; the defaults for ``None``.

    Args:
        settings: the settings.

    Raises:
        AttachError: if they are of another type.
    """
    if settings is not None and not isinstance(settings, Settings):
        raise AttachError(f"settings is {settings!r}", where="attach", allowed="autotune.Settings(...)")
    return settings or Settings()


def without_settings(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a function so that it refuses settings as keywords and refers to :class:`Settings`.

    Args:
        function: the function.
    """
    names = {item.name for item in fields(Settings)}

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name in names:
                raise AttachError(f"{name} is a setting", where="attach", allowed=f"settings=Settings({name}=...)")
        return function(*args, **kwargs)

    return checked


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise AttachError(f"{name} is {value!r}", where="settings", allowed=allowed)
