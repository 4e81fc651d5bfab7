"""A policy that leans on the planner: untrained it is the planner, trained it is still a small bare network."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autotune.agents.lever_network import LeverNetwork
from autotune.agents.levers import LeverRecipe, evaluate, summary
from autotune.gym.moving_env import (
    FEATURES,
    NEUTRAL,
    SIZES,
    MovingEnv,
    levers_of,
    neutral_actions,
    planner_reserve,
)
from autotune.physics.moving import Strengths
from autotune.physics.planning import PlannerSettings, run_planner
from autotune.physics.synthetic import draw_job

STRONG = Strengths(
    noise_error=0.5, cost_error=0.3, drift=0.1, length=0.15, jitter=0.05, event_every=5, switch_windows=0.2
)


@pytest.fixture(scope="module")
def jobs():
    generator = np.random.default_rng(0)
    return [draw_job(generator, depth=(2, 6)) for _ in range(8)]


def env_of(jobs, **changes: object) -> MovingEnv:
    arguments: dict = {"lanes": 16, "windows": 10, "settings": PlannerSettings(reserve=0.1), "seed": 3, **changes}
    return MovingEnv(jobs, STRONG, **arguments)


def test_an_untrained_policy_is_the_planner(jobs) -> None:
    env = env_of(jobs)
    torch.manual_seed(0)
    network = LeverNetwork()
    alone, _ = run_planner(env.runs, env.course, env.settings)
    observation, done, total = env.reset(env.course), False, np.zeros(16)
    while not done:
        actions = network.most_likely(observation)
        np.testing.assert_array_equal(actions, neutral_actions(16))
        observation, rewards, done = env.step(actions)
        total += rewards
    assert not total.any()
    np.testing.assert_array_equal(env.runs.seconds, alone)


def test_neutral_levers_are_the_middle_of_every_range() -> None:
    levers = levers_of(neutral_actions(3))
    assert levers.reserve.tolist() == levers.k_bias.tolist() == levers.price_16_bit.tolist() == [0.0] * 3
    assert levers.stickiness.tolist() == [1.0] * 3
    assert all(0 <= index < size for index, size in zip(NEUTRAL, SIZES, strict=True))


def test_rewards_are_the_time_won_over_the_planner_in_percent(jobs) -> None:
    env = env_of(jobs)
    generator = np.random.default_rng(0)
    total, done = np.zeros(16), False
    while not done:
        observation, rewards, done = env.step(generator.integers(0, SIZES, (16, 4)))
        assert observation.shape == (16, len(FEATURES))
        assert np.isfinite(observation).all()
        assert np.abs(observation).max() <= 5
        total += rewards
    planner = env.planner_seconds.sum(axis=1)
    np.testing.assert_allclose(total, 100 * (planner - env.runs.seconds) / planner, rtol=1e-3, atol=1e-3)
    assert np.abs(total).max() > 0


def test_runs_repeat_under_one_seed(jobs) -> None:
    def rollout(seed: int) -> np.ndarray:
        env = env_of(jobs, seed=seed)
        return np.stack([env.step(neutral_actions(16) * 0)[1] for _ in range(10)])

    np.testing.assert_array_equal(rollout(1), rollout(1))
    assert not np.array_equal(rollout(1), rollout(2))


def test_the_best_constant_reserve_is_found_on_courses_of_its_own(jobs) -> None:
    env = env_of(jobs)
    course = env.course
    assert planner_reserve(env, reserves=(0.0, 0.2)) in (0.0, 0.2)
    assert env.course is course


def test_ppo_trains_the_network_on_the_planners_levers(jobs) -> None:
    from autotune.agents.ppo import train_levers

    seen: list[int] = []
    recipe = LeverRecipe(decisions=3 * 160, batch=80, epochs=2, learning_rate=1e-2)
    network = train_levers(env_of(jobs), recipe, seed=0, on_rollout=lambda done, _reward: seen.append(done))
    assert seen == [160, 320, 480]
    assert sum(parameter.numel() for parameter in network.parameters()) < 100_000
    torch.manual_seed(0)
    fresh = LeverNetwork()
    assert any(not torch.equal(one, two) for one, two in zip(network.parameters(), fresh.parameters(), strict=True))
    won = evaluate(env_of(jobs, seed=9), network.most_likely, rounds=2)
    assert len(won) == 32
    figures = summary(won)
    assert figures["p5"] <= figures["median"] <= figures["p95"]
