"""The memory that the plan of a step may be predicted to need: the budget, less what predictions do not tell of."""

from __future__ import annotations

import math

from autotune.live.attached import Attached
from autotune.live.live_knowledge import Knowledge
from autotune.live.memory_budget import BudgetReader
from autotune.live.placement import usable
from autotune.profiling.step_peaks import StepPeaks
from autotune.profiling.unit_calls import UnitCalls


class StepRoom:
    """The share of the budget that is left for what is predicted of a step.

    The rest is for what the model has grown since it was profiled, for further calls of units, for gradients of
    micro-batches that nobody declared, and for what steps were measured to need beyond predictions.

    Args:
        attached: The run.
        budget: The reader of its budget.
        peaks: The measured peaks of its steps.
        knowledge: What traced steps have shown.
        calls: The calls of units.
    """

    def __init__(
        self, attached: Attached, budget: BudgetReader, peaks: StepPeaks, knowledge: Knowledge, calls: UnitCalls
    ) -> None:
        self._attached = attached
        self._budget = budget
        self._peaks = peaks
        self._knowledge = knowledge
        self._calls = calls
        self._counted_bytes: int | None = None

    def begin_step(self) -> None:
        """Begin a step, in which gradients are counted anew."""
        self._counted_bytes = None

    def usable_bytes(self, k: int) -> float:
        """Return the bytes that a plan may be predicted to need.

        Args:
            k: The accumulation steps of the applied plan.
        """
        return usable(self.allowed_bytes(k)) - self._peaks.unforeseen

    def allowed_bytes(self, k: int) -> int | None:
        """Return the budget in bytes for a step with the usual calls of units; ``None`` for none.

        Args:
            k: The accumulation steps of the applied plan.
        """
        budget, more = self._budget.latest, self._knowledge.grown_bytes + self.accumulated_bytes(k)
        return self.with_usual_calls(None if budget is None else max(budget - more, 0))

    def accumulated_bytes(self, k: int) -> int:
        """Return the bytes of the gradients beside which a step's later micro-batches run, if none were declared.

        Args:
            k: The accumulation steps of the applied plan.
        """
        undeclared = max(self._attached.accumulation_steps, k) == 1
        return self._gradient_bytes if undeclared and self._calls.accumulates else 0

    def with_usual_calls(self, budget: int | None) -> int | None:
        """Return the share of a budget for a step with the usual calls, so that one with more calls fits it, too.

        Args:
            budget: The budget in bytes; ``None`` for none.
        """
        static = self._knowledge.static_bytes
        if budget is None or budget <= static:
            return budget
        # Each call adds at most what the whole step needs.
        return static + int((budget - static) / self._calls.extra)

    def note_calls(self, step: int, calls: int, *, peak: int, expected: float | None) -> None:
        """Record how often a step called units, and what it needed over what one with the usual calls would have.

        Args:
            step: The number of the step.
            calls: Its calls per forward pass, divided by those when the run was profiled.
            peak: Its measured peak in bytes; 0 if it was not measured.
            expected: The predicted peak of its plan in bytes; ``None`` or infinite if unknown.
        """
        needs = self._needs_more(peak, expected) if calls > self._calls.usual and peak else None
        self._calls.note(step, calls, needs)
        if self._calls.is_unmeasured:
            needs = self._knowledge.needs_more(self._gradient_bytes)
            if needs is not None:
                self._calls.measure(needs)

    def _needs_more(self, peak: int, expected: float | None) -> float | None:
        """Return what a step needed over the prediction for its plan, both without what stays; ``None`` if unknown."""
        static = self._knowledge.static_bytes
        if expected is None or not static < expected < math.inf:
            return None
        # Gradients, which further calls share, are a smaller part of what fuller plans need.
        shared = min(self._gradient_bytes, (expected - static) / 2)
        return float((peak - static - shared) / (expected - static - shared))

    @property
    def _gradient_bytes(self) -> int:
        """Bytes of the gradients of all trained parameters, counted once for each step."""
        if self._counted_bytes is None:
            groups = self._attached.optimizer.param_groups
            self._counted_bytes = sum(one.nbytes for group in groups for one in group["params"] if one.requires_grad)
        return self._counted_bytes
