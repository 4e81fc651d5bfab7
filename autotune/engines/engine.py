"""State what an engine is: something that turns a plan into a measurement."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from autotune.measurement import Measurement
from autotune.plan import Plan, PlanSpace


@runtime_checkable
class Engine(Protocol):
    """Run a job under plans.

    A plan is applied between steps only, is idempotent and fully reversible. Running out of memory, a loss that is not
    finite and a crash are values of a window (``Measurement.failure``), and leave the training state as it was.

    Attributes:
        memory_budget_bytes: the budget that windows are held to, ``None`` for no budget; may change between windows.
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
            PlanError: if the plan lies outside the space; the former plan stays.
        """
        ...

    def run(self, steps: int) -> Measurement:
        """Run a window of optimizer steps; a failure ends it early."""
        ...

    def evaluate(self) -> float:
        """Return the job's metric in the user's own precision; training is not touched."""
        ...

    def snapshot(self) -> Any:
        """Return weights, optimizer, buffers, generators and counters, as an opaque value."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Return to a snapshot."""
        ...

    def close(self) -> None:
        """Release the model; the engine cannot run afterwards."""
        ...


@runtime_checkable
class PreparingEngine(Engine, Protocol):
    """Run windows ahead of being asked for them.

    Attributes:
        ahead: windows that are worth preparing before the first of them is asked for.
    """

    ahead: int

    def prepare(self, plan: Plan, steps: int) -> None:
        """Begin a window that :meth:`run` will be asked for."""
        ...
