"""Tests of the lever environment on top of the plan environment, and of plans from prices."""

from __future__ import annotations

import numpy as np
import optuna
import pytest
import tiny_job
from gymnasium.utils.env_checker import check_env
from simulated_engine import SimulatedEngine

from autotune.agents.optuna_search import OptunaPriceSearch
from autotune.agents.planner_policy import PlannerPolicy
from autotune.agents.priced_plans import PricedPlans
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.solver import SAFETY_MARGIN, Goal, solve
from autotune.errors import InputError
from autotune.gym.job_env import TuningEnv
from autotune.gym.lever_env import LeverEnv
from autotune.gym.levers import NEUTRAL, SIZES
from autotune.simulator.random_jobs import draw_job


@pytest.fixture(scope="module")
def job():
    return draw_job(np.random.default_rng(4), depth=(4, 4))


def env_of(job, **changes: object) -> LeverEnv:
    arguments: dict = {"memory_budget_bytes": "60%", "window_steps": 4, "max_windows": 4, "evaluate": False, **changes}
    plans = TuningEnv(tiny_job.job(), lambda seed: SimulatedEngine(job, seed=seed), **arguments)
    return LeverEnv(plans, job.profile)


def test_gymnasium_checker_passes(job) -> None:
    check_env(env_of(job), skip_render_check=True)


def test_neutral_levers_give_the_plans_of_the_planner(job) -> None:
    env = env_of(job)
    env.reset(seed=3)
    policy = PlannerPolicy()
    policy.begin(job.profile, env.env.memory_budget_bytes)
    ended = False
    while not ended:
        assert env.env.observation is not None
        wanted = policy.decide(env.env.observation, env.env.observation.plan)
        _, _, terminated, ended, info = env.step(np.array(NEUTRAL))
        assert info["plan"] == wanted.to_json()
        assert not terminated
        assert info["failure"] is None


@pytest.mark.parametrize("action", [[0] * 5, [0] * 7, [99] * 6, [-1] * 6, [float("nan")] * 6])
def test_actions_outside_the_space_are_rejected(job, action) -> None:
    env = env_of(job)
    env.reset(seed=0)
    with pytest.raises(InputError, match="action"), np.errstate(invalid="ignore"):
        env.step(np.array(action))


def test_every_action_in_the_space_gives_a_plan(job) -> None:
    env, generator = env_of(job, max_windows=40), np.random.default_rng(0)
    env.reset(seed=1)
    for _ in range(30):
        observation, reward, _, _, _ = env.step(generator.integers(0, SIZES))
        assert np.isfinite(reward)
        assert all(np.isfinite(part).all() for part in observation.values())


def test_profile_of_another_job_is_rejected(job) -> None:
    other = draw_job(np.random.default_rng(5), depth=(6, 6))
    with pytest.raises(InputError, match="units"):
        LeverEnv(env_of(job).env, other.profile)


def test_plan_at_price_zero_is_the_solver_optimum(job) -> None:
    profile = job.profile
    budget = int(0.6 * peak_bytes(profile, profile.space.baseline()))
    solution = solve(profile, budget, Goal())
    priced = PricedPlans(profile, budget)
    k = solution.plan.accumulation_steps
    found = priced.plan(k, 1 - SAFETY_MARGIN, 0.0)
    from autotune.cost_model.time_model import seconds_per_step

    assert seconds_per_step(profile, found) == pytest.approx(solution.seconds_per_step, rel=1e-3)
    dear = priced.plan(k, 2.0, 5.0)
    assert all(str(precision) == "fp32" for precision in dear.precision.values())
    least = priced.plan(k, 0.0, 0.0)
    assert least.accumulation_steps == k
    assert peak_bytes(profile, least) <= peak_bytes(profile, found)


def test_optuna_searches_prices_and_begins_with_the_planner_solutions(job, tmp_path) -> None:
    profile = job.profile
    priced = PricedPlans(profile, int(0.6 * peak_bytes(profile, profile.space.baseline())))
    search = OptunaPriceSearch(priced, profile.space, tmp_path, seed=0)
    firsts = [search.ask() for _ in profile.accumulation_choices]
    assert [plan.accumulation_steps for plan in firsts] == list(profile.accumulation_choices)
    assert firsts[0] == priced.plan(profile.accumulation_choices[0], 1.0, 0.0)
    assert all(profile.space.check(search.ask()) for _ in range(5))
    names = {name for trial in search.study.get_trials() for name in trial.params}
    assert names == {"k", "share", "price_16_bit"}
    search.close()
    assert optuna.load_study(study_name="prices", storage=f"sqlite:///{tmp_path}/optuna.db").trials
