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
        # For each number of calls that was more than usual, the last step with it, and for how many steps another
        # one is expected.
        self._more: dict[float, tuple[int, int]] = {}
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
        return max(*self._more, self.usual) / self.usual if self._more else 1.0

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

    def end_step(self) -> int:
        """Return a step's calls per forward pass, divided by those when the run was profiled; 1 if it is not known."""
        calls, passes, self._passes = self._before_aside + self._switcher.calls(), self._passes, 0
        if not calls or not passes or self._profiled is None:
            return 1
        return max(math.ceil(calls / passes / self._profiled), 1)

    def note(self, step: int, calls: int, needs: float = 1.0) -> None:
        """Record a step.

        Args:
            step: number of the step.
            calls: its calls per forward pass, divided by those when the run was profiled.
            needs: memory that it needed over what a step with the usual calls would have; 1 if it is not known.
        """
        self._recent.append(calls)
        if calls > self.usual:
            most = round(max(calls, needs * self.usual), 1)
            last, span = self._more.get(most, (step, _STEPS))
            self._more[most] = step, max(span, _GAPS * (step - last))
        self._more = {most: (last, span) for most, (last, span) in self._more.items() if step - last <= span}
