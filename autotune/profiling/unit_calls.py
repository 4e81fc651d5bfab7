"""Count the calls of units per forward pass: more calls, for example for an auxiliary loss, need more memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from autotune.mechanics.controls import Switcher

# Number of recent steps that are considered.
_STEPS = 64


class UnitCalls:
    """Counts the calls of one unit, which represents all units.

    Args:
        switcher: The switcher that counts them.
    """

    def __init__(self, switcher: Switcher) -> None:
        self._switcher = switcher
        # For each recent step, calls per forward pass divided by the usual number.
        self._ratios: deque[int] = deque([1], maxlen=_STEPS)
        self._usual: int | None = None
        self._passes = 0
        self._before_aside = 0

    @property
    def ratio(self) -> int:
        """Largest number of calls per forward pass in recent steps, divided by the usual number."""
        return max(self._ratios)

    @property
    def counting(self) -> bool:
        """Whether calls are counted."""
        return self._usual is not None

    def count(self, name: str, usual: int) -> None:
        """Begin to count.

        Args:
            name: The unit.
            usual: Calls per forward pass when the run was profiled.
        """
        self._usual = max(usual, 1)
        self._switcher.count(name)

    def begin_step(self) -> None:
        """Begin a step."""
        self._passes = self._before_aside = 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out what is called within: trial passes are not the loop's own."""
        self._before_aside += self._switcher.calls()
        try:
            yield
        finally:
            self._switcher.calls()

    def begin_pass(self) -> None:
        """Note that a forward pass begins."""
        self._passes += 1

    def end_step(self) -> None:
        """Add the calls of the step."""
        calls, passes, self._passes = self._before_aside + self._switcher.calls(), self._passes, 0
        if calls and passes and self._usual is not None:
            self._ratios.append(max(math.ceil(calls / passes / self._usual), 1))
