"""Count the calls of units per forward pass: more calls, for example for an auxiliary loss, need more memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from autotune.mechanics.controls import Switcher

# Number of steps in a row with more calls after which these are the usual ones.
_IN_A_ROW = 16
# A step with more calls is expected again for this many steps, or for this many times the largest gap between two.
_STEPS, _GAPS = 1000, 4


class UnitCalls:
    """Counts the calls of one unit, which represents all units.

    Args:
        switcher: The switcher that counts them.
    """

    def __init__(self, switcher: Switcher) -> None:
        self._switcher = switcher
        # For each recent step, calls per forward pass divided by those when the run was profiled.
        self._recent: deque[int] = deque([1], maxlen=_IN_A_ROW)
        self._most = 1
        # The last step with more calls than usual, and for how many steps another one is expected.
        self._last: int | None = None
        self._span = _STEPS
        self._profiled: int | None = None
        self._passes = 0
        self._before_aside = 0

    @property
    def usual(self) -> int:
        """Calls per forward pass in most recent steps, divided by those when the run was profiled."""
        return min(self._recent)

    @property
    def extra(self) -> float:
        """Most calls that a step is expected to make per forward pass, divided by the usual ones; at least 1."""
        return max(self._most / self.usual, 1.0)

    @property
    def counting(self) -> bool:
        """Whether calls are counted."""
        return self._profiled is not None

    def count(self, name: str, profiled: int) -> None:
        """Begin to count.

        Args:
            name: The unit.
            profiled: Its calls per forward pass when the run was profiled.
        """
        self._profiled = max(profiled, 1)
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

    def end_step(self, step: int) -> bool:
        """Add the calls of a step, by its number; return whether they were more than usual."""
        calls, passes, self._passes = self._before_aside + self._switcher.calls(), self._passes, 0
        if not calls or not passes or self._profiled is None:
            return False
        return self.note(step, max(math.ceil(calls / passes / self._profiled), 1))

    def note(self, step: int, ratio: int) -> bool:
        """Record a step's calls per forward pass, divided by those when the run was profiled; see :meth:`end_step`."""
        self._recent.append(ratio)
        more = ratio > self.usual
        if more:
            if self._last is not None:
                self._span = max(self._span, _GAPS * (step - self._last))
            self._last, self._most = step, max(self._most, ratio)
        elif self._last is not None and step - self._last > self._span:
            self._most = 1
        return more
