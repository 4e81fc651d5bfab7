"""The memory budget of the moment: what the user allows, and what the device has."""

from __future__ import annotations

from typing import Any

from autotune.budget import allocated_within
from autotune.live.attached import Attached
from autotune.live.decision_log import DecisionLog
from autotune.mechanics import devices

# No device has more: a budget beyond is a mistake, or infinite.
_LARGEST_BUDGET = 2**60


class BudgetReader:
    """Reads the budget before each step.

    Attributes:
        latest: The budget that was read last in bytes, the reserve deducted; ``None`` for none.
        announced: The same without the deduction.
        ceiling: Bytes that memory is known not to suffice for; ``None`` until it ran out.
        reserve_frac: The share of the device's memory that is left to others. What the device has is read once in a
            window, while other processes may take some at any time; the user's own budget is read before every step.

    Args:
        attached: The run.
        log: Is told of budgets that are none.
    """

    def __init__(self, attached: Attached, log: DecisionLog) -> None:
        self._source = attached.budget
        self._reserved = attached.reserved
        self._device = attached.device
        self._log = log
        self._room: int | None = None
        self.latest: int | None = None
        self.announced: int | None = None
        self.reserve_frac = 0.0
        self.ceiling: int | None = None

    def read_device(self, fragments_bytes: int) -> None:
        """Read what this process may take on its device: what it has reserved and what is free.

        A driver's answer takes its time: ask it once in a window.

        Args:
            fragments_bytes: Bytes that steps were seen to reserve beyond what they allocate.
        """
        free, seen = devices.free_bytes(self._device), devices.allocated(self._device)
        self._room = None if free is None or seen is None else allocated_within(free + seen.reserved, fragments_bytes)

    def read(self, step: int, fragments_bytes: int) -> int | None:
        """Return the budget of the moment; a function that lies leaves the last one standing.

        Args:
            step: The step that begins.
            fragments_bytes: As :meth:`read_device` takes it.
        """
        value: Any = self._source
        if callable(value):
            try:
                value = value()
            except Exception as error:  # noqa: BLE001 - somebody's function must not end somebody's run
                value = error
        if not (value is None or _is_size(value)):
            self._log.write("budget refused", step, value=value)
            return self.latest
        if value is not None and self._reserved:
            value = allocated_within(int(value), fragments_bytes)
        own = _smaller(None if value is None else int(value), self.ceiling)
        self.announced = _smaller(own, self._room)
        self.latest = _smaller(own, None if self._room is None else int(self._room * (1 - self.reserve_frac)))
        return self.latest


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((size for size in (one, other) if size is not None), default=None)


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LARGEST_BUDGET
