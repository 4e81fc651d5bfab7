"""The current memory budget: the smaller of the user's and the device's."""

from __future__ import annotations

import logging
import math

from autotune.budget import allocated_within, format_bytes
from autotune.live.asked_budget import Size
from autotune.live.attached import Attached
from autotune.live.decision_log import DecisionLog
from autotune.live.placement import usable
from autotune.mechanics import devices

logger = logging.getLogger(__name__)


class BudgetReader:
    """Reads the budget before each step.

    Attributes:
        latest: The last budget in bytes, after deducting the reserve; ``None`` for none.
        announced: The last budget before that deduction.
        ceiling: Upper limit of the budget in bytes, set when memory runs out; ``None`` before that.
        reserve_frac: Share of the device's memory that is left free, because the memory is read once per window and
            other processes may take some at any time. The user's own budget is read before every step.

    Args:
        attached: The run.
        log: The decision log, which records invalid budgets.
    """

    def __init__(self, attached: Attached, log: DecisionLog) -> None:
        self._source = attached.budget
        self._device = attached.device
        self._log = log
        # Kinds of invalid answers so far.
        self._lies: set[str] = set()
        self._warned_unreachable = False
        self._room: int | None = None
        self.latest: int | None = None
        self.announced: int | None = None
        self._least: int | None = None
        self.reserve_frac = 0.0
        self.ceiling: int | None = None

    def read_device(self, fragments_bytes: int) -> None:
        """Read the memory that this process may take on its device: what it has reserved, and what is free.

        The driver answers slowly, so this is called once per window, and before each step only during profiling.

        Args:
            fragments_bytes: Bytes that steps reserve beyond what they allocate.
        """
        free, seen = devices.free_bytes(self._device), devices.allocated(self._device)
        self._room = None if free is None or seen is None else allocated_within(free + seen.reserved, fragments_bytes)

    def read(self, step: int, fragments_bytes: int) -> int | None:
        """Return the current budget; if the user's function returns an invalid one, its last valid one is used.

        Args:
            step: Number of the step that begins.
            fragments_bytes: As for :meth:`read_device`.
        """
        allowed = self._asked(step)
        own = allowed.size_bytes
        if own is not None and allowed.reserved:
            own = allocated_within(own, fragments_bytes)
        own = _smaller(own, self.ceiling)
        self.announced = _smaller(own, self._room)
        self._least = _smaller(self._least, self.announced)
        self.latest = _smaller(own, None if self._room is None else int(self._room * (1 - self.reserve_frac)))
        return self.latest

    def take_least(self) -> int | None:
        """Return the smallest budget since the last call, in bytes, so that no dip between two decisions is missed."""
        least, self._least = self._least, None
        return _smaller(least, self.announced)

    def warn_unreachable(self, step: int, least: float) -> None:
        """Warn, once, that no plan fits the budget, and name the smallest budget that can be met.

        Args:
            step: number of the step that begins.
            least: bytes that the leanest plan is expected to need; infinite if unknown.
        """
        if self._warned_unreachable or not math.isfinite(least):
            return
        self._warned_unreachable = True
        budget = self.latest or 0
        logger.warning(
            "step %d: no plan fits the memory budget of %s: all that may be is recomputed, and that needs %s; the "
            "smallest budget that can be met for this batch is %d bytes",
            step,
            format_bytes(budget),
            format_bytes(least),
            math.ceil(least * max(budget, 1) / max(usable(budget), 1)),
        )

    def _asked(self, step: int) -> Size:
        """Return the user's current budget."""
        source = self._source
        if isinstance(source, Size):
            return source
        lie = source.ask()
        if lie is not None and lie not in self._lies:
            if not self._lies:
                logger.warning(
                    "step %d: memory_budget_bytes %s, and its last answer stands; similar ones are not reported",
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
