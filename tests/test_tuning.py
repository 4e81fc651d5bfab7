"""Tests of tuning: budgets of real steps and memory are kept, and the chosen plan was measured again."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_job
from known_problem import KnownEngine, known_peak
from test_env import SPACE

import autotune
from autotune import BudgetError, InputError, Plan
from autotune.bench.bench_overhead import PlainLoop, bench_overhead
from autotune.budget import MemoryBudget
from autotune.campaign import plan_search
from autotune.campaign.baselines import measure_references
from autotune.engines.budgeted_engine import BudgetedEngine, StepsSpentError
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.engines.tuning_windows import WINDOW_STEPS
from autotune.measurement import Measurement
from autotune.records.run_directory import RunDirectory
from autotune.report.explanation import estimate_effects, explain_search


@pytest.mark.slow
@pytest.mark.parametrize("method", ["random", "optuna", "ppo-scratch"])
def test_every_method_keeps_both_budgets_and_beats_the_baseline(method: str, tmp_path: Path) -> None:
    engine = KnownEngine()
    references = measure_references(engine, MemoryBudget.parse("40%"))
    run = RunDirectory.create(tmp_path, "tune", tiny_job.job(), {})
    settings = plan_search.TuningSettings(steps=150, seed=1)
    told: list[tuple[float, str]] = []
    result = plan_search.tune(
        tiny_job.job(),
        method,
        engine,
        references,
        settings,
        run=run,
        on_progress=lambda done, words: told.append((done, words)),
    )
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    best = min(trial.cost for trial in result.trials if known_peak(trial.plan) <= references.memory_budget_bytes)
    assert told[-1][1] == f"best so far: {1 / best:.2f}x as fast as the baseline"
    spent = sum(max(trial.measurement.steps, 1) for trial in result.trials) + references.steps
    assert result.tuning_steps == spent <= 150
    assert known_peak(result.plan) <= references.memory_budget_bytes
    assert result.cost < 1
    finals = [trial for trial in result.trials if trial.final]
    assert result.plan in {trial.plan for trial in finals}
    assert len(run.lines("trials.jsonl")) == len(result.trials)


@pytest.mark.parametrize("steps", [41, 64, 150])
def test_search_ends_within_its_steps_although_a_busy_machine_repeats_every_window(steps: int, tmp_path: Path) -> None:
    class BusyEngine(KnownEngine):
        def run(self, steps: int) -> Measurement:
            window = super().run(steps)
            return replace(window, steps=2 * window.steps)

    engine = BusyEngine()
    references = measure_references(engine, MemoryBudget.parse("40%"))
    run = RunDirectory.create(tmp_path, "tune", tiny_job.job(), {})
    settings = plan_search.TuningSettings(steps=steps, seed=1)
    result = plan_search.tune(tiny_job.job(), "random", engine, references, settings, run=run)
    finals = [trial for trial in result.trials if trial.final]
    assert {trial.plan for trial in finals} >= {result.plan, engine.space.baseline()}
    # The references and the last window are the only ones whose repetition was not planned for.
    assert result.tuning_steps <= steps + references.steps + 4


@pytest.mark.slow
def test_optuna_gets_each_plan_once_and_spends_its_steps_on_new_ones(tmp_path: Path) -> None:
    engine = KnownEngine()
    references = measure_references(engine, MemoryBudget.parse("40%"))
    run = RunDirectory.create(tmp_path, "tune", tiny_job.job(), {})
    settings = plan_search.TuningSettings(steps=240, seed=2)
    result = plan_search.tune(tiny_job.job(), "optuna", engine, references, settings, run=run)
    with sqlite3.connect(run.path / "optuna.db") as database:
        query = "select state, value_json from trials join trial_user_attributes using (trial_id) where key = 'plan'"
        rows = database.execute(query).fetchall()
    told = [plan for state, plan in rows if state == "COMPLETE"]
    assert len(set(told)) == len(told)
    # Repeated proposals of TPE cost nothing; other known plans are skipped, and all steps are spent.
    assert len(told) < len(rows) < 4 * len(told)
    assert result.tuning_steps > settings.steps - 2 * WINDOW_STEPS


def test_unreachable_budget_is_rejected_with_the_smallest_reachable_one() -> None:
    with pytest.raises(BudgetError, match="leanest plan needs"):
        measure_references(KnownEngine(), MemoryBudget.parse("10B"))


def test_known_plan_costs_no_steps_and_a_spent_budget_stops_measuring() -> None:
    heard: list[Plan] = []
    engine = BudgetedEngine(KnownEngine(), 7, lambda plan, window: heard.append(plan))
    for _ in range(3):
        engine.apply(SPACE.leanest())
        engine.run(3)
    assert (engine.steps_spent, len(heard)) == (3, 1)
    engine.apply(SPACE.baseline())
    engine.run(3)
    engine.apply(SPACE.plan(accumulation_steps=2, precision=SPACE.precisions[0]))
    with pytest.raises(StepsSpentError, match="6 of 7"):
        engine.run(3)


def test_real_job_is_tuned_within_its_memory_budget(tmp_path: Path) -> None:
    document = autotune.tune(tiny_job.job(), "optuna", memory_budget="70%", steps=60, runs_dir=tmp_path)
    measured = document["measured"]
    assert measured["peak_bytes"] <= measured["memory_budget_bytes"]
    assert measured["memory_budget_bytes"] == int(0.7 * measured["baseline_peak_bytes"])
    # On a new engine the chosen plan has the measured peak.
    engine = TorchEngine(tiny_job.job(), seed=9)
    engine.apply(Plan.from_json(document["plan"]))
    peak = engine.run(3).peak_bytes
    assert peak == pytest.approx(measured["peak_bytes"], rel=0.02)


@pytest.mark.parametrize("method", ["random", "exact"])
def test_no_plan_is_answered_whose_gradient_is_above_the_limit(method: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"smallest gradient norm is [\d.]+, above 0\.001 \(allowed: a larger"):
        autotune.tune(tiny_job.job(), method, steps=50, gradient_norm=1e-3, runs_dir=tmp_path)


_TUNE = "import sys, autotune; autotune.tune(sys.argv[1], 'optuna', steps=100000, runs_dir=sys.argv[2])"


@pytest.mark.slow
def test_measurements_survive_a_kill(tmp_path: Path) -> None:
    job = str(Path(__file__).parent / "tiny_job.py")
    with subprocess.Popen([sys.executable, "-c", _TUNE, job, str(tmp_path)], start_new_session=True) as process:
        deadline = time.monotonic() + 100
        rows: list[str] = []
        while len(rows) < 8 and time.monotonic() < deadline:
            time.sleep(0.2)
            rows = [row for path in tmp_path.glob("*/trials.jsonl") for row in path.read_text().splitlines()]
        os.killpg(process.pid, signal.SIGKILL)
    run = next(tmp_path.glob("*-tune-*"))
    recorded = RunDirectory.open(run).lines("trials.jsonl")
    assert len(recorded) >= 8
    with sqlite3.connect(run / "optuna.db") as database:
        (complete,) = database.execute("select count(*) from trials where state = 'COMPLETE'").fetchone()
    database.close()
    # A trial is recorded before Optuna gets its result, so at most the last one can be missing there.
    assert complete >= len(recorded) - 1


def test_unit_effects_are_recovered_from_simulated_windows() -> None:
    import numpy as np

    generator = np.random.default_rng(0)
    engine = KnownEngine()
    trials = []
    for _ in range(200):
        plan = SPACE.sample(generator)
        engine.apply(plan)
        trials.append({"plan": plan.to_json(), "measurement": engine.run(3).to_json()})
    effects = estimate_effects(SPACE, trials)
    assert effects["k", "k = 4"].time > effects["k", "k = 2"].time > 0.95
    assert effects["precision blocks.0", "bf16"].time < 1
    assert effects["storage blocks.1", "recompute"].time > 1
    assert effects["storage blocks.1", "recompute"].peak < 1
    rows = explain_search(SPACE.leanest(), SPACE, trials)
    assert [row.unit for row in rows] == ["accumulation_steps", *(unit.name for unit in SPACE.units)]
    assert all("windows" in row.reason for row in rows)
    assert estimate_effects(SPACE, []) == {}


def test_plain_loop_and_engine_learn_the_same_at_k_1() -> None:
    job = tiny_job.job()
    plain = PlainLoop(job, seed=3)
    plain.run(20)
    engine = TorchEngine(job, seed=3, options=EngineOptions(meter_memory=False))
    losses = [engine.run(1).loss for _ in range(20)]
    assert losses == pytest.approx(plain.losses, rel=1e-6)


def test_overhead_benchmark_reports_a_ratio_with_an_interval() -> None:
    document = bench_overhead(tiny_job.job(), pairs=3, seed=0)
    assert len(document["ratios"]) == 3
    low, high = document["ratio_ci95"]
    assert low <= document["ratio_median"] <= high


def test_unknown_method_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ppo, random, optuna, optuna-prices, ppo-scratch"):
        autotune.tune(tiny_job.job(), "magic", runs_dir=tmp_path)
    assert json.dumps(list(tmp_path.iterdir())) == "[]"
