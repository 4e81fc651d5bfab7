"""An engine that returns recorded or computed windows instead of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.engines.engine import EngineBase
from autotune.errors import EngineError, InputError
from autotune.io.files import read_json_lines
from autotune.measurement import Failure, Measurement
from autotune.plan import Plan, PlanSpace, Precision
from autotune.units import Unit

Trace = Mapping[Plan, Sequence[Measurement]]


def read_trace(path: Path) -> dict[Plan, list[Measurement]]:
    """Return the windows of a recorded search (``trials.jsonl`` of a run), by plan, in the order of measuring.

    Raises:
        InputError: naming the line that is not a recorded window.
    """
    trace: dict[Plan, list[Measurement]] = {}
    for number, entry in enumerate(read_json_lines(path), 1):
        where = f"{path}, line {number}"
        if "plan" not in entry or "measurement" not in entry:
            raise InputError("is no recorded window", where=where, allowed="plan and measurement")
        plan, window = entry["plan"], entry["measurement"]
        trace.setdefault(Plan.from_json(plan, where=where), []).append(Measurement.from_json(window, where=where))
    if not trace:
        raise InputError("holds no window", where=str(path), allowed="at least one")
    return trace


def space_of(plans: Iterable[Plan]) -> PlanSpace:
    """Return the smallest space that contains the plans; the sizes of its units are unknown."""
    plans = list(plans)
    first = plans[0]
    return PlanSpace(
        units=tuple(
            Unit(name=name, kind="", recomputable=name in first.storage, parameter_names=(), num_parameters=0)
            for name in first.precision
        ),
        accumulation_choices=tuple(sorted({plan.accumulation_steps for plan in plans})),
        precisions=tuple(p for p in Precision if any(p in plan.precision.values() for plan in plans)),
    )


class ReplayEngine(EngineBase):
    """An engine whose windows are known in advance.

    Args:
        space: the plans that can be applied.
        answers: the measurement of a window: a function of plan and steps, or a record by plan, whose windows are
            returned in turn.
        metrics: what successive evaluations return; the last one repeats.
    """

    def __init__(
        self,
        space: PlanSpace,
        answers: Callable[[Plan, int], Measurement] | Trace,
        *,
        metrics: tuple[float, ...] = (0.0,),
    ) -> None:
        super().__init__(space)
        self._answers = answers
        self._metrics = metrics
        self._evaluations = 0
        self.windows: list[tuple[Plan, int]] = []

    def run(self, steps: int) -> Measurement:
        """Return the recorded window.

        Raises:
            EngineError: if the engine was closed, or the plan is not in the record.
        """
        self.require_open()
        seen = sum(plan == self.plan for plan, _ in self.windows)
        self.windows.append((self.plan, steps))
        if callable(self._answers):
            return self._answers(self.plan, steps)
        if self.plan not in self._answers:
            raise EngineError(f"nothing is recorded for the plan {self.plan}")
        recorded = self._answers[self.plan]
        return self._held(recorded[seen % len(recorded)])

    def _held(self, window: Measurement) -> Measurement:
        """Return a recorded window as it would have been under the current budget."""
        budget, peak = self.memory_budget_bytes, window.peak_bytes
        if window.failure not in (None, Failure.OVER_BUDGET):
            return window
        over = budget is not None and peak is not None and peak > budget
        if over:
            detail = f"peak {peak} bytes over {budget}"
            return replace(window, memory_budget_bytes=budget, failure=Failure.OVER_BUDGET, failure_detail=detail)
        return replace(window, memory_budget_bytes=budget, failure=None, failure_detail="")

    def evaluate(self) -> float:
        """Return the next metric."""
        metric = self._metrics[min(self._evaluations, len(self._metrics) - 1)]
        self._evaluations += 1
        return metric

    def snapshot(self) -> int:
        """Return the position in the record."""
        return self._evaluations

    def restore(self, snapshot: int) -> None:
        """Return to a position in the record."""
        self._evaluations = snapshot
