"""Simulated runs: the same contract as real ones, and the same features whether one run is stepped or a thousand."""

from __future__ import annotations

import dataclasses

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engine import SimulatedEngine, measurement

from autotune.gym.observation import GLOBAL_FEATURES, UNIT_FEATURES, Observation
from autotune.gym.reward import Objective
from autotune.gym.vec_env import SimulatedVectorEnv
from autotune.physics.memory_model import peak_bytes
from autotune.physics.simulation import MOVING, Simulation, World
from autotune.physics.synthetic import Shape, draw_job, draw_profile, varied
from autotune.physics.time_model import seconds_per_step
from autotune.plan import Precision

THREE = (Precision.FP32, Precision.BF16, Precision.FP16)


def some_jobs(count: int = 6, seed: int = 0, **changes: object):
    generator = np.random.default_rng(seed)
    return [draw_job(generator, depth=(2, 9), precisions=THREE, **changes) for _ in range(count)]


def test_in_a_still_world_a_window_costs_what_the_profile_says() -> None:
    for job in some_jobs():
        engine = SimulatedEngine(job)
        plan = job.profile.space.sample(np.random.default_rng(1))
        engine.apply(plan)
        window = engine.run(5)
        assert window.peak_bytes == peak_bytes(job.profile, plan)
        assert window.seconds_per_step == pytest.approx(seconds_per_step(job.profile, plan))
        assert window.failure is None


def test_a_run_takes_the_steps_that_the_convergence_model_says() -> None:
    for job in some_jobs(seed=3):
        engine = SimulatedEngine(job)
        steps = 0
        while engine.evaluate() > job.target:
            steps += engine.run(1).steps
        expected = job.convergence.steps_to(job.target, job.profile.batch_size)
        assert steps == pytest.approx(expected, rel=0.05, abs=2)


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    (job,) = some_jobs(1)

    def run(seed: int):
        engine = SimulatedEngine(job, world=MOVING, seed=seed)
        return [engine.run(4) for _ in range(10)]

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_precision_that_spoils_the_gradient_slows_convergence_but_not_steps() -> None:
    (job,) = some_jobs(1)
    spoilt = {unit.name: {"bf16": 0.5} for unit in job.profile.units}
    job = dataclasses.replace(job, convergence=dataclasses.replace(job.convergence, squared_errors=spoilt))
    losses = []
    for precision in (Precision.FP32, Precision.BF16):
        engine = SimulatedEngine(job)
        engine.apply(job.profile.space.plan(accumulation_steps=1, precision=precision))
        engine.run(50)
        losses.append(engine.evaluate())
    assert losses[1] > losses[0]


def test_noise_scale_estimates_lag_but_come_right_in_a_world_without_error() -> None:
    (job,) = some_jobs(1, seed=2)
    simulation = Simulation([job])
    simulation.begin(np.zeros(1, dtype=np.int64))
    k = np.array([len(job.profile.accumulation_choices) - 1])
    for _ in range(60):
        window = simulation.run(k, np.zeros((1, simulation.told.max_units), dtype=np.int64), 1)
    loss = float(np.asarray(job.convergence.loss.at(simulation.lanes.effort))[0])
    truth = float(job.convergence.noise_scale(loss))
    assert 0.3 * truth < window.noise_scale[0] <= truth * 1.01


def test_events_change_length_budget_and_noise() -> None:
    (job,) = some_jobs(1)
    world = World(length_rate=1.0, budget_rate=1.0, noise_rate=1.0)
    simulation = Simulation([job], world, seed=1)
    simulation.begin(np.zeros(1, dtype=np.int64))
    simulation.set_budget(np.array([0]), np.array([1e12]))
    choices = np.zeros((1, simulation.told.max_units), dtype=np.int64)
    seen = []
    for _ in range(5):
        simulation.run(np.array([0]), choices, 1)
        lanes = simulation.lanes
        seen.append((lanes.length[0], lanes.budget[0], lanes.noise_factor[0]))
    assert len(set(seen)) == 5
    assert all(0.5 <= length <= 1.5 and 0.8e12 <= budget <= 1.25e12 for length, budget, _ in seen)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 1000), st.sampled_from([0.1, 0.5]))
def test_a_variation_keeps_recomputation_dearer_than_saving(seed: int, spread: float) -> None:
    generator = np.random.default_rng(seed)
    profile = varied(generator, draw_profile(generator, Shape(units=4, precisions=THREE)), spread)
    for segment in profile.tables[0].segments:
        for name, cost in segment.costs.items():
            if name.endswith("recompute"):
                assert cost.seconds >= segment.costs[name.replace("recompute", "save")].seconds


def vector_env(**changes: object) -> SimulatedVectorEnv:
    return SimulatedVectorEnv(some_jobs(), 8, **{"max_windows": 6, "max_units": 12, **changes})


def test_features_and_rewards_of_many_lanes_are_those_of_each_alone() -> None:
    env = vector_env()
    env.reset(seed=4)
    env.action_space.seed(4)
    references = None
    for _ in range(5):
        lanes, simulation = range(env.num_envs), env.simulation
        before = env._previous_loss.copy()
        actions = env.action_space.sample()
        k, choices = env.decode(actions)
        state = simulation.snapshot()
        window = simulation.run(k, choices, env.window_steps)
        windows = [measurement(simulation, window, lane) for lane in lanes]
        progress = simulation.progress()
        simulation.restore(state)
        observation, rewards, terminated, truncated, infos = env.step(actions)
        finals = dict(zip(infos.get("final_lanes", []), range(8), strict=False))
        for lane in lanes:
            job = env.jobs[int(state[0].job[lane])]
            reference = dataclasses.replace(
                windows[lane],
                loss=env_reference(env, "loss", lane, references),
                failure=None,
                peak_bytes=int(env_reference(env, "peak", lane, references)),
                seconds_per_step=job.profile.batch_size / env_reference(env, "throughput", lane, references),
                samples_per_step=float(job.profile.batch_size),
                learning_rate=env_reference(env, "rate", lane, references),
                gradient=dataclasses.replace(windows[lane].gradient, norm=env_reference(env, "norm", lane, references)),
            )
            seen = Observation(
                space=job.profile.space,
                plan=simulation.told.decode(int(state[0].job[lane]), int(k[lane]), choices[lane]),
                window=windows[lane],
                reference=reference,
                previous_loss=None if np.isnan(before[lane]) else before[lane],
                memory_budget_bytes=windows[lane].memory_budget_bytes,
                batch_size=job.profile.batch_size,
                adaptive=job.profile.batching == "adaptive",
                progress=float(progress[lane]),
            )
            arrays = seen.arrays(12)
            own = (
                {name: rows[finals[lane]] for name, rows in infos["final_obs"].items()}
                if lane in finals
                else {name: rows[lane] for name, rows in observation.items()}
            )
            named = dict(zip(GLOBAL_FEATURES, zip(arrays["global"], own["global"], strict=True), strict=True))
            for name, (alone, together) in named.items():
                assert together == pytest.approx(alone, rel=1e-4, abs=1e-5), name
            table = arrays["units"].reshape(12, -1)
            for name, alone, together in zip(UNIT_FEATURES, table.T, own["units"].reshape(12, -1).T, strict=True):
                np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5, err_msg=name)
            assert rewards[lane] == pytest.approx(Objective().reward(seen), rel=1e-4)
        assert not (terminated & truncated).any()
        references = {
            name: getattr(env._reference, name).copy() for name in ("loss", "norm", "throughput", "peak", "rate")
        }


def env_reference(env: SimulatedVectorEnv, name: str, lane: int, before: dict | None) -> float:
    """Return what a lane's baseline saw before the step: a lane that ended has another baseline already."""
    return float((getattr(env._reference, name) if before is None else before[name])[lane])


def test_observations_stay_in_their_space_and_rewards_are_finite() -> None:
    env = vector_env(world=dataclasses.replace(MOVING, length_rate=0.3, budget_rate=0.3))
    observation, _ = env.reset(seed=0)
    env.action_space.seed(0)
    ended = 0
    for _ in range(40):
        assert env.observation_space.contains(observation)
        observation, rewards, terminated, truncated, _ = env.step(env.action_space.sample())
        assert np.isfinite(rewards).all()
        ended += int((terminated | truncated).sum())
    assert ended > 0


def test_rollouts_repeat_exactly_under_one_seed() -> None:
    def rollout():
        env = vector_env()
        env.reset(seed=9)
        env.action_space.seed(9)
        return [env.step(env.action_space.sample())[:2] for _ in range(12)]

    for (one, reward), (two, again) in zip(rollout(), rollout(), strict=True):
        np.testing.assert_array_equal(reward, again)
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])


def test_the_price_solver_keeps_every_lane_within_its_budget() -> None:
    env = vector_env(world=World(), max_windows=1000)
    env.reset(seed=2)
    for _ in range(3):
        _, _, _, _, infos = env.step(env.planned(margin=0.0))
        assert not infos["over_budget"].any()


def test_a_vector_of_simulated_runs_is_made_by_gymnasium() -> None:
    env = gymnasium.make_vec(
        "autotune/Simulated-v0", num_envs=3, vectorization_mode="vector_entry_point", max_windows=2
    )
    observation, _ = env.reset(seed=0)
    assert observation["global"].shape == (3, len(GLOBAL_FEATURES))
    env.close()


def test_the_single_environment_runs_on_a_simulated_engine() -> None:
    import tiny_job

    from autotune.gym.env import TuningEnv

    (job,) = some_jobs(1)
    env = TuningEnv(
        tiny_job.job(),
        lambda seed: SimulatedEngine(job, seed=seed),
        memory_budget_bytes="60%",
        window_steps=4,
        max_windows=3,
    )
    check_env(env, skip_render_check=True)
