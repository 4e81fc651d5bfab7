"""Memory budgets as users give them: a number of any library, a size as text, ``None``, or a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotune.budget import MemoryBudget
from autotune.errors import BudgetError, InputError, a_kind, one_line
from autotune.mechanics.loop_signals import any_error

_ALLOWED = "bytes, a size such as 20GiB or 20GiB:reserved, a function that returns one of them, or None"
# Fractions of fewer bytes than these are shares or larger units by mistake; those of more are rounding.
_WHOLE_BELOW = 1024


@dataclass(frozen=True, slots=True)
class Size:
    """A budget.

    Attributes:
        size_bytes: The budget in bytes; ``None`` for the device's memory.
        reserved: Whether it limits the memory that the allocator reserves, and not only what tensors occupy.
    """

    size_bytes: int | None
    reserved: bool = False


class BudgetFunction:
    """A user's function that returns the budget; it is also called at construction.

    Attributes:
        last: The latest valid budget that it returned.

    Args:
        function: The function.

    Raises:
        BudgetError: If the function raises or returns no budget.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        try:
            answer = function()
        except any_error() as error:
            raise BudgetError(f"memory_budget_bytes raised {one_line(error)}", allowed=_ALLOWED) from error
        self.last = size_of(answer, "memory_budget_bytes returned")

    def ask(self) -> str | None:
        """Call the function and keep a valid budget in ``last``; return the problem with an invalid one."""
        try:
            answer = self._function()
        except any_error() as error:  # a user's function must not end the run
            return f"raised {type(error).__name__}"
        if type(answer) is int and self.last == Size(answer):
            return None
        try:
            self.last = size_of(answer, "memory_budget_bytes returned")
        except BudgetError:
            return f"returned {a_kind(answer)} that is not a size"
        return None


def size_of(value: Any, found: str = "memory_budget_bytes is") -> Size:
    """Convert a value to a budget.

    Args:
        value: A number of any library, a size as text, or ``None``.
        found: The beginning of the error message, before the value.

    Raises:
        BudgetError: If the value is not a size that a device can have.
    """
    if value is None:
        return Size(None)
    try:
        if isinstance(value, str):
            parsed = MemoryBudget.parse(value)
            return Size(MemoryBudget(size_bytes=parsed.size_bytes).size_bytes, parsed.reserved)
        number = _number_of(value)
        size = Size(MemoryBudget(size_bytes=math.ceil(number)).size_bytes)
    except (InputError, TypeError, ValueError, OverflowError) as error:
        raise BudgetError(f"{found} {_described(value)}", allowed=_ALLOWED) from error
    if number < _WHOLE_BELOW and number % 1:
        raise BudgetError(f"{found} {_described(value)}, which includes a fraction of a byte", allowed=_ALLOWED)
    return size


def _number_of(value: Any) -> int | float:
    """Return the number in a scalar of any library.

    Raises:
        TypeError: If the value is not a number.
    """
    if getattr(value, "ndim", 0):
        raise TypeError("more than one number")
    try:
        # item() turns booleans of torch and NumPy into Python's.
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, bool):
            raise TypeError("a truth value")
        number: int | float = plain.__index__() if hasattr(plain, "__index__") else float(plain)
    except Exception as error:
        raise TypeError("not a number") from error
    return number


def _described(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - a user's object may have a broken repr
        return a_kind(value)
