"""The protocols of policies: a policy turns an observation into the next plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol, runtime_checkable

from annotated_types import Interval

from autotune.cost_model.profile import Profile
from autotune.gym.observation import Observation
from autotune.io.documents import STRICT, Count, NotNegative
from autotune.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DipOutlook:
    """What a policy expects of dips of the memory budget that nobody announces.

    Attributes:
        seen: number of dips so far.
        windows: windows since the last one began.
        chance: probability that one begins in the next window.
        left_bytes: memory that it is expected to leave, in bytes.
    """

    __pydantic_config__ = STRICT

    seen: Count
    windows: Count
    chance: Annotated[float, Interval(ge=0, le=1)]
    left_bytes: NotNegative


@runtime_checkable
class Policy(Protocol):
    """Decides the next plan. Any object with these members is a policy.

    Attributes:
        name: name of the policy in reports.
    """

    name: str

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        """Return the plan to run next.

        Args:
            observation: features and measurements of the last window.
            plan: the running plan.
        """
        ...

    def reset(self) -> None:
        """Reset the state before a new run."""
        ...


@runtime_checkable
class PlanningPolicy(Protocol):
    """A policy that plans from a profile of the run.

    In an attached run, the storage of its plans is only a suggestion: each batch gets the fastest storage that fits its
    size and the current budget. A plan of a policy without :meth:`begin` is applied unchanged if it fits.

    A planning policy may have an attribute ``reserve_frac``: the share of the device's memory, from 0 to below 1, that
    plans leave free until its next decision, because other processes may use it between two measurements. It may also
    have an attribute ``dips``, a :class:`DipOutlook` or ``None``, which an attached run writes to its log.
    """

    def begin(self, profile: Profile, budget_bytes: int | None) -> Plan:
        """Begin a run and return its initial plan.

        Args:
            profile: the profile of the job.
            budget_bytes: memory budget; ``None`` for none.
        """
        ...

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        """Return the plan to run next, as :meth:`Policy.decide` does."""
        ...


class StaticPolicy:
    """A policy that keeps one plan from the first step to the last.

    Attributes:
        name: name of the policy.
        plan: the plan.
    """

    def __init__(self, name: str, plan: Plan) -> None:
        self.name = name
        self.plan = plan

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        """Return the plan."""
        return self.plan

    def reset(self) -> None:
        """Do nothing; the policy has no state."""
