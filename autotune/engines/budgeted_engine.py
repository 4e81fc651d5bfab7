"""Keep a search within its budget of optimizer steps and windows, and return repeated plans from memory."""

from __future__ import annotations

from collections.abc import Callable

from autotune.engines.engine import Engine, EngineProxy, PreparingEngine
from autotune.errors import AutotuneError
from autotune.measurement import Failure, Measurement
from autotune.plan import Plan

Listener = Callable[[Plan, Measurement], None]


class StepsSpentError(AutotuneError):
    """The budget of optimizer steps, or of windows, does not allow another window."""


class BudgetedEngine(EngineProxy):
    """An engine that counts the steps it runs, and returns a repeated plan's window from memory at no cost.

    Args:
        engine: the engine that trains.
        step_budget: number of optimizer steps that may be run.
        listener: called with the plan and measurement of every window that was run, not of those from memory.
        window_budget: number of windows that may be run; ``None`` for as many as the steps allow.

    Attributes:
        steps_spent: optimizer steps run so far.
        known: the measured window of each plan.
    """

    def __init__(
        self,
        engine: Engine,
        step_budget: int,
        listener: Listener | None = None,
        *,
        window_budget: int | None = None,
    ) -> None:
        super().__init__(engine)
        self._listener = listener
        self.step_budget = step_budget
        self.window_budget = window_budget
        self._windows = 0
        self._prepared: dict[Plan, int] = {}
        self.steps_spent = 0
        self.known: dict[Plan, Measurement] = {}

    def affords(self, steps: int) -> bool:
        """Return whether one more window fits the budget if every prepared window costs all its steps."""
        if self.window_budget is not None and self._windows + len(self._prepared) >= self.window_budget:
            return False
        return self.steps_spent + sum(self._prepared.values()) + steps <= self.step_budget

    def prepare(self, plan: Plan, steps: int) -> None:
        """Begin a window that will be requested later, unless it is known or prepared already or over the budget."""
        plan = self.space.check(plan)
        if not isinstance(self.engine, PreparingEngine) or plan in self.known or plan in self._prepared:
            return
        if self.affords(steps):
            self._prepared[plan] = steps
            super().prepare(plan, steps)

    def run(self, steps: int) -> Measurement:
        """Return the plan's window, from memory if it was measured before.

        A window that ended because of the memory budget is measured again once its peak fits the current budget.

        Raises:
            StepsSpentError: if the window does not fit what is left of the budget.
        """
        known = self.known.get(self.plan)
        if known is None or (known.failure is Failure.OVER_BUDGET and not self._exceeds_budget(known)):
            known = self.known[self.plan] = self.measure(steps)
        return known

    def measure(self, steps: int) -> Measurement:
        """Run a window even if the plan's window is known.

        Raises:
            StepsSpentError: if the window does not fit what is left of the budget.
        """
        if self.steps_spent + steps > self.step_budget:
            raise StepsSpentError(f"{self.steps_spent} of {self.step_budget} steps are spent")
        if self.window_budget is not None and self._windows >= self.window_budget:
            raise StepsSpentError(f"all {self.window_budget} windows are spent")
        self._windows += 1
        self._prepared.pop(self.plan, None)
        measurement = super().run(steps)
        # A window that fails in its first step costs that step too.
        self.steps_spent += max(measurement.steps, 1)
        if self._listener is not None:
            self._listener(self.plan, measurement)
        return measurement

    def close(self) -> None:
        """Do nothing: the caller that made the wrapped engine closes it."""

    def _exceeds_budget(self, window: Measurement) -> bool:
        budget, peak = self.memory_budget_bytes, window.peak_bytes
        return budget is not None and (peak is None or peak > budget)
