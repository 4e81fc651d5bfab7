"""Keep a search within its budget of real steps and windows, and never measure the same plan twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.engines.engine import Engine, PreparingEngine
from autotune.errors import AutotuneError
from autotune.measurement import Measurement
from autotune.plan import Plan, PlanSpace

Listener = Callable[[Plan, Measurement], None]


class StepsSpentError(AutotuneError):
    """The budget of real optimizer steps, or of windows, does not allow another window."""


class MeteredEngine:
    """Wrap an engine: count real steps, remember every plan's window, answer repeats from memory at no cost.

    Args:
        engine: the engine that really trains.
        step_budget: real optimizer steps that may be spent.
        listener: is told of every window that was really run.
        window_budget: windows that may really be run; ``None`` for as many as the steps allow.

    Attributes:
        steps_spent: real optimizer steps so far.
        known: the measured window of each plan.
        ahead: windows that are worth preparing before the first of them is asked for.
    """

    def __init__(
        self,
        engine: Engine,
        step_budget: int,
        listener: Listener | None = None,
        *,
        window_budget: int | None = None,
    ) -> None:
        self._engine = engine
        self._listener = listener
        self._plan = engine.plan
        self.step_budget = step_budget
        self.window_budget = window_budget
        self._windows = 0
        self._promised: dict[Plan, int] = {}
        self.ahead = engine.ahead if isinstance(engine, PreparingEngine) else 1
        self.steps_spent = 0
        self.known: dict[Plan, Measurement] = {}

    @property
    def space(self) -> PlanSpace:
        """Return the wrapped engine's space."""
        return self._engine.space

    @property
    def plan(self) -> Plan:
        """Return the plan of the next window."""
        return self._plan

    @property
    def memory_budget_bytes(self) -> int | None:
        """Return the wrapped engine's budget."""
        return self._engine.memory_budget_bytes

    @memory_budget_bytes.setter
    def memory_budget_bytes(self, budget: int | None) -> None:
        self._engine.memory_budget_bytes = budget

    def apply(self, plan: Plan) -> None:
        """Choose the plan of the next window."""
        self._plan = self.space.check(plan)

    def affords(self, steps: int) -> bool:
        """Tell whether one more window may be prepared: all that were may cost as much as they can."""
        if self.window_budget is not None and self._windows + len(self._promised) >= self.window_budget:
            return False
        return self.steps_spent + sum(self._promised.values()) + steps <= self.step_budget

    def prepare(self, plan: Plan, steps: int) -> None:
        """Have a plan's window begun that will be asked for, if it must be measured and can be afforded."""
        plan = self.space.check(plan)
        if not isinstance(self._engine, PreparingEngine) or plan in self.known or plan in self._promised:
            return
        if self.affords(steps):
            self._promised[plan] = steps
            self._engine.prepare(plan, steps)

    def run(self, steps: int) -> Measurement:
        """Return the plan's window, from memory if it was measured before.

        Raises:
            StepsSpentError: if the window does not fit what is left of the budget.
        """
        if self._plan in self.known:
            return self.known[self._plan]
        measurement = self.measure(steps)
        self.known[self._plan] = measurement
        return measurement

    def measure(self, steps: int) -> Measurement:
        """Run a window for real, whether or not the plan is known.

        Raises:
            StepsSpentError: if the window does not fit what is left of the budget.
        """
        if self.steps_spent + steps > self.step_budget:
            raise StepsSpentError(f"{self.steps_spent} of {self.step_budget} steps are spent")
        if self.window_budget is not None and self._windows >= self.window_budget:
            raise StepsSpentError(f"all {self.window_budget} windows are spent")
        self._windows += 1
        self._promised.pop(self._plan, None)
        self._engine.apply(self._plan)
        measurement = self._engine.run(steps)
        # A window that fails in its first step has cost that step too.
        self.steps_spent += max(measurement.steps, 1)
        if self._listener is not None:
            self._listener(self._plan, measurement)
        return measurement

    def evaluate(self) -> float:
        """Evaluate the wrapped engine's model."""
        return self._engine.evaluate()

    def snapshot(self) -> Any:
        """Return the wrapped engine's training state."""
        return self._engine.snapshot()

    def restore(self, snapshot: Any) -> None:
        """Restore the wrapped engine's training state; what is known stays known."""
        self._engine.restore(snapshot)

    def close(self) -> None:
        """Leave the wrapped engine to whoever made it."""
