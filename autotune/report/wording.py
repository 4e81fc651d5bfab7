"""Numbers as text, for all reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autotune.budget import format_bytes


def count(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def progress(steps: int, total: int | None) -> str:
    """Return the progress of a run as text.

    Args:
        steps: optimizer steps done.
        total: length of the run in steps; ``None`` if it is not known.
    """
    return f"step {steps:,}" if total is None else f"step {steps:,} of {total:,}"


def milliseconds(seconds: float | None) -> str:
    """Return a time in milliseconds as text; empty for ``None``."""
    return "" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def changed_milliseconds(seconds: float) -> str:
    """Return a predicted change of a time with its sign, in two significant digits: predictions know no more."""
    value = seconds * 1e3
    if not 1e-5 < abs(value) < 1e15:
        # Ten nanoseconds are the rounding of sums.
        return "±0 ms" if abs(value) < 1 else f"{value:+.1e} ms"
    digits = 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):+.{max(digits, 0)}f} ms"


def beside_one(ratio: float) -> str:
    """Return a ratio in two digits, or in up to four that show on which side of 1 it is."""
    shown = [f"{ratio:.{digits}f}" for digits in (2, 3, 4)]
    return next((text for text in shown if float(text) != 1), shown[0])


def facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values as rows of a table, those of an inner mapping one by one; what is empty is left out."""
    rows = []
    for key, value in found.items():
        name = key.replace("_", " ")
        if isinstance(value, Mapping):
            rows += [(f"{name}: {inner}", told) for inner, told in facts(value)]
        elif value is not None:
            rows.append((name, str(value)))
    return rows


def size(size_bytes: float | None) -> str:
    """Return a size with its unit as text; empty for ``None``."""
    return "" if size_bytes is None else format_bytes(size_bytes)
