"""Tests of the Gymnasium environments of simulated runs, in which the shipped policy is trained."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from lever_gains import neutral_actions
from stable_baselines3 import PPO

from autotune.agents.recipe import read_recipe
from autotune.errors import InputError
from autotune.gym.levers import SIZES, levers_of
from autotune.gym.moving_env import MovingEnv
from autotune.gym.simulated_env import SimulatedEnv, SimulatedVectorEnv
from autotune.simulator.moving_conditions import RECORDED
from autotune.simulator.random_jobs import draw_job

RECIPE = Path(__file__).parent.parent / "policies" / "ppo.toml"


def some_jobs(count: int = 6):
    generator = np.random.default_rng(0)
    return [draw_job(generator, depth=(2, 9)) for _ in range(count)]


def rollout(env: SimulatedVectorEnv, seed: int, steps: int) -> list[tuple]:
    env.reset(seed=seed)
    env.action_space.seed(seed)
    return [env.step(env.action_space.sample()) for _ in range(steps)]


def test_conditions_change_as_the_recipe_of_the_shipped_policy_says() -> None:
    assert read_recipe(RECIPE).strengths == RECORDED


def test_runs_equal_those_that_the_policy_is_trained_on() -> None:
    jobs = some_jobs()
    seen, moving = SimulatedVectorEnv(jobs, 8, windows=6, seed=3), MovingEnv(jobs, RECORDED, 8, windows=6, seed=3)
    observation, _ = seen.reset(seed=5)
    moving.reseed(5)
    run, units = moving.reset()
    actions = np.random.default_rng(1).integers(0, SIZES, (13, 8, len(SIZES)))
    for number, action in enumerate(actions, start=1):
        np.testing.assert_array_equal(observation["run"], run)
        np.testing.assert_array_equal(observation["units"], units.reshape(8, -1))
        observation, rewards, terminated, truncated, infos = seen.step(action)
        (run, units), won, ended = moving.step(action)
        np.testing.assert_array_equal(rewards, won)
        assert bool(terminated.all()) == bool(terminated.any()) == ended == (number % 6 == 0)
        assert not truncated.any()
        if ended:
            np.testing.assert_array_equal(infos["final_obs"]["run"], run)
            run, units = moving.reset()


def test_observations_stay_in_their_space_and_repeat_under_one_seed() -> None:
    env = SimulatedVectorEnv(some_jobs(), 8, windows=6)
    one, two, other = rollout(env, 4, 15), rollout(env, 4, 15), rollout(env, 7, 15)
    for first, second in zip(one, two, strict=True):
        assert env.observation_space.contains(first[0])
        assert np.isfinite(first[1]).all()
        assert (first[4]["seconds"] > 0).all()
        np.testing.assert_array_equal(first[1], second[1])
        for name in first[0]:
            np.testing.assert_array_equal(first[0][name], second[0][name])
    assert any((first[1] != third[1]).any() for first, third in zip(one, other, strict=True))


def test_single_run_equals_a_lane_of_many_and_passes_the_gymnasium_checker() -> None:
    jobs = some_jobs()
    alone, lane = SimulatedEnv(jobs, windows=5), SimulatedVectorEnv(jobs, 1, windows=5)
    check_env(SimulatedEnv(jobs, windows=5), skip_render_check=True)
    observation, together = alone.reset(seed=2)[0], lane.reset(seed=2)[0]
    for action in np.random.default_rng(0).integers(0, SIZES, (5, len(SIZES))):
        np.testing.assert_array_equal(observation["run"], together["run"][0])
        observation, reward, terminated, _, info = alone.step(action)
        together, rewards, _, _, infos = lane.step(action[None])
        assert (reward, info["seconds"]) == (rewards[0], infos["seconds"][0])
        together = infos.get("final_obs", together)
    assert terminated
    with pytest.raises(InputError, match="the run has ended"):
        alone.step(action)


def test_neutral_levers_save_no_time_over_the_planner() -> None:
    env = SimulatedVectorEnv(some_jobs(), 8, windows=10)
    env.reset(seed=1)
    assert levers_of(neutral_actions(1)).stickiness == 1.0
    for _ in range(10):
        np.testing.assert_allclose(env.step(neutral_actions(8))[1], 0.0, atol=1e-6)


def test_gymnasium_make_works_and_stable_baselines_trains_in_the_environment() -> None:
    env = gymnasium.make_vec("autotune/Simulated-v0", num_envs=3, vectorization_mode="vector_entry_point", windows=4)
    assert env.reset(seed=0)[0]["run"].shape[0] == 3
    env.close()
    one = gymnasium.make("autotune/Simulated-v0", jobs=some_jobs(), windows=8)
    model = PPO("MultiInputPolicy", one, n_steps=16, batch_size=16, n_epochs=1, device="cpu", seed=0)
    before = [weight.clone() for weight in model.policy.parameters()]
    model.learn(32)
    assert any((first != last).any() for first, last in zip(before, model.policy.parameters(), strict=True))


@pytest.mark.parametrize(
    "action",
    [np.zeros((2, 5)), np.full((2, 6), 99), np.full((2, 6), -1), np.full((2, 6), 0.5), np.full((2, 6), np.nan)],
)
def test_actions_outside_the_space_are_rejected(action: np.ndarray) -> None:
    env = SimulatedVectorEnv(some_jobs(), 2, windows=4)
    env.reset(seed=0)
    with pytest.raises(InputError, match="action"), np.errstate(invalid="ignore"):
        env.step(action)


@pytest.mark.parametrize("changes", [{"num_envs": 0}, {"windows": 0}, {"jobs": []}])
def test_numbers_below_one_are_rejected(changes: dict) -> None:
    with pytest.raises(InputError, match="below 1"):
        SimulatedVectorEnv(**{"jobs": some_jobs(2), "num_envs": 2, **changes})
