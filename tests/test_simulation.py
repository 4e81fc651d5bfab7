"""Tests of the simulated engine: costs follow the profile, convergence follows the model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from simulated_engine import SimulatedEngine
from simulation import MOVING, Simulation, World

from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.time_model import seconds_per_step
from autotune.plan import Precision
from autotune.simulator.random_jobs import draw_job

THREE = (Precision.FP32, Precision.BF16, Precision.FP16)


def some_jobs(count: int = 6, seed: int = 0, **changes: object):
    generator = np.random.default_rng(seed)
    return [draw_job(generator, depth=(2, 9), precisions=THREE, **changes) for _ in range(count)]


def test_window_under_constant_conditions_costs_what_the_profile_predicts() -> None:
    for job in some_jobs():
        engine = SimulatedEngine(job)
        plan = job.profile.space.sample(np.random.default_rng(1))
        engine.apply(plan)
        window = engine.run(5)
        assert window.peak_bytes == peak_bytes(job.profile, plan)
        assert window.seconds_per_step == pytest.approx(seconds_per_step(job.profile, plan))
        assert window.failure is None


def test_run_takes_the_steps_that_the_convergence_model_predicts() -> None:
    for job in some_jobs(seed=3):
        engine = SimulatedEngine(job)
        steps = 0
        while engine.evaluate() > job.target:
            steps += engine.run(1).steps
        expected = job.convergence.steps_to(job.target, job.profile.batch_size)
        assert steps == pytest.approx(expected, rel=0.05, abs=2)


def test_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    (job,) = some_jobs(1)

    def run(seed: int):
        engine = SimulatedEngine(job, world=MOVING, seed=seed)
        return [engine.run(4) for _ in range(10)]

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_precision_that_degrades_the_gradient_slows_convergence_but_not_steps() -> None:
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


def test_noise_scale_estimates_lag_but_converge_without_measurement_error() -> None:
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


def test_single_environment_runs_on_a_simulated_engine() -> None:
    import tiny_job

    from autotune.gym.job_env import TuningEnv

    (job,) = some_jobs(1)
    env = TuningEnv(
        tiny_job.job(),
        lambda seed: SimulatedEngine(job, seed=seed),
        memory_budget_bytes="60%",
        window_steps=4,
        max_windows=3,
    )
    check_env(env, skip_render_check=True)
