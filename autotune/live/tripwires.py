"""Signs, in steps and windows, that a live run must go back to the baseline.

``guard.SlowdownCheck`` checks for slowness.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass

from autotune.live.limits import Limits

# Windows or skipped steps in a row before a trip: one may be chance.
_IN_A_ROW = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Readings of a window.

    Attributes:
        pressure: measured peak divided by the budget; ``None`` if it is not measured.
        retries: allocations that the device's allocator had to retry since the process began.
        graphs: graphs compiled since the process began.
        placed: changes of the applied plan since the run began.
        non_finite: losses that were not finite.
        rounds: whether k or a precision differs from the baseline's.
    """

    pressure: float | None
    retries: int
    graphs: int
    placed: int
    non_finite: int
    rounds: bool


class Wires:
    """Checks of a run's readings.

    Args:
        limits: the limits.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._readings: list[Reading] = []
        self._skipped = 0

    def after_step(self, *, stepped: bool, rounds: bool) -> str | None:
        """Return a reason to trip if steps are skipped under a precision that the tuner chose, else ``None``."""
        self._skipped = self._skipped + 1 if rounds and not stepped else 0
        if self._skipped < _IN_A_ROW:
            return None
        self._skipped = 0
        return "two steps in a row were skipped under a lower precision"

    def after_window(self, reading: Reading) -> str | None:
        """Return a reason to trip if this window and those before it show one, else ``None``."""
        self._readings = [*self._readings[-_IN_A_ROW:], reading]
        reason = self._pressure() or self._retries() or self._recompiles()
        if reason is None and reading.rounds and reading.non_finite:
            reason = f"{reading.non_finite} losses were not finite under another k or precision"
        if reason is not None:
            self._readings = []
        return reason

    def _pressure(self) -> str | None:
        late = [one.pressure for one in self._readings[-_IN_A_ROW:] if one.pressure is not None]
        if len(late) == _IN_A_ROW and min(late) > self._limits.pressure_frac:
            return f"measured pressure {late[0]:.0%} and {late[1]:.0%} of the budget in two windows"
        return None

    def _retries(self) -> str | None:
        grown = self._grown("retries")
        if len(grown) == _IN_A_ROW and min(grown) > 0:
            return f"the allocator tried again {grown[0]} and {grown[1]} times in two windows"
        return None

    def _recompiles(self) -> str | None:
        """Return a reason to trip if units were recompiled in windows with switches, else ``None``."""
        grown, switches = self._grown("graphs"), self._grown("placed")
        if len(grown) == _IN_A_ROW and min(grown) > 0 and min(switches) > 0:
            return f"{sum(grown)} graphs were compiled again in two windows with switches"
        return None

    def _grown(self, name: str) -> list[int]:
        values = [getattr(one, name) for one in self._readings]
        return [later - one for one, later in itertools.pairwise(values)]


def compiled_graphs() -> int:
    """Return how many graphs this process has compiled; 0 if none."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"].get("unique_graphs", 0))
