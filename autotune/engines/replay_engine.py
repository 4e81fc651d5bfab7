"""Answer windows from a function or a record instead of training: the fake that tests and demonstrations plug in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autotune.errors import EngineError
from autotune.measurement import Measurement
from autotune.plan import Plan, PlanSpace


class ReplayEngine:
    """Be an engine whose windows are known beforehand.

    Args:
        space: the plans that can be applied.
        answers: what a window of a plan measures: a function of plan and steps, or a record by plan.
        metrics: what successive evaluations return; the last one repeats.
    """

    def __init__(
        self,
        space: PlanSpace,
        answers: Callable[[Plan, int], Measurement] | Mapping[Plan, Measurement],
        *,
        metrics: tuple[float, ...] = (0.0,),
    ) -> None:
        self._space = space
        self._answers = answers
        self._metrics = metrics
        self._plan = space.baseline()
        self._evaluations = 0
        self._closed = False
        self.memory_budget_bytes: int | None = None
        self.windows: list[tuple[Plan, int]] = []

    @property
    def space(self) -> PlanSpace:
        """Return the plans that can be applied."""
        return self._space

    @property
    def plan(self) -> Plan:
        """Return the plan that is applied."""
        return self._plan

    def apply(self, plan: Plan) -> None:
        """Make the next windows answer for a plan."""
        self._plan = self._space.check(plan)

    def run(self, steps: int) -> Measurement:
        """Return the recorded window.

        Raises:
            EngineError: if the engine was closed, or the plan is not in the record.
        """
        if self._closed:
            raise EngineError("the engine is closed; create another one")
        self.windows.append((self._plan, steps))
        if callable(self._answers):
            return self._answers(self._plan, steps)
        if self._plan not in self._answers:
            raise EngineError(f"nothing is recorded for the plan {self._plan}")
        return self._answers[self._plan]

    def evaluate(self) -> float:
        """Return the next metric."""
        metric = self._metrics[min(self._evaluations, len(self._metrics) - 1)]
        self._evaluations += 1
        return metric

    def snapshot(self) -> tuple[Plan, int]:
        """Return the position in the record."""
        return self._plan, self._evaluations

    def restore(self, snapshot: tuple[Plan, int]) -> None:
        """Return to a position in the record."""
        self._plan, self._evaluations = snapshot

    def close(self) -> None:
        """Refuse further windows."""
        self._closed = True
