"""Names of the experiment trackers to which a command's records can be sent: the values of ``report_to``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, cast

from autotune import extras
from autotune.errors import InputError

VARIABLE = "AUTOTUNE_REPORT_TO"
Name = Literal["mlflow", "tensorboard", "wandb", "none"]
# The library that each tracker needs.
LIBRARIES: Mapping[Name, str | None] = {
    "mlflow": "mlflow",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "none": None,
}


def chosen(report_to: object = None, *, where: str = "report_to") -> Name:
    """Return the name of a tracker that is installed.

    Args:
        report_to: the name; ``None`` for that in ``AUTOTUNE_REPORT_TO``, or ``mlflow``.
        where: what the name was given as, for the error.

    Raises:
        InputError: if there is no such tracker, or its library is not installed.
    """
    if report_to is None:
        named = os.environ.get(VARIABLE)
        report_to, where = (named, VARIABLE) if named else ("mlflow", where)
    if not isinstance(report_to, str) or report_to not in LIBRARIES:
        raise InputError(f"is {report_to!r}", where=where, allowed=", ".join(LIBRARIES))
    name = cast("Name", report_to)
    library = LIBRARIES[name]
    if library is not None:
        extras.require(library, where=where)
    return name
