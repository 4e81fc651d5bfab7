"""How often a run's forward passes call its units: more often, in an auxiliary loss say, they need more memory."""

from __future__ import annotations

import math
from collections import deque

from autotune.mechanics.controls import Switcher

# Recent steps whose calls the next ones may repeat.
_STEPS = 64


class UnitCalls:
    """Counts the calls of one unit, which stands for all.

    Args:
        switcher: Counts them.
    """

    def __init__(self, switcher: Switcher) -> None:
        self._switcher = switcher
        # Of each recent step, how many times as often as usual the unit was called in a forward pass.
        self._ratios: deque[int] = deque([1], maxlen=_STEPS)
        self._usual: int | None = None
        self._passes = 0

    @property
    def ratio(self) -> int:
        """How many times as often as usual a forward pass may call a unit, as recent ones did."""
        return max(self._ratios)

    @property
    def counting(self) -> bool:
        """Whether calls are counted."""
        return self._usual is not None

    def count(self, name: str, usual: int) -> None:
        """Begin to count.

        Args:
            name: The unit.
            usual: How often a forward pass called it when it was profiled.
        """
        self._usual = max(usual, 1)
        self._switcher.count(name)

    def begin_step(self) -> None:
        """Begin a step."""
        self._passes = 0

    def begin_pass(self) -> None:
        """Note that a forward pass begins."""
        self._passes += 1

    def end_step(self) -> None:
        """Take in the step's calls."""
        calls, passes, self._passes = self._switcher.calls(), self._passes, 0
        if calls and passes and self._usual is not None:
            self._ratios.append(max(math.ceil(calls / passes / self._usual), 1))
