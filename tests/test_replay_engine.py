"""Tests of replaying recorded windows: searches and environments behave as in a real run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_job
from replay_engine import ReplayEngine, read_trace, space_of

from autotune.errors import EngineError, InputError
from autotune.gym.job_env import TuningEnv
from autotune.measurement import Failure

DATA = Path(__file__).parent / "traces"
TRACES = sorted(DATA.glob("*-trials.jsonl"))


@pytest.fixture(params=TRACES, ids=lambda path: path.stem)
def engine(request: pytest.FixtureRequest) -> ReplayEngine:
    trace = read_trace(request.param)
    return ReplayEngine(space_of(trace), trace)


def test_every_reference_job_has_a_recorded_trace() -> None:
    assert [path.stem for path in TRACES] == ["charlm-trials", "charlm_ragged-trials", "digits-trials"]


def test_recorded_window_is_replayed_unchanged(engine: ReplayEngine) -> None:
    trace = engine._answers
    assert len(trace) > 10
    for plan, windows in trace.items():
        engine.apply(plan)
        for window in windows:
            replayed = engine.run(3)
            assert (replayed.seconds_per_step, replayed.peak_bytes) == (window.seconds_per_step, window.peak_bytes)


def test_windows_of_one_plan_are_replayed_in_order_and_repeated(engine: ReplayEngine) -> None:
    plan, windows = max(engine._answers.items(), key=lambda item: len(item[1]))
    assert len(windows) > 1
    engine.apply(plan)
    seen = [engine.run(3).step_s for _ in range(2 * len(windows))]
    assert seen[: len(windows)] == seen[len(windows) :]


def test_current_budget_applies_to_recorded_windows(engine: ReplayEngine) -> None:
    peaks = sorted(windows[0].peak_bytes for windows in engine._answers.values())
    engine.memory_budget_bytes = peaks[len(peaks) // 2]
    failed = 0
    for plan, windows in engine._answers.items():
        engine.apply(plan)
        window = engine.run(3)
        over = windows[0].peak_bytes > engine.memory_budget_bytes
        assert (window.failure is Failure.OVER_BUDGET) == over == (not window.within_budget)
        failed += over
    assert 0 < failed < len(peaks)


def test_unrecorded_plan_is_named(engine: ReplayEngine) -> None:
    generator = np.random.default_rng(0)
    plan = next(p for p in (engine.space.sample(generator) for _ in range(1000)) if p not in engine._answers)
    engine.apply(plan)
    with pytest.raises(EngineError, match="nothing is recorded for the plan"):
        engine.run(3)


def test_environment_steps_through_a_recorded_search(engine: ReplayEngine) -> None:
    env = TuningEnv(
        tiny_job.job(),
        lambda seed: ReplayEngine(engine.space, engine._answers),
        memory_budget_bytes="60%",
        window_steps=3,
        evaluate=False,
    )
    observation, _ = env.reset(seed=0)
    rewards = []
    for plan in engine._answers:
        observation, reward, _, _, info = env.step(np.array(env.plan_space.encode(plan)))
        assert env.observation_space.contains(observation)
        rewards.append((info["failure"] is None, reward))
    fitting = [reward for fits, reward in rewards if fits]
    failing = [reward for fits, reward in rewards if not fits]
    assert min(fitting) > max(failing)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no window"),
        ("{\n", "line 1: is not JSON"),
        ('{"plan": {}}\n', "line 1: is no recorded window"),
        ('{"plan": {"version": 9}, "measurement": {}}\n', "version is 9"),
    ],
)
def test_invalid_record_is_rejected_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_trace(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "nowhere.jsonl")
