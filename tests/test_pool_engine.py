"""Tests of a pool of workers: same proposals, counts and records as one engine, even if workers are slow or die."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_job
from known_problem import KnownEngine, distinct_plans, known_answer
from test_env import SPACE

from autotune import EngineError, InputError, Measurement, Plan
from autotune.budget import MemoryBudget
from autotune.campaign import plan_search
from autotune.campaign.baselines import measure_references
from autotune.engines.pool_engine import PoolEngine
from autotune.engines.ray_cluster import ClusterOptions
from autotune.errors import WorkerLostError
from autotune.measurement import Failure
from autotune.records.journal import Journal, JournaledEngine
from autotune.records.run_directory import RunDirectory


class KnownWorker:
    """A worker that computes windows by a formula, after a delay, until it dies."""

    def __init__(
        self, generator: np.random.Generator | None = None, dies_at: int | None = None, longest_s: float = 0.004
    ) -> None:
        self.ran: list[Plan] = []
        self.closed = False
        self.poison: Plan | None = None
        self.lost = threading.Event()
        self._generator, self._dies_at, self._longest_s = generator, dies_at, longest_s

    def describe(self) -> dict[str, Any]:
        return {"space": SPACE.to_json(), "locks": {}}

    def run(self, plan: dict[str, Any], steps: int, memory_budget_bytes: int | None) -> dict[str, Any]:
        asked = Plan.from_json(plan)
        if self._generator is not None:
            time.sleep(self._generator.uniform(0, self._longest_s))
        if asked == self.poison or len(self.ran) == self._dies_at:
            self.lost.set()
            raise WorkerLostError("its machine is gone")
        self.ran.append(asked)
        return known_answer(asked, steps, memory_budget_bytes).to_json()

    def close(self) -> None:
        self.closed = True


def pool(count: int, seed: int = 0) -> tuple[PoolEngine, list[KnownWorker]]:
    workers = [KnownWorker(np.random.default_rng([seed, number])) for number in range(count)]
    return PoolEngine(workers), workers


def tuned(
    engine: Any, method: str, folder: Path, journal: Journal | None = None, **spent: Any
) -> plan_search.TuningResult:
    wrapped = engine if journal is None else JournaledEngine(engine, journal)
    references = measure_references(wrapped, MemoryBudget.parse("40%"))
    run = RunDirectory(folder / "run")
    run.path.mkdir(exist_ok=True)
    settings = plan_search.TuningSettings(seed=1, **{"steps": 100, **spent})
    return plan_search.tune(tiny_job.job(), method, wrapped, references, settings, run=run)


def outline(result: plan_search.TuningResult) -> list[tuple[Plan, float, bool]]:
    return [(trial.plan, trial.cost, trial.final) for trial in result.trials]


@pytest.mark.parametrize("count", [1, 3])
def test_random_search_gives_the_same_results_with_and_without_a_pool(count: int, tmp_path: Path) -> None:
    (tmp_path / "serial").mkdir()
    (tmp_path / "pool").mkdir()
    serial = tuned(KnownEngine(), "random", tmp_path / "serial")
    engine, workers = pool(count)
    spread = tuned(engine, "random", tmp_path / "pool")
    engine.close()
    assert outline(spread) == outline(serial)
    assert (spread.plan, spread.tuning_steps) == (serial.plan, serial.tuning_steps)
    # Only requested plans were run, and every worker ran some.
    assert sum(len(worker.ran) for worker in workers) == len(spread.trials) + 2
    assert all(worker.ran and worker.closed for worker in workers)


@pytest.mark.slow
def test_optuna_proposals_do_not_depend_on_worker_speed(tmp_path: Path) -> None:
    found = []
    for seed in range(3):
        (tmp_path / str(seed)).mkdir()
        engine, _ = pool(3, seed)
        found.append(outline(tuned(engine, "optuna", tmp_path / str(seed))))
        engine.close()
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("method", ["random", "optuna"])
def test_budgets_of_steps_and_trials_are_respected(method: str, tmp_path: Path) -> None:
    engine, workers = pool(4)
    result = tuned(engine, method, tmp_path, steps=500, trials=5)
    engine.close()
    assert len([trial for trial in result.trials if not trial.final]) == 5
    assert sum(len(worker.ran) for worker in workers) == len(result.trials) + 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["random", "optuna"])
@pytest.mark.parametrize("stopped_at", [1, 7, 15])
def test_resumed_campaign_finds_the_same_trials(method: str, stopped_at: int, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    engine, _ = pool(3)
    whole = tuned(engine, method, tmp_path / "whole")
    engine.close()

    class Cut(BaseException):
        """Stands for a kill: no code catches it."""

    class CutEngine(PoolEngine):
        windows = 0

        def run(self, steps: int) -> Measurement:
            self.windows += 1
            if self.windows > stopped_at + 2:
                raise Cut
            return super().run(steps)

    journal = Journal()
    journal.keep_in(tmp_path / "cut")
    engine = CutEngine([KnownWorker(np.random.default_rng(n)) for n in range(3)])
    with pytest.raises(Cut):
        tuned(engine, method, tmp_path / "cut", journal)
    engine.close()
    engine, workers = pool(3)
    again = tuned(engine, method, tmp_path / "cut", Journal.opened(tmp_path / "cut"))
    engine.close()
    assert outline(again) == outline(whole)
    # Finished windows were not run again.
    assert sum(len(worker.ran) for worker in workers) == len(whole.trials) - stopped_at


def test_window_of_a_lost_worker_is_repeated_once() -> None:
    mortal = KnownWorker(dies_at=2)

    class Patient(KnownWorker):
        def run(self, plan: dict[str, Any], steps: int, memory_budget_bytes: int | None) -> dict[str, Any]:
            # The other worker gets its turns however busy the machine is.
            assert len(self.ran) < 5 or mortal.lost.wait(60)
            return super().run(plan, steps, memory_budget_bytes)

    workers = [Patient(), mortal, Patient()]
    engine = PoolEngine(workers)
    asked = distinct_plans(SPACE, 30)
    for plan in asked:
        engine.prepare(plan, 3)
    for plan in asked:
        engine.apply(plan)
        assert engine.run(3) == known_answer(plan, 3, None)
    assert engine.workers == 2
    engine.close()
    ran = [plan for worker in workers for plan in worker.ran]
    assert sorted(map(str, ran)) == sorted(map(str, asked))


def test_plan_that_kills_two_workers_is_a_crash_and_the_rest_continues() -> None:
    workers = [KnownWorker() for _ in range(4)]
    asked = distinct_plans(SPACE, 12)
    for worker in workers:
        worker.poison = asked[3]
    engine = PoolEngine(workers)
    for plan in asked:
        engine.prepare(plan, 3)
    found = []
    for plan in asked:
        engine.apply(plan)
        found.append(engine.run(3))
    assert [window.failure for window in found] == [Failure.CRASHED if n == 3 else None for n in range(12)]
    assert "2 workers were lost" in found[3].failure_detail
    assert engine.workers == 2
    engine.close()


def test_pool_without_workers_raises_at_once() -> None:
    engine = PoolEngine([KnownWorker(dies_at=1), KnownWorker(dies_at=1)])
    asked = distinct_plans(SPACE, 6)
    for plan in asked:
        engine.prepare(plan, 3)
    engine.apply(asked[-1])
    with pytest.raises(EngineError, match="all workers were lost"):
        engine.run(3)
    with pytest.raises(EngineError, match="all workers were lost"):
        engine.run(4)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.run(3)


def test_windows_to_be_compared_run_on_one_worker() -> None:
    engine, workers = pool(3)
    for plan in distinct_plans(SPACE, 6):
        engine.apply(plan)
        engine.run(4)
    engine.close()
    assert [len(worker.ran) for worker in workers] == [6, 0, 0]


def test_closing_the_pool_does_not_wait_for_workers() -> None:
    class Slow(KnownWorker):
        ended = threading.Event()

        def run(self, plan: dict[str, Any], steps: int, memory_budget_bytes: int | None) -> dict[str, Any]:
            self.ended.wait(30)
            raise WorkerLostError("ended")

        def close(self) -> None:
            self.ended.set()

    engine = PoolEngine([Slow(), Slow()])
    for plan in distinct_plans(SPACE, 5):
        engine.prepare(plan, 3)
    began = threading.active_count()
    engine.close()
    assert threading.active_count() <= began - 2


@pytest.mark.slow
def test_64_workers_and_one_study_lose_and_repeat_no_trial(tmp_path: Path) -> None:
    # The delay keeps many workers busy at once even if the study is slow; finals run on the first worker.
    workers = [KnownWorker(np.random.default_rng(number), longest_s=3.0 if number else 0.01) for number in range(64)]
    engine = PoolEngine(workers)
    result = tuned(engine, "optuna", tmp_path, steps=420)
    engine.close()
    searched = [trial.plan for trial in result.trials if not trial.final]
    with sqlite3.connect(next((tmp_path / "run").glob("*.db"))) as database:
        rows = database.execute("select number, state from trials order by number").fetchall()
        told = database.execute("select count(*) from trial_values").fetchone()[0]
    assert [number for number, _ in rows] == list(range(len(rows)))
    assert {state for _, state in rows} <= {"COMPLETE", "FAIL"}
    # Known plans cost nothing and are recorded as failed.
    assert sum(state == "COMPLETE" for _, state in rows) == told >= len(searched)
    assert len(set(searched)) == len(searched) > 64
    assert sum(bool(worker.ran) for worker in workers) > 16


@pytest.mark.parametrize(
    ("address", "said"),
    [("local:0", "local:N"), ("local", "local:N"), ("nowhere", "HOST:PORT"), ("ray://", "HOST:PORT"), ("h:x", "auto")],
)
def test_invalid_address_is_one_line(address: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        ClusterOptions(address=address)


def test_incompatible_clusters_and_methods_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from autotune.cli.main import run

    refused: Callable[..., int] = lambda *more: run(  # noqa: E731
        ["tune", "charlm", "--runs-dir", str(tmp_path), *more]
    )
    assert refused("--cluster", "local:2", "--method", "ppo") == 2
    assert "random, optuna, optuna-prices" in capsys.readouterr().err
    assert refused("--cluster", "local:2", "--method", "random", "--engine", "deepspeed") == 2
    assert "ranks run on one machine" in capsys.readouterr().err
    assert refused("--cluster", "somewhere", "--method", "random") == 2
    assert "local:N" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
