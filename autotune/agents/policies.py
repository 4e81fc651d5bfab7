"""The registry of policies, from this package and other packages.

To add a policy, register a function that returns it here, or define an entry point ``autotune.policies`` in another
package: a class or function without arguments that returns a :class:`~autotune.agents.policy.Policy`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.agents.entry_points import POLICY_GROUP, Registry
from autotune.agents.policy import PlanningPolicy, Policy
from autotune.errors import InputError


def _as_factory(given: Any) -> Callable[[], Policy]:
    if not callable(given):
        raise TypeError(f"expected a policy class, got {type(given).__name__}")
    factory: Callable[[], Policy] = given
    return factory


POLICIES: Registry[Callable[[], Policy]] = Registry("policy", POLICY_GROUP, _as_factory)


def make_policy(name: str) -> Policy:
    """Return a new policy.

    Raises:
        InputError: if the name is unknown, or its package cannot make a policy.
        PolicyFileError: if the shipped policy is missing or damaged.
    """
    factory = POLICIES[name]
    with POLICIES.errors_named(name):
        policy = factory()
        if not isinstance(policy, Policy):
            raise TypeError(f"expected a Policy with name, decide() and reset(), got {type(policy).__name__}")
        return policy


def planning_policy(name: str) -> PlanningPolicy:
    """Return a new policy that plans from a profile.

    Raises:
        InputError: if the policy does not plan from a profile, or as for :func:`make_policy`.
        PolicyFileError: as for :func:`make_policy`.
    """
    policy = make_policy(name)
    if not isinstance(policy, PlanningPolicy):
        raise InputError(
            f"policy {name!r} has no begin(profile, budget_bytes) and decides only while a run trains",
            where="--method",
            allowed=f"autotune compare JOB --arms {name}",
        )
    return policy


@POLICIES.register("planner")
def _planner() -> Policy:
    """Return the planner without a network, with the settings of the shipped policy."""
    from autotune.agents.planner_policy import PlannerPolicy
    from autotune.agents.policy_folder import shipped_policy

    return PlannerPolicy("planner", shipped_policy().settings)


@POLICIES.register("ppo")
def _shipped() -> Policy:
    """Return the shipped policy."""
    from autotune.agents.policy_folder import shipped_policy

    return shipped_policy()
