"""Peak memory of each step of a live run on an accelerator, read without resetting the user's own statistics.

The allocator reports the largest peak since the user last reset it. If a step raises that peak, the new value is the
step's own peak. If not, the step is assigned the latest known peak of its plan, provided that its batch is at least as
large as the batch with that peak. Peaks between steps, for example in an evaluation, are not attributed to a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from autotune.mechanics import devices
from autotune.plan import Plan


class StepPeaks:
    """Peak memory of the steps of a window.

    Attributes:
        news: whether a step has raised the peak since :meth:`correct`.
        unforeseen: the most bytes that a step needed beyond the prediction for its plan, for example a library's
            workspace.
        pressure: the largest ratio of a step's peak to its budget; ``None`` while none is known.
        retries: number of allocations since the process began for which the cache had to be released first.

    Args:
        device: device of the run; a CPU reports no peaks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.pressure: float | None = None
        self.news = False
        self.unforeseen = 0
        self.retries = 0
        self._largest: int | None = None
        # For each plan, its latest known peak, and the size of the batch that caused it.
        self._known: dict[Plan, tuple[int, int]] = {}
        self._running: tuple[Plan, int, int | None, int] | None = None

    def begin(self, plan: Plan, size: int, budget_bytes: int | None, *, counts: bool = True) -> None:
        """Begin a step.

        Args:
            plan: plan of the step.
            size: bytes of the step's largest batch.
            budget_bytes: the current budget; ``None`` for none.
            counts: whether the step's peak is due to the plan: no trial passes run alongside, and the plan should fit.
        """
        seen = devices.allocated(self._device)
        self._running = None if seen is None or not counts else (plan, size, budget_bytes, seen.peak)

    def end(self, *, counts: bool = True) -> int | None:
        """Return the peak of the current step; ``None`` if it is unknown or does not count.

        Args:
            counts: whether the step was one that its plan's prediction is for.
        """
        seen = devices.allocated(self._device)
        if seen is not None:
            self.retries = seen.retries
        if self._running is None or seen is None:
            return None
        (plan, size, budget, before), self._running = self._running, None
        if not counts:
            return seen.peak if seen.peak > before else None
        largest, peak = self._known.get(plan, (0, 0))
        if seen.peak > before:
            largest, peak = self._known[plan] = size, seen.peak
            self.news = True
        if not peak or size < largest:
            return None
        self._largest = max(self._largest or 0, peak)
        if budget:
            self.pressure = max(self.pressure or 0.0, peak / budget)
        return peak

    def correct(self, predicted: Callable[[Plan, int], float | None]) -> None:
        """Update :attr:`unforeseen` from known and predicted peaks.

        Args:
            predicted: returns the predicted peak in bytes of a plan and a batch size; infinite or ``None`` if unknown.
        """
        self.news, self.unforeseen = False, 0
        for plan, (size, peak) in self._known.items():
            expected = predicted(plan, size)
            if expected is not None and math.isfinite(expected):
                self.unforeseen = max(self.unforeseen, math.ceil(peak - expected))

    def take(self) -> int | None:
        """Return the window's largest known peak, and begin a new window."""
        largest, self._largest, self.pressure = self._largest, None, None
        return largest
