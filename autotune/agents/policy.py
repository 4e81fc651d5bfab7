"""State what a policy is: something that turns an observation into the next plan."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

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
