"""The registry of tuning methods, with all properties of a method that a campaign needs.

To add a method, add an entry here, or an entry point ``autotune.searches`` in another package: a class (or function)
that makes a :class:`~autotune.agents.search.Search` from a :class:`~autotune.agents.search.SearchContext`, or a
:class:`Method`, which can also set the properties.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from autotune.agents.entry_points import SEARCH_GROUP, Registry
from autotune.agents.planner import close_plans, densest_plan, greedy_plan, policy_plans
from autotune.agents.policies import POLICIES, planning_policy
from autotune.agents.search import RandomSearch, Search, SearchContext
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import Goal
from autotune.errors import InputError
from autotune.plan import Plan

if TYPE_CHECKING:
    from autotune.agents.ppo import Trained
    from autotune.gym.job_env import TuningEnv


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A tuning method.

    Attributes:
        needs_profile: whether it needs the job's profile, whose cost then counts as tuning cost.
        spreads: whether it can propose plans before earlier ones are measured, so that a cluster makes it faster.
        weighs_energy: whether it can minimise energy alone; a method that plans from a profile cannot.
        prices: whether it prices many plans of one process at once, which cannot be done for those of a pipeline.
    """

    needs_profile: bool = False
    spreads: bool = False
    weighs_energy: bool = True
    prices: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchMethod(Method):
    """A method that measures the plans that a search proposes.

    Attributes:
        make: returns a new search.
    """

    make: Callable[[SearchContext], Search]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningMethod(Method):
    """A method that plans from the profile alone; only the plans it prefers are measured.

    Attributes:
        plans: returns plans, best first, for a profile, a memory budget in bytes (``None`` for none) and a goal.
        explanation: reason that reports give for every choice in such a plan.
    """

    plans: Callable[[Profile, int | None, Goal], list[Plan]]
    explanation: str
    needs_profile: bool = True
    weighs_energy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMethod(Method):
    """A method that trains a new network on measured plans.

    Attributes:
        train: trains a network on an environment, with a random seed and a plan to start near.
    """

    train: Callable[[TuningEnv, int, Plan], Trained]


def _as_method(given: Any) -> Method:
    if isinstance(given, SearchMethod | PlanningMethod | TrainingMethod):
        return given
    if not callable(given):
        raise TypeError(f"expected a search class or a Method, got {type(given).__name__}")
    return SearchMethod(make=given)


METHODS: Registry[Method] = Registry("method", SEARCH_GROUP, _as_method)


def find_method(name: str) -> Method:
    """Return a method: an entry of ``METHODS``, or a planning method made from a registered policy.

    Raises:
        InputError: if the name is unknown, its package cannot be loaded, or the policy does not plan from a profile.
    """
    if name not in METHODS and name in POLICIES:
        planning_policy(name)
        return _by_policy(name, f"part of the plan that the policy {name} launches with, from the measured profile")
    if name not in METHODS:
        raise InputError(
            f"method is {name!r}",
            where="--method",
            allowed=dict.fromkeys((*METHODS.names, *POLICIES.names)),
            given=name,
        )
    return METHODS[name]


def make_search(name: str, method: SearchMethod, context: SearchContext) -> Search:
    """Return a new search of a method.

    Raises:
        InputError: if the method belongs to another package and cannot make a search.
    """
    with METHODS.errors_named(name):
        search = method.make(context)
        if not isinstance(search, Search):
            raise TypeError(f"expected a Search with ask(), tell() and close(), got {type(search).__name__}")
        return search


def _by_policy(name: str, explanation: str) -> PlanningMethod:
    return PlanningMethod(plans=partial(policy_plans, name), explanation=explanation, prices=True)


def _greedy(profile: Profile, budget_bytes: int | None, goal: Goal) -> list[Plan]:
    return [greedy_plan(profile, budget_bytes, goal)]


def _densest(profile: Profile, budget_bytes: int | None, _: Goal) -> list[Plan]:
    return [densest_plan(profile, budget_bytes)]


def _random(context: SearchContext) -> Search:
    return RandomSearch(context.space, context.seed)


def _load_optuna() -> None:
    """Import Optuna in a thread of its own.

    Optuna keeps the errors of its optional libraries that are missing. Their tracebacks keep the frames of whoever
    imports it first, and so the engine of a tuning, with all its memory on the device.
    """
    with ThreadPoolExecutor(1) as thread:
        thread.submit(importlib.import_module, "optuna").result()


def _optuna(context: SearchContext) -> Search:
    _load_optuna()
    from autotune.agents.optuna_search import OptunaSearch

    return OptunaSearch(context.space, context.place, context.seed, context.first, ahead=context.ahead)


def _optuna_prices(context: SearchContext) -> Search:
    _load_optuna()
    from autotune.agents.optuna_search import OptunaPriceSearch
    from autotune.agents.priced_plans import PricedPlans

    assert context.profile is not None
    priced = PricedPlans(context.profile, context.memory_budget_bytes)
    return OptunaPriceSearch(priced, context.space, context.place, context.seed, ahead=context.ahead)


def _ppo(env: TuningEnv, seed: int, start: Plan) -> Trained:
    from autotune.agents import ppo

    return ppo.train(env, ppo.Recipe(), seed=seed, start=start)


for _name, _method in {
    "greedy": PlanningMethod(
        plans=_greedy,
        explanation="lowest precision; recomputed only where that saves most bytes per second, until the plan fits",
    ),
    "k-optimal": PlanningMethod(
        plans=_densest,
        explanation="eq. 9 of the paper: the k with the most samples per second and byte, all else as is",
    ),
    "exact": PlanningMethod(
        plans=close_plans, explanation="part of the fastest plan that the measured profile predicts to fit"
    ),
    "planner": _by_policy("planner", "part of the plan that the planner launches with, from the measured profile"),
    "ppo": _by_policy(
        "ppo", "part of the plan that the shipped policy and its planner launch with, from the measured profile"
    ),
    "random": SearchMethod(make=_random, spreads=True),
    "optuna": SearchMethod(make=_optuna, spreads=True),
    "optuna-prices": SearchMethod(
        make=_optuna_prices, needs_profile=True, spreads=True, weighs_energy=False, prices=True
    ),
    "ppo-scratch": TrainingMethod(train=_ppo),
}.items():
    METHODS.register(_name)(_method)
