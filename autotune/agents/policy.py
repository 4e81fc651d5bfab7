"""State what a policy is: something that turns an observation into the next plan."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from autotune.cost_model.profile import Profile
from autotune.gym.observation import Observation
from autotune.plan import Plan


@runtime_checkable
class Policy(Protocol):
    """Decide the next plan. A user's own object with these members is a policy.

    Attributes:
        name: what the policy is called in reports.
    """

    name: str

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        """Return the plan to run next.

        Args:
            observation: what the last window saw.
            plan: the plan that is running.
        """
        ...

    def reset(self) -> None:
        """Forget the run, before another one begins."""
        ...


@runtime_checkable
class PlanningPolicy(Protocol):
    """A policy that plans from a profile of the run.

    While a run is attached, such a policy's storage is no last word: each batch gets the fastest storage that fits its
    size and the budget of the moment. A policy without :meth:`begin` is followed to the letter where its plan fits.

    It may have an attribute ``reserve_frac``: the share of the device's memory, from 0 to below 1, that plans leave
    free until its next decision, since other processes may take it between two readings.
    """

    def begin(self, profile: Profile, budget_bytes: int | None) -> Plan:
        """Begin a run, and return the plan to launch it with.

        Args:
            profile: What the run costs.
            budget_bytes: The memory budget; ``None`` for none.
        """
        ...

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        """Return the plan to run next, as :meth:`Policy.decide` does."""
        ...


class StaticPolicy:
    """Run one plan from the first step to the last.

    Attributes:
        name: what the policy is called.
        plan: the plan.
    """

    def __init__(self, name: str, plan: Plan) -> None:
        self.name = name
        self.plan = plan

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        """Return the one plan."""
        return self.plan

    def reset(self) -> None:
        """Do nothing: there is nothing to forget."""
