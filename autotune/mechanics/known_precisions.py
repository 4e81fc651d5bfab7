"""The precisions that devices exclude, as far as this process knows them.

Processes that work on one job must agree on them, and two measurements on a busy machine may differ. So whatever one
process has found goes to the others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from autotune.errors import InputError
from autotune.plan import Precision

# Environment variable that names the useful precisions, so that they are not measured; worker processes find it too.
PRECISIONS_VARIABLE = "AUTOTUNE_PRECISIONS"

_known: dict[str, Mapping[Precision, str]] = {}


def kept(device_type: str) -> Mapping[Precision, str] | None:
    """Return the excluded precisions of a type of device with the reasons; ``None`` if they are not known yet."""
    return _known.get(device_type)


def keep(device_type: str, reasons: Mapping[Precision, str]) -> None:
    """Settle the excluded precisions of a type of device, each with the reason, for this process."""
    _known[device_type] = MappingProxyType(dict(reasons))


def to_json() -> dict[str, dict[str, str]]:
    """Return all that is known, for another process."""
    return {kind: {str(precision): reason for precision, reason in known.items()} for kind, known in _known.items()}


def keep_all(told: Mapping[str, Mapping[Any, Any]]) -> None:
    """Settle what another process knows.

    Args:
        told: the result of its :func:`to_json`.
    """
    for kind, reasons in told.items():
        keep(kind, {Precision(name): str(reason) for name, reason in reasons.items()})


def forget() -> None:
    """Let this process ask again."""
    _known.clear()


def named() -> frozenset[Precision] | None:
    """Return the precisions that the environment variable names; ``None`` if it is not set.

    Raises:
        InputError: if it names something else than a precision.
    """
    text = os.environ.get(PRECISIONS_VARIABLE, "").strip()
    if not text:
        return None
    allowed = {str(precision): precision for precision in Precision if precision.dtype}
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in allowed:
            raise InputError(f"names {name!r}", where=PRECISIONS_VARIABLE, allowed=list(allowed))
    return frozenset(allowed[name] for name in names)
