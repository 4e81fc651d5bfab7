"""The engine protocol: an engine turns a plan into a measurement."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from autotune.errors import EngineError
from autotune.measurement import Measurement
from autotune.plan import Plan, PlanSpace


@runtime_checkable
class Engine(Protocol):
    """Something that runs a job under plans.

    A plan is applied only between steps; applying it is idempotent and fully reversible. Running out of memory, a loss
    that is not finite and a crash are reported as ``Measurement.failure``, after which the engine can run more windows.

    Attributes:
        memory_budget_bytes: memory budget of each window, ``None`` for no budget; may change between windows.
    """

    memory_budget_bytes: int | None

    @property
    def space(self) -> PlanSpace:
        """Return the plans that can be applied, units in forward order."""
        ...

    @property
    def plan(self) -> Plan:
        """Return the plan that is applied."""
        ...

    def apply(self, plan: Plan) -> None:
        """Make the next steps run under a plan.

        Raises:
            PlanError: if the plan lies outside the space; the previous plan stays.
        """
        ...

    def run(self, steps: int) -> Measurement:
        """Run a window of optimizer steps; a failure ends it early.

        Raises:
            EngineError: if the engine was closed.
        """
        ...

    def evaluate(self) -> float:
        """Return the job's metric in the user's own precision, without changing the training state."""
        ...

    def snapshot(self) -> Any:
        """Return weights, optimizer, buffers, generators and counters as an opaque value.

        Raises:
            EngineError: if the engine has no single training state.
        """
        ...

    def restore(self, snapshot: Any) -> None:
        """Return to a snapshot; the applied plan stays."""
        ...

    def close(self) -> None:
        """Release the model; the engine cannot run afterwards."""
        ...


@runtime_checkable
class PreparingEngine(Engine, Protocol):
    """An engine that can run several windows at once.

    Attributes:
        ahead: number of windows worth preparing before the first of them is run.
    """

    ahead: int

    def prepare(self, plan: Plan, steps: int) -> None:
        """Begin a window that :meth:`run` will return later."""
        ...


class EngineBase:
    """Base of engines: the space, the applied plan, the budget, and whether the engine was closed.

    Args:
        space: the plans that can be applied; the baseline is applied first.
    """

    memory_budget_bytes: int | None = None
    _closed = False

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self.plan = space.baseline()

    def apply(self, plan: Plan) -> None:
        """Make the next window run under a plan.

        Raises:
            PlanError: if the plan lies outside the space; the previous plan stays.
        """
        self.plan = self.space.check(plan)

    def close(self) -> None:
        """Refuse further windows."""
        self._closed = True

    def require_open(self) -> None:
        """Raise :class:`EngineError` if the engine was closed."""
        if self._closed:
            raise EngineError("the engine is closed; create another one")


class EngineProxy(EngineBase):
    """Base of engines that wrap another one and pass it the plan and the budget with each window.

    Args:
        engine: the wrapped engine.

    Attributes:
        engine: the wrapped engine.
        ahead: number of windows worth preparing before the first of them is run.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.space)
        self.engine = engine
        self.plan = engine.plan
        self.memory_budget_bytes = engine.memory_budget_bytes
        self.ahead = engine.ahead if isinstance(engine, PreparingEngine) else 1

    def prepare(self, plan: Plan, steps: int) -> None:
        """Let the wrapped engine begin a window, if it can run several at once."""
        if isinstance(self.engine, PreparingEngine):
            self.engine.memory_budget_bytes = self.memory_budget_bytes
            self.engine.prepare(plan, steps)

    def run(self, steps: int) -> Measurement:
        """Run a window on the wrapped engine, which may change the budget."""
        self.engine.memory_budget_bytes = self.memory_budget_bytes
        self.engine.apply(self.plan)
        measurement = self.engine.run(steps)
        self.memory_budget_bytes = self.engine.memory_budget_bytes
        return measurement

    def evaluate(self) -> float:
        """Return the metric of the wrapped engine's model."""
        return self.engine.evaluate()

    def snapshot(self) -> Any:
        """Return the wrapped engine's training state."""
        return self.engine.snapshot()

    def restore(self, snapshot: Any) -> None:
        """Return the wrapped engine to a snapshot."""
        self.engine.restore(snapshot)

    def close(self) -> None:
        """Close the wrapped engine and refuse further windows."""
        super().close()
        self.engine.close()
