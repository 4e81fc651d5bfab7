"""Choices of a layout as people write them: ``tp=8,pp=2,checkpointing=full``, ``400GB/s``, numbers of devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from autotune.cost_model.cluster.layout import CHECKPOINTING
from autotune.errors import InputError

_WHERE = "--plan"
_YES = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
_LARGEST = 10**7
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(G|M|T)(B|bit|b)(?:/s|ps)", re.IGNORECASE)
_SCALE = {"m": 1e6, "g": 1e9, "t": 1e12}


def _count(name: str, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _LARGEST:
        raise InputError(f"{name} is {text!r}", where=_WHERE, allowed=f"a whole number from 1 to {_LARGEST:,}")
    return int(text)


def _stage(name: str, text: str) -> int:
    if text not in {"1", "2", "3"}:
        raise InputError(f"{name} is {text!r}", where=_WHERE, allowed=(1, 2, 3))
    return int(text)


def _flag(name: str, text: str) -> bool:
    if text.lower() not in _YES:
        raise InputError(f"{name} is {text!r}", where=_WHERE, allowed="yes or no")
    return _YES[text.lower()]


def _kind(name: str, text: str) -> str:
    if text not in CHECKPOINTING:
        raise InputError(f"{name} is {text!r}", where=_WHERE, allowed=CHECKPOINTING, given=text)
    return text


def share(name: str, text: str, where: str = _WHERE) -> float:
    """Return a share from text such as ``0.5%`` or ``0.005``.

    Args:
        name: what it is a share of, for errors.
        text: the share.
        where: the option, for errors.

    Raises:
        InputError: if it is not above 0 and at most 1.
    """
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise InputError(f"{name} is {text!r}", where=where, allowed="a share above 0 and at most 1, or 100%")
    return value


# The choices that the search makes where they are not given, and those that it leaves at their defaults.
SEARCHED: Mapping[str, Callable[[str, str], Any]] = MappingProxyType(
    {
        **dict.fromkeys(("dp", "replicas", "shard", "tp", "pp", "cp", "micro_batch", "virtual_stages"), _count),
        "k": _count,
        "checkpointing": _kind,
        "checkpointed": share,
        "zero": _stage,
    }
)
SETTINGS: Mapping[str, Callable[[str, str], Any]] = MappingProxyType(
    dict.fromkeys(
        (
            "compile",
            "float8",
            "fused_attention",
            "fused_loss",
            "sequence_parallel",
            "async_tp",
            "offload",
        ),
        _flag,
    )
)
# Names of the layout's fields where people use others.
_FIELDS = {"k": "micro_batches", "zero": "zero_stage", "compile": "compiled"}


def parse_choices(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the choices that a search is to leave alone, and the settings of all layouts, by field of the layout.

    Args:
        text: names and values, as in ``tp=8,checkpointing=full,compile=no``.

    Raises:
        InputError: if a name or a value is unknown, or a name is given twice.
    """
    fixed: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, equals, value = (one.strip() for one in part.partition("="))
        known = [*SEARCHED, *SETTINGS]
        if name not in known:
            raise InputError(f"{part!r} is not a choice", where=_WHERE, allowed=known, given=name)
        if not equals:
            raise InputError(f"{name} has no value", where=_WHERE, allowed=f"{name}=VALUE")
        field = _FIELDS.get(name, name)
        if field in fixed or field in settings:
            raise InputError(f"{name} is given twice", where=_WHERE, allowed="each choice once")
        if name in SEARCHED:
            fixed[field] = SEARCHED[name](name, value)
        else:
            settings[field] = SETTINGS[name](name, value)
    return fixed, settings


def option_of(name: str, value: Any) -> str:
    """Return a choice as people write it, such as ``zero=3`` or ``compile=no``.

    Args:
        name: field of the layout.
        value: its value.
    """
    option = next((one for one, known in _FIELDS.items() if known == name), name)
    if isinstance(value, bool):
        return f"{option}={'yes' if value else 'no'}"
    return f"{option}={value:g}" if isinstance(value, float) else f"{option}={value}"


def parse_rate(text: str, *, where: str) -> float:
    """Return bytes per second from a rate such as ``400GB/s`` or ``3200Gbit/s``.

    Args:
        text: the rate.
        where: the option, for errors.

    Raises:
        InputError: if it is not a rate with a unit.
    """
    found = _RATE.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise InputError(f"is {text!r}", where=where, allowed="a rate with its unit, as in 400GB/s or 3200Gbit/s")
    return float(found[1]) * _SCALE[found[2].lower()] / (1 if found[3] == "B" else 8)


def parse_counts(text: str, *, where: str) -> tuple[int, ...]:
    """Return numbers of devices, smallest first, from text such as ``64`` or ``64,128,256``.

    Args:
        text: the numbers.
        where: the option, for errors.

    Raises:
        InputError: if one is not a whole number.
    """
    counts = set()
    for part in text.split(","):
        if not part.strip().isdecimal() or not 1 <= int(part) <= _LARGEST:
            raise InputError(
                f"is {text!r}", where=where, allowed=f"whole numbers from 1 to {_LARGEST:,}, separated by commas"
            )
        counts.add(int(part))
    return tuple(sorted(counts))
