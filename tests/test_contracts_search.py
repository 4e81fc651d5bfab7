"""Contract of every search method, those of installed packages included: proposals, seeds and the budget of steps."""

from pathlib import Path

import numpy as np
import pytest
import tiny_job
from known_problem import KnownEngine
from test_env import plain_window

from autotune import Measurement, Plan
from autotune.agents.search import Search, SearchContext
from autotune.agents.search_methods import METHODS, PlanningMethod, SearchMethod, make_search
from autotune.budget import MemoryBudget
from autotune.campaign import plan_search
from autotune.campaign.baselines import measure_references
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.solver import Goal
from autotune.cost_model.time_model import seconds_per_step
from autotune.gym.observation import Observation
from autotune.measurement import Failure
from autotune.records.run_directory import RunDirectory
from autotune.simulator.random_jobs import draw_job

PROFILE = draw_job(np.random.default_rng(1), depth=(2, 4)).profile
SPACE = PROFILE.space
BUDGET = int(0.8 * peak_bytes(PROFILE, SPACE.baseline()))
FOUND = {name: METHODS[name] for name in METHODS.names}
SEARCHES = [name for name, method in FOUND.items() if isinstance(method, SearchMethod)]
SPREADING = [name for name in SEARCHES if METHODS[name].spreads]
PLANNING = [name for name, method in FOUND.items() if isinstance(method, PlanningMethod)]
UNPROFILED = [name for name, method in FOUND.items() if not method.needs_profile]


def search_of(name: str, folder: Path, *, seed: int = 3, ahead: int = 1) -> Search:
    method = METHODS[name]
    assert isinstance(method, SearchMethod)
    folder.mkdir(exist_ok=True)
    context = SearchContext(
        space=SPACE,
        seed=seed,
        memory_budget_bytes=BUDGET,
        profile=PROFILE if method.needs_profile else None,
        first=(SPACE.leanest(),),
        ahead=ahead,
        place=folder,
    )
    return make_search(name, method, context)


def observe(plan: Plan, window: Measurement) -> Observation:
    reference = plain_window(SPACE.baseline(), 3)
    return Observation(space=SPACE, plan=plan, window=window, reference=reference, memory_budget_bytes=BUDGET)


def tell(search: Search, plan: Plan) -> None:
    search.tell(plan, observe(plan, plain_window(plan, 3)), seconds_per_step(PROFILE, plan))


@pytest.mark.parametrize("name", SEARCHES)
def test_search_proposes_plans_in_the_space_even_if_measurements_fail(name: str, tmp_path: Path) -> None:
    search = search_of(name, tmp_path)
    for number, failure in enumerate([None, *Failure] * 2):
        plan = SPACE.check(search.ask())
        window = (
            plain_window(plan, 3)
            if failure is None
            else Measurement(steps=1, samples=8, items=8, total_s=0.1, peak_bytes=2 * BUDGET, failure=failure)
        )
        search.tell(plan, observe(plan, window), 1.0 + number)
    search.close()


@pytest.mark.parametrize("name", SEARCHES)
def test_same_seed_gives_the_same_proposals(name: str, tmp_path: Path) -> None:
    def proposals(folder: Path) -> list[Plan]:
        search, plans = search_of(name, folder), []
        for _ in range(12):
            plans.append(search.ask())
            tell(search, plans[-1])
        search.close()
        return plans

    assert proposals(tmp_path / "a") == proposals(tmp_path / "b")


@pytest.mark.parametrize("name", SPREADING)
def test_parallel_method_proposes_before_measurements_arrive(name: str, tmp_path: Path) -> None:
    search = search_of(name, tmp_path, ahead=4)
    waiting = [search.ask() for _ in range(4)]
    for _ in range(6):
        tell(search, waiting.pop(0))
        waiting.append(search.ask())
    assert all(SPACE.check(plan) == plan for plan in waiting)
    search.close()


@pytest.mark.parametrize("name", SEARCHES)
def test_search_can_be_closed_with_unanswered_proposals(name: str, tmp_path: Path) -> None:
    search = search_of(name, tmp_path)
    search.ask()
    search.close()


@pytest.mark.parametrize("name", PLANNING)
def test_planning_method_repeats_its_fitting_plans(name: str) -> None:
    method = METHODS[name]
    assert isinstance(method, PlanningMethod)
    # A method that chooses only k cannot reach every budget.
    budget = BUDGET if name != "k-optimal" else 2 * BUDGET
    plans = method.plans(PROFILE, budget, Goal())
    assert plans == method.plans(PROFILE, budget, Goal())
    assert len(set(plans)) == len(plans) >= 1
    for plan in plans:
        assert SPACE.check(plan) == plan
        assert peak_bytes(PROFILE, plan) <= budget


@pytest.mark.parametrize("name", UNPROFILED)
def test_method_keeps_its_budgets_of_steps_and_trials(name: str, tmp_path: Path) -> None:
    references = measure_references(engine := KnownEngine(), MemoryBudget.parse("60%"))
    run = RunDirectory.create(tmp_path, "tune", tiny_job.job(), {})
    settings = plan_search.TuningSettings(steps=70, trials=6)
    result = plan_search.tune(tiny_job.job(), name, engine, references, settings, run=run)
    measured = sum(max(trial.measurement.steps, 1) for trial in result.trials)
    assert result.tuning_steps == measured + references.steps <= settings.steps
    assert len([trial for trial in result.trials if not trial.final]) <= 6
