"""The cells of one row of published runs: numbers within bounds, and words from a list; all others are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import InputError

_FLAGS: Mapping[str, bool] = {
    **dict.fromkeys(("1", "1.0", "true", "yes", "on"), True),
    **dict.fromkeys(("", "0", "0.0", "false", "no", "off"), False),
}
# Largest whole numbers that make sense in a column; all others are at most the last of them.
_MOST = {"layers": 10_000, "hidden": 2**20, "heads": 2**14, "kv_heads": 2**14, "ffn": 2**24, "vocab": 2**24}
_MOST |= {"tp": 1024, "pp": 4096, "cp": 4096, "gpus": 2**24}
_LARGEST = 2**30
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of one row, by column.

    Attributes:
        values: text of each cell, by the name of its column.
    """

    values: Mapping[str, str]

    def has(self, name: str) -> bool:
        """Return whether a cell is there and not empty."""
        return bool(self.values.get(name))

    def text(self, name: str, default: str | None = None) -> str:
        """Return a cell's text, or the default where it is empty.

        Raises:
            InputError: if it is empty and there is no default.
        """
        value = self.values.get(name, "")
        if value:
            return value
        if default is None:
            raise InputError(f"{name} is empty", allowed="a value")
        return default

    def number(self, name: str, default: float | None = None) -> float:
        """Return a cell's number.

        Raises:
            InputError: if it is no number from 1e-9 to 1e15.
        """
        if default is not None and not self.has(name):
            return default
        text = self.text(name)
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            raise InputError(f"{name} is {shown(text)}", allowed="a number") from None
        if not 1e-9 <= value <= 1e15:
            raise InputError(f"{name} is {shown(text)}", allowed="a number from 1e-9 to 1e15")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """Return a cell's whole number.

        Raises:
            InputError: if it is no whole number from 1 to the most that makes sense there.
        """
        most = _MOST.get(name, _LARGEST)
        value = self.number(name, default)
        if value != math.floor(value) or not 1 <= value <= most:
            raise InputError(f"{name} is {shown(self.text(name))}", allowed=f"a whole number from 1 to {most:,}")
        return int(value)

    def flag(self, name: str) -> bool:
        """Return whether a cell says yes; an empty one says no.

        Raises:
            InputError: if it says neither.
        """
        return bool(self.word(name, _FLAGS, default=""))

    def word(self, name: str, known: Mapping[str, Any], *, default: str | None = None) -> Any:
        """Return what a cell's word stands for, large and small letters alike.

        Raises:
            InputError: if the word is not known.
        """
        text = self.text(name, default).lower()
        if text not in known:
            allowed = [one for one in known if one]
            raise InputError(f"{name} is {shown(text)}", allowed=allowed, given=text[:_SHOWN])
        return known[text]

    def optional(self, name: str, unit: float) -> float | None:
        """Return a cell's number in base units, or ``None`` if it is empty."""
        return self.number(name) * unit if self.has(name) else None


def shown(text: str) -> str:
    """Return a cell's text for an error, in quotes and cut where it is long.

    Args:
        text: the text.
    """
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
