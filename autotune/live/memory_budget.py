"""The memory budget of the moment: what the user allows, and what the device has."""

from __future__ import annotations

import logging

from autotune.budget import allocated_within
from autotune.live.asked_budget import Size
from autotune.live.attached import Attached
from autotune.live.decision_log import DecisionLog
from autotune.mechanics import devices

logger = logging.getLogger(__name__)


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
        self._device = attached.device
        self._log = log
        # Kinds of answers that were no budget.
        self._lies: set[str] = set()
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
        allowed = self._asked(step)
        own = allowed.size_bytes
        if own is not None and allowed.reserved:
            own = allocated_within(own, fragments_bytes)
        own = _smaller(own, self.ceiling)
        self.announced = _smaller(own, self._room)
        self.latest = _smaller(own, None if self._room is None else int(self._room * (1 - self.reserve_frac)))
        return self.latest

    def _asked(self, step: int) -> Size:
        """Return what the user allows at the moment."""
        source = self._source
        if isinstance(source, Size):
            return source
        lie = source.ask()
        if lie is not None and lie not in self._lies:
            if not self._lies:
                logger.warning(
                    "step %d: memory_budget_bytes %s, and its last answer stands; further ones like it are not told",
                    step,
                    lie,
                )
            self._lies.add(lie)
            self._log.write("budget refused", step, value=lie)
        return source.last


def _smaller(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
