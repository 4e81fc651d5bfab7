"""Tests of the environment: both checkers, seeded rollouts and spaces."""

import warnings

import gymnasium
import numpy as np
import pytest
import tiny_job
from gymnasium.utils.env_checker import check_env as check_gymnasium
from replay_engine import ReplayEngine
from stable_baselines3.common.env_checker import check_env as check_sb3

from autotune import Failure, GradientStatistics, InputError, Measurement, PlanError, UnitGradient
from autotune.cost_model.paper_equations import Weights
from autotune.gym.job_env import TuningEnv
from autotune.gym.observation import GLOBAL_FEATURES, LIMIT, UNIT_FEATURES
from autotune.gym.reward import FAILURE_COST, Objective
from autotune.plan import Plan, PlanSpace, Precision
from autotune.units import Unit

SPACE = PlanSpace(
    units=tuple(
        Unit(name=f"blocks.{i}", kind="Block", recomputable=i > 0, parameter_names=(), num_parameters=10 + i)
        for i in range(4)
    ),
    accumulation_choices=(1, 2, 4),
    precisions=(Precision.FP32, Precision.BF16),
)


def tiny_env(**changes: object) -> TuningEnv:
    arguments: dict = {"job": tiny_job.job(), "window_steps": 3, "max_windows": 4} | changes
    return TuningEnv(**arguments)


def replay_env(answer: object, **changes: object) -> TuningEnv:
    return tiny_env(engine=lambda seed: ReplayEngine(SPACE, answer), **changes)


def plain_window(plan: Plan, steps: int) -> Measurement:
    return Measurement(
        steps=steps,
        samples=8 * steps,
        items=8 * steps,
        total_s=1.0,
        step_s=(0.1,),
        seconds_per_step=0.1,
        samples_per_step=8.0,
        peak_bytes=1000 // plan.accumulation_steps,
        loss=1.0,
    )


def test_both_checkers_pass_with_warnings_as_errors() -> None:
    env = gymnasium.make(
        "autotune/Tuning-v0", job=tiny_job.job(), window_steps=3, max_windows=4, memory_budget_bytes="60%"
    ).unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_gymnasium(env, skip_render_check=True)
        check_sb3(env)


def test_environments_are_registered_under_job_names() -> None:
    for name in ("Tuning", "charlm", "charlm_ragged", "digits"):
        assert gymnasium.spec(f"autotune/{name}-v0").nondeterministic


@pytest.mark.slow
def test_gymnasium_make_returns_an_environment_of_the_real_job() -> None:
    env = gymnasium.make("autotune/Tuning-v0", job="digits", window_steps=3, max_windows=2, evaluate=False)
    observation, info = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    first = info["loss"]
    for _ in range(2):
        observation, reward, _, truncated, info = env.step(env.action_space.sample())
        assert env.observation_space.contains(observation)
        assert reward < 0
    assert truncated
    assert info["loss"] != first
    env.close()


def test_seeded_rollouts_repeat_exactly_apart_from_measured_times() -> None:
    def rollout() -> list[object]:
        env = tiny_env(memory_budget_bytes="70%")
        _, info = env.reset(seed=5)
        env.action_space.seed(5)
        rows: list[object] = [info]
        for _ in range(4):
            observation, _, terminated, truncated, info = env.step(env.action_space.sample())
            timed = list(GLOBAL_FEATURES).index("throughput")
            rows.append((np.delete(observation["global"], timed).tolist(), observation["units"].tolist()))
            rows.append((info, terminated, truncated))
        return rows

    assert rollout() == rollout()


def test_episode_ends_at_the_target_or_after_its_windows() -> None:
    env = tiny_env(job=tiny_job.already_met())
    env.reset(seed=0)
    _, _, terminated, truncated, info = env.step(np.array(env.plan_space.encode(env.plan_space.baseline())))
    assert terminated
    assert not truncated
    assert info["metric"] <= 100
    env = tiny_env(job=tiny_job.make(target=0.0), max_windows=1)
    env.reset(seed=0)
    _, _, terminated, truncated, _ = env.step(np.array(env.plan_space.encode(env.plan_space.baseline())))
    assert (terminated, truncated) == (False, True)


def test_run_with_only_crashes_is_unrecoverable() -> None:
    def answer(plan: Plan, steps: int) -> Measurement:
        if plan == SPACE.baseline():
            return plain_window(plan, steps)
        return Measurement(steps=0, samples=0, items=0, total_s=0.1, failure=Failure.CRASHED)

    env = replay_env(answer, evaluate=False, max_windows=10)
    env.reset(seed=0)
    ends = [env.step(np.array(SPACE.encode(SPACE.leanest())))[2] for _ in range(3)]
    assert ends == [False, False, True]


@pytest.mark.parametrize("least", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fuzzed_actions_and_extreme_windows_never_leave_the_spaces(least: int) -> None:
    generator = np.random.default_rng(0)
    injected = {"nan": 0, "zero": 0, "huge": 0, "failures": 0}

    def number() -> float:
        kind = ("nan", "zero", "huge", "plain")[generator.integers(4)]
        if kind != "plain":
            injected[kind] += 1
        return {"nan": float("nan"), "zero": 0.0, "huge": 1e38, "plain": float(generator.random())}[kind]

    def positive() -> float:
        value = number()
        return 1.0 if np.isnan(value) else value

    def answer(plan: Plan, steps: int) -> Measurement:
        # Only the reference runs without a budget, and it must not fail.
        fails = env._engine.memory_budget_bytes is not None and generator.random() < 0.3
        failure = generator.choice(list(Failure)) if fails else None
        injected["failures"] += failure is not None
        units = {
            unit.name: UnitGradient(rms=positive(), signal_to_noise=number(), underflow_frac=float(generator.random()))
            for unit in SPACE.units
            if generator.random() < 0.8
        }
        gradient = GradientStatistics(norm=number(), noise_scale=number(), noise_scale_age_steps=3, per_unit=units)
        return Measurement(
            steps=int(generator.integers(0, 5)),
            samples=int(generator.integers(0, 50)),
            items=8,
            total_s=1.0,
            seconds_per_step=positive(),
            samples_per_step=positive(),
            peak_bytes=int(positive() * 1000),
            memory_budget_bytes=env.memory_budget_bytes,
            loss=positive(),
            gradient=gradient if generator.random() < 0.9 else None,
            learning_rate=positive(),
            failure=None if failure is None else Failure(failure),
        )

    env = replay_env(plain_window, memory_budget_bytes=600, evaluate=False, max_windows=50, run_length=1e9)
    env._factory = lambda seed: ReplayEngine(SPACE, answer)
    env.action_space.seed(0)
    steps = 0
    while steps < least:
        observation, _ = env.reset(seed=steps)
        assert env.observation_space.contains(observation)
        done = False
        while not done:
            observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            steps += 1
            done = terminated or truncated
            assert env.observation_space.contains(observation)
            assert np.isfinite(reward)
    assert min(injected.values()) > least / 10


def test_rows_are_padded_and_too_few_rows_are_rejected() -> None:
    env = replay_env(plain_window, max_units=9, evaluate=False)
    observation, _ = env.reset(seed=0)
    rows = observation["units"].reshape(9, len(UNIT_FEATURES))
    assert (rows[4:] == 0).all()
    assert (rows[:4, 0] == 1).all()
    with pytest.raises(InputError, match="at least 4"):
        replay_env(plain_window, max_units=2)


def test_plan_over_the_budget_costs_more_than_any_fitting_plan_and_more_with_distance() -> None:
    env = replay_env(plain_window, memory_budget_bytes=500, evaluate=False)
    env.reset(seed=0)
    rewards = {}
    for k in (1, 2, 4):
        plan = SPACE.plan(accumulation_steps=k, precision=Precision.FP32)
        rewards[k] = env.step(np.array(SPACE.encode(plan)))[1]
    assert rewards[2] == rewards[4] == pytest.approx(-1.0)
    assert rewards[1] < -FAILURE_COST


def test_unmeasured_energy_cannot_be_weighted() -> None:
    env = replay_env(plain_window, objective=Objective(weights=Weights(energy=0.1)))
    with pytest.raises(InputError, match="cannot be read"):
        env.reset(seed=0)


def test_windows_too_short_to_time_a_step_are_refused() -> None:
    with pytest.raises(InputError, match="window_steps is 1, and no step of the baseline's window was timed"):
        tiny_env(window_steps=1).reset(seed=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window_steps": 0}, "window_steps is 0"),
        ({"max_windows": True}, "max_windows is True"),
        ({"engine": "magic"}, "engine is 'magic'"),
        ({"memory_budget_bytes": "lots"}, "20GiB"),
        ({"job": "nowhere"}, "charlm"),
    ],
)
def test_invalid_arguments_are_rejected_in_one_line(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny_env(**arguments)


def test_actions_outside_the_space_and_steps_before_reset_are_rejected() -> None:
    env = replay_env(plain_window)
    with pytest.raises(InputError, match="before reset"):
        env.step(np.zeros(len(SPACE.sizes), dtype=np.int64))
    env.reset(seed=0)
    for action in (np.full(len(SPACE.sizes), 9), np.zeros(2), np.array(["x"])):
        with pytest.raises(PlanError):
            env.step(action)


def test_every_feature_is_bounded_and_named() -> None:
    env = replay_env(plain_window)
    observation, _ = env.reset(seed=0)
    assert observation["global"].shape == (len(GLOBAL_FEATURES),)
    assert (np.abs(observation["units"]) <= LIMIT).all()
    assert len(env.action_masks()) == sum(SPACE.sizes)
