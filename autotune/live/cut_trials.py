"""Choice of the steps whose cut batches are tried again in smaller pieces."""

from __future__ import annotations

import random

from autotune.plan import Plan, PlanSpace

# The first trial is within this many cut steps; later trials become rarer.
_FIRST_WITHIN = 8


class CutTrials:
    """Random choice of steps: a loss may couple samples only late in a run, or only in some steps.

    All ranks draw the same numbers, and none use the run's own generators.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)  # noqa: S311 - chooses steps
        self._cut_steps, self._next = 0, self._random.randint(1, _FIRST_WITHIN)

    def due(self, plan: Plan, space: PlanSpace) -> bool:
        """Return whether the batch of the next step is tried again in smaller pieces.

        Args:
            plan: plan of the step.
            space: plans that the run may choose from.
        """
        # Where fp16 overflows, the step is skipped and nothing can be compared.
        if not space.k_splits or plan.accumulation_steps == space.accumulation_choices[0] or plan.needs_loss_scaling:
            return False
        self._cut_steps += 1
        if self._cut_steps < self._next:
            return False
        self._next = self._cut_steps + self._random.randint(self._cut_steps, 3 * self._cut_steps)
        return True
