"""Choice of the steps of a live run whose choices are tried again, since what a trial showed may not hold for good."""

from __future__ import annotations

import random

# The first trial is within this many steps; later trials become rarer.
_FIRST_WITHIN = 8


class LateTrials:
    """Random choice of steps: a loss may couple samples, or a gradient become small, only late or only in some steps.

    All ranks draw the same numbers, and none use the run's own generators.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)  # noqa: S311 - chooses steps
        self._steps, self._next = 0, self._random.randint(1, _FIRST_WITHIN)

    def due(self) -> bool:
        """Return whether a choice of the next step is tried again; call it for each step that has such a choice."""
        self._steps += 1
        if self._steps < self._next:
            return False
        self._next = self._steps + self._random.randint(self._steps, 3 * self._steps)
        return True
