"""Read, on an accelerator, what each step of a live run needed; the user's own statistics of peaks are left alone.

The allocator tells the largest peak since the user last forgot it. Where a step raised it, that is the step's own peak.
Where it did not, the step is taken to need what its plan did for a batch at least as small: what happens between steps,
such as an evaluation, is not caused by a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from autotune.mechanics import devices
from autotune.plan import Plan


class StepPeaks:
    """The peaks of the steps of a window.

    Attributes:
        news: whether a step has raised the peak since :meth:`correct`.
        unforeseen: bytes that steps needed beyond what their plans are predicted to need (a library's workspace, say).
        pressure: the largest peak over the budget of its step; ``None`` while none is known.
        retries: allocations, since the process began, for which the cache had to be given back first.

    Args:
        device: where the run trains; on a CPU nothing is known.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.pressure: float | None = None
        self.news = False
        self.unforeseen = 0
        self.retries = 0
        self._largest: int | None = None
        # Size of the largest batch for which a plan's peak was seen, and that peak.
        self._known: dict[Plan, tuple[int, int]] = {}
        self._running: tuple[Plan, int, int | None, int] | None = None

    def begin(self, plan: Plan, size: int, budget_bytes: int | None, *, counts: bool = True) -> None:
        """Note what a step begins with.

        Args:
            plan: the plan that it runs under.
            size: bytes of its largest batch.
            budget_bytes: the budget of the moment; ``None`` for none.
            counts: whether its peak is the plan's: no pass runs beside it, and the plan is one that should fit.
        """
        seen = devices.allocated(self._device)
        self._running = None if seen is None or not counts else (plan, size, budget_bytes, seen.peak)

    def end(self) -> int | None:
        """Return what the step that began last needed; ``None`` if nobody can tell, or if it does not count."""
        seen = devices.allocated(self._device)
        if seen is not None:
            self.retries = seen.retries
        if self._running is None or seen is None:
            return None
        (plan, size, budget, before), self._running = self._running, None
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
        """Compare the peaks that are known with predicted ones.

        Args:
            predicted: returns a plan's predicted peak with a batch of a size, in bytes; infinite or ``None`` for none.
        """
        self.news, self.unforeseen = False, 0
        for plan, (size, peak) in self._known.items():
            expected = predicted(plan, size)
            if expected is not None and math.isfinite(expected):
                self.unforeseen = max(self.unforeseen, math.ceil(peak - expected))

    def take(self) -> int | None:
        """Return the window's largest peak, as far as it is known, and begin another window."""
        largest, self._largest, self.pressure = self._largest, None, None
        return largest
