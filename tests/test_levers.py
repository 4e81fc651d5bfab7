"""Tests of a policy that adjusts a planner: untrained it equals the planner, and its network is small."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from lever_gains import evaluate, neutral_actions, summary

from autotune.agents.ppo import train_levers
from autotune.agents.recipe import LeverRecipe
from autotune.agents.saved_training import SavedTraining
from autotune.agents.shipped_network import LeverNetwork
from autotune.gym.levers import (
    LIMIT,
    NEUTRAL,
    RUN_FEATURES,
    SIZES,
    UNIT_FEATURES,
    Memory,
    levers_of,
)
from autotune.gym.moving_env import MovingEnv, planner_reserve
from autotune.simulator.clairvoyant import run_planner
from autotune.simulator.moving_conditions import Strengths
from autotune.simulator.online_planner import Levers
from autotune.simulator.planner_settings import PlannerSettings
from autotune.simulator.random_jobs import draw_job
from autotune.simulator.simulated_job import SimulatedJob

STRONG = Strengths(
    noise_error=0.5,
    cost_error=0.3,
    time_noise=0.02,
    drift=0.1,
    length_lanes=0.7,
    length=0.15,
    jitter=0.05,
    event_every=5,
    event_told=0.5,
    switch_windows=0.2,
)
LANES, WINDOWS = 16, 10


@pytest.fixture(scope="module")
def jobs() -> list[SimulatedJob]:
    generator = np.random.default_rng(0)
    return [draw_job(generator, depth=(2, 6)) for _ in range(8)]


def env_of(jobs: list[SimulatedJob], strengths: Strengths = STRONG, **changes: object) -> MovingEnv:
    arguments: dict = {
        "lanes": LANES,
        "windows": WINDOWS,
        "settings": PlannerSettings(reserve=0.05, rise=0.1),
        "seed": 3,
        **changes,
    }
    return MovingEnv(jobs, strengths, **arguments)


def random_play(env: MovingEnv, seed: int = 0) -> tuple[list[np.ndarray], list[tuple[np.ndarray, np.ndarray]]]:
    """Return the rewards and features of every window under levers drawn at random."""
    generator = np.random.default_rng(seed)
    rewards, features, done = [], [], False
    while not done:
        seen, won, done = env.step(generator.integers(0, SIZES, (env.lanes, len(SIZES))))
        rewards.append(won)
        features.append(seen)
    return rewards, features


def test_untrained_policy_equals_the_planner(jobs) -> None:
    env = env_of(jobs)
    torch.manual_seed(0)
    network = LeverNetwork()
    alone = run_planner(env.runs, env.course, env.settings).sum(axis=1)
    observation, done, total = env.reset(env.course), False, np.zeros(LANES)
    while not done:
        actions = network.most_likely(observation)
        np.testing.assert_array_equal(actions, neutral_actions(LANES))
        observation, rewards, done = env.step(actions)
        total += rewards
    assert not total.any()
    np.testing.assert_allclose(env.runs.seconds, alone, rtol=1e-12)


def test_neutral_levers_leave_the_planner_unchanged() -> None:
    levers, neutral = levers_of(neutral_actions(3)), Levers.neutral(3)
    for name in Levers.__slots__:
        np.testing.assert_array_equal(getattr(levers, name), getattr(neutral, name))
    assert all(0 <= index < size for index, size in zip(NEUTRAL, SIZES, strict=True))
    assert len(SIZES) == len(Levers.__slots__)


def test_each_nonneutral_lever_changes_some_plan(jobs) -> None:
    env = env_of(jobs)
    course = env.course
    for lever, size in enumerate(SIZES):
        totals = {}
        for choice in range(size):
            env.reset(course)
            actions = neutral_actions(LANES)
            actions[:, lever] = choice
            totals[choice] = np.sum([env.step(actions)[1] for _ in range(WINDOWS)])
        assert totals[NEUTRAL[lever]] == 0
        assert any(total != 0 for total in totals.values())


def test_rewards_are_the_time_saved_over_the_planner_in_percent(jobs) -> None:
    env = env_of(jobs)
    rewards, features = random_play(env)
    for run, units in features:
        assert run.shape == (LANES, len(RUN_FEATURES))
        assert units.shape == (LANES, env.runs.arrays.max_units, len(UNIT_FEATURES))
        for part in (run, units):
            assert part.dtype == np.float32
            assert np.isfinite(part).all()
            assert np.abs(part).max() <= LIMIT
    planner = env.planner_seconds.sum(axis=1)
    total = np.sum(rewards, axis=0)
    np.testing.assert_allclose(total, 100 * (planner - env.runs.seconds) / planner, rtol=1e-3, atol=1e-3)
    assert np.abs(total).max() > 0.1


def test_most_features_vary_and_padding_is_constant(jobs) -> None:
    env = env_of(jobs, lanes=64)
    _, features = random_play(env)
    run = np.concatenate([part for part, _ in features])
    silent = {name for name, spread in zip(RUN_FEATURES, np.ptp(run, axis=0), strict=True) if spread == 0}
    assert not silent
    units = np.concatenate([part for _, part in features])
    assert (np.ptp(units.reshape(-1, len(UNIT_FEATURES)), axis=0) > 0).all()
    present = units[:, :, UNIT_FEATURES.index("present")]
    counts = np.tile(env.runs.lanes.num_units, WINDOWS)
    np.testing.assert_array_equal(present.sum(axis=1), counts)
    assert not units[present == 0].any()
    assert (present == 0).any()


def test_features_stay_bounded_under_extreme_conditions(jobs) -> None:
    mad = Strengths(
        noise_error=5.0,
        cost_error=3.0,
        time_noise=2.0,
        drift=2.0,
        length=2.0,
        curriculum=3.0,
        jitter=1.0,
        event_every=2,
        event_share=0.05,
        event_told=0.5,
        switch_windows=20.0,
        spread=5.0,
    )
    _, features = random_play(env_of(jobs, mad))
    for run, units in features:
        assert np.isfinite(run).all()
        assert np.isfinite(units).all()
        assert max(np.abs(run).max(), np.abs(units).max()) <= LIMIT


def test_runs_repeat_under_one_seed(jobs) -> None:
    def rollout(seed: int) -> np.ndarray:
        return np.stack(random_play(env_of(jobs, seed=seed))[0])

    first = rollout(1)
    np.testing.assert_array_equal(first, rollout(1))
    assert not np.array_equal(first, rollout(2))


def test_courses_continue_from_the_state_of_their_generator(jobs) -> None:
    env = env_of(jobs)
    env.reset()
    state = env.generator_state
    env.reset()
    wanted = env.course
    env.reset()
    assert not np.array_equal(env.course.budget, wanted.budget)
    other = env_of(jobs, seed=99)
    other.generator_state = state
    other.reset()
    np.testing.assert_array_equal(other.course.budget, wanted.budget)
    np.testing.assert_array_equal(other.course.cost, wanted.cost)


def test_leanest_plan_fits_in_every_drawn_course(jobs) -> None:
    env = env_of(jobs)
    for _ in range(5):
        env.reset()
        pool = env.runs.lanes.pool
        for window in range(WINDOWS):
            peak = pool.peak_of(pool.leanest, env.course.longest[:, window])
            assert (peak <= env.course.budget[:, window]).all()
        assert (env.course.budget <= env.course.told).all()


def test_clones_share_a_course_and_their_planner(jobs) -> None:
    env = env_of(jobs, clones=4)
    assert env.lanes == LANES
    for values in (env.course.job, env.course.budget, env.course.cost, env.planner_seconds):
        grouped = values.reshape(4, 4, -1)
        assert (grouped == grouped[:, :1]).all()
    assert len(np.unique(env.course.budget[:, 0])) > 1
    rewards, _ = random_play(env)
    assert np.ptp(np.sum(rewards, axis=0).reshape(4, 4), axis=1).max() > 0


def test_new_memory_holds_no_events() -> None:
    memory = Memory.of(3)
    values = {name: getattr(memory, name) for name in Memory.__slots__}
    assert {name for name, value in values.items() if value.any()} == {"out_since"}
    assert all(value.shape == (3,) for value in values.values())
    # Each has its own array, so that adding to one does not change another.
    assert len({id(value) for value in values.values()}) == len(values)


def test_best_constant_reserve_is_found_on_separate_courses(jobs) -> None:
    env = env_of(jobs, settings=PlannerSettings())
    course = env.course
    assert planner_reserve(env, (0.0, 0.4)) in (0.0, 0.4)
    assert env.course is course
    again = env_of(jobs, settings=PlannerSettings())
    assert planner_reserve(again, (0.0,)) == 0.0


def mean_time(env: MovingEnv, rise: float) -> float:
    seconds = run_planner(env.runs, env.course, PlannerSettings(rise=rise))
    return float(np.mean(seconds.sum(axis=1) / env.runs.baseline_s))


def test_rise_helps_only_if_lengths_rise(jobs) -> None:
    still = env_of(jobs, STRONG.only("switch_windows"), settings=PlannerSettings())
    assert mean_time(still, 0.0) <= mean_time(still, 0.25)
    jumping = env_of(jobs, Strengths(length=0.3, jitter=0.2), settings=PlannerSettings())
    assert mean_time(jumping, 0.25) < mean_time(jumping, 0.0)


# ---------------------------------------------------------------------------------------------------------- network


def test_absent_units_never_change_a_decision() -> None:
    torch.manual_seed(1)
    network = LeverNetwork(16)
    torch.nn.init.normal_(network.levers.weight)
    run, units = torch.randn(6, len(RUN_FEATURES)), torch.randn(6, 4, len(UNIT_FEATURES))
    units[:, :, UNIT_FEATURES.index("present")] = 1.0
    padded = torch.cat([units, torch.zeros(6, 9, len(UNIT_FEATURES))], dim=1)
    for bare, wide in zip(network(run, units), network(run, padded), strict=True):
        torch.testing.assert_close(bare, wide)
    logits, value = network(run, units)
    assert logits.shape == (6, sum(SIZES))
    assert value.shape == (6, 1)
    # Nor does the order of the units.
    torch.testing.assert_close(network(run, units.flip(1))[0], logits)


def test_network_is_small() -> None:
    assert sum(parameter.numel() for parameter in LeverNetwork().parameters()) < 100_000


# --------------------------------------------------------------------------------------------------------- training

RECIPE = LeverRecipe(decisions=3 * LANES * WINDOWS, batch=80, epochs=2, learning_rate=1e-2, width=16)


def test_ppo_trains_the_network_on_the_planners_levers(jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    network = train_levers(env_of(jobs), RECIPE, seed=0, on_rollout=lambda *row: seen.append(row))
    assert [decisions for decisions, _ in seen] == [160, 320, 480]
    assert all(np.isfinite(won) for _, won in seen)
    torch.manual_seed(0)
    fresh = LeverNetwork(16)
    assert all(not torch.equal(one, two) for one, two in zip(network.parameters(), fresh.parameters(), strict=True))
    won = evaluate(env_of(jobs, seed=9), network.most_likely, rounds=2)
    assert len(won) == 2 * LANES
    figures = summary(won)
    assert figures["p5"] <= figures["median"] <= figures["p95"]
    # torch keeps compiled code for the next process.
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")]


@pytest.mark.slow
def test_ppo_finds_a_lever_that_helps(jobs) -> None:
    # Running out of memory costs far more than the planner was told, so bracing for dips wins.
    dips = Strengths(event_families=("memoryless",), event_every=3, event_share=0.6, event_told=0.0, retry_windows=30.0)
    cheap = PlannerSettings(retry=0.0)
    env = env_of(jobs, dips, lanes=64, settings=cheap)
    recipe = LeverRecipe(decisions=40 * 64 * WINDOWS, batch=160, epochs=4, learning_rate=3e-3, entropy=0.0, width=16)
    won: list[float] = []
    network = train_levers(env, recipe, seed=0, on_rollout=lambda _, percent: won.append(percent))
    assert np.mean(won[-3:]) > np.mean(won[:3]) + 1
    judged = evaluate(env_of(jobs, dips, seed=11, settings=cheap), network.most_likely, rounds=1)
    assert np.mean(judged) > 1


class Interrupted(Exception):
    """Stands for any event that ends a training halfway."""


@pytest.mark.parametrize(
    ("rollouts", "clones"),
    [pytest.param(1, 1, marks=pytest.mark.slow), (2, 4), pytest.param(3, 1, marks=pytest.mark.slow)],
)
def test_interrupted_training_ends_like_an_uninterrupted_one(jobs, rollouts: int, clones: int) -> None:
    def weights(saved: SavedTraining | None, stop_after: int | None = None) -> dict[str, torch.Tensor]:
        done: list[int] = []

        def on_rollout(decisions: int, _won: float) -> None:
            done.append(decisions)
            if len(done) == stop_after:
                raise Interrupted

        env = env_of(jobs, clones=clones)
        trained = train_levers(env, RECIPE, seed=0, saved=saved, on_save=saves.append, on_rollout=on_rollout)
        return trained.state_dict()

    saves = Saves()
    whole = weights(None)
    assert saves.decisions == [0, 160, 320]
    with pytest.raises(Interrupted):
        weights(None, stop_after=rollouts)
    # Other random draws in the meantime have no effect on it.
    torch.rand(7)
    np.random.rand(7)  # noqa: NPY002
    taken_up = weights(saves.last())
    assert whole.keys() == taken_up.keys()
    assert all(torch.equal(whole[name], taken_up[name]) for name in whole)


@pytest.mark.slow
def test_training_can_be_interrupted_repeatedly(jobs) -> None:
    whole = train_levers(env_of(jobs), RECIPE, seed=1).state_dict()
    saves, decisions = Saves(), []

    def on_rollout(done: int, _won: float) -> None:
        decisions.append(done)
        if len(decisions) % 2 == 0:
            raise Interrupted

    for saved in (None, saves):
        with pytest.raises(Interrupted):
            train_levers(
                env_of(jobs),
                RECIPE,
                seed=1,
                saved=saved and saved.last(),
                on_save=saves.append,
                on_rollout=on_rollout,
            )
    taken_up = train_levers(env_of(jobs), RECIPE, seed=1, saved=saves.last()).state_dict()
    assert decisions == [160, 320, 320, 480]
    assert all(torch.equal(whole[name], taken_up[name]) for name in whole)


def test_resumed_training_first_saves_the_state_it_resumed(jobs) -> None:
    saves = Saves()
    train_levers(env_of(jobs), RECIPE, seed=0, on_save=saves.append)
    again = Saves()
    train_levers(env_of(jobs), RECIPE, seed=0, saved=saves.read(1), on_save=again.append)
    assert again.contents == saves.contents[1:]


class Saves:
    """A recorder of the saved bytes of a training."""

    def __init__(self) -> None:
        self.contents: list[bytes] = []
        self.decisions: list[int] = []

    def append(self, saved: SavedTraining) -> None:
        self.contents.append(saved.to_bytes("this one"))
        self.decisions.append(saved.decisions)

    def read(self, index: int) -> SavedTraining:
        content = self.contents[index]
        return SavedTraining.from_bytes(content, identity="this one", recipe=RECIPE, rollout=LANES * WINDOWS)

    def last(self) -> SavedTraining:
        return self.read(-1)
