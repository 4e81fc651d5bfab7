"""The registry of policies, from this package and other packages.

To add a policy, register a function that returns it here, or define an entry point ``autotune.policies`` in another
package: a class or function without arguments that returns a :class:`~autotune.agents.policy.Policy`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autotune.agents.entry_points import POLICY_GROUP, Registry
from autotune.agents.policy import PlanningPolicy, Policy
from autotune.errors import InputError
from autotune.gym.observation import Observation
from autotune.plan import Plan


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


class _NamedPolicy:
    """A policy whose exceptions become one sentence that names its package.

    Other attributes are those of the policy.

    Args:
        registry: the registry of the entry that made the policy.
        name: the entry's name.
        policy: the policy.
    """

    def __init__(self, registry: Registry[Any], name: str, policy: Policy) -> None:
        self._registry, self._entry, self._policy = registry, name, policy
        self.name = policy.name

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        """Return the policy's next plan.

        Raises:
            InputError: if another package's policy fails or returns something that is not a plan.
        """
        with self._registry.errors_named(self._entry):
            answer = self._policy.decide(observation, plan)
            if not isinstance(answer, Plan):
                raise TypeError(f"expected a Plan from decide(), got {type(answer).__name__}")
            return answer

    def reset(self) -> None:
        """Reset the policy.

        Raises:
            InputError: if another package's policy fails.
        """
        with self._registry.errors_named(self._entry):
            self._policy.reset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


def with_named_errors(registry: Registry[Any], name: str, policy: Policy) -> Policy:
    """Return a policy whose exceptions name its package; a policy of this package is returned as it is.

    Args:
        registry: the registry of the entry that made the policy.
        name: the entry's name.
        policy: the policy.
    """
    return policy if name in registry.registered or name not in registry else _NamedPolicy(registry, name, policy)


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


@POLICIES.register("last-dip")
def _last_dip() -> Policy:
    """Return the planner with a rule of two lines: the next dip of the memory comes after the last interval again."""
    from autotune.agents.planner_policy import PlannerPolicy
    from autotune.agents.policy_folder import shipped_policy

    return PlannerPolicy("last-dip", replace(shipped_policy().settings, dips="last"))


@POLICIES.register("full-budget")
def _full_budget() -> Policy:
    """Return the planner's first plan, which is kept whatever happens."""
    from autotune.agents.planner_policy import FirstPlan
    from autotune.agents.policy_folder import shipped_policy

    return FirstPlan("full-budget", shipped_policy().settings)


@POLICIES.register("ppo")
def _shipped() -> Policy:
    """Return the shipped policy."""
    from autotune.agents.policy_folder import shipped_policy

    return shipped_policy()
