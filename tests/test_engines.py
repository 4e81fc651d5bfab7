"""The engine contract, run on every engine."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_job
from replay_engine import ReplayEngine
from simulated_engine import SimulatedEngine
from torch import distributed

from autotune import ClusterOptions, EngineOptions, IsolatedEngine, Job, Plan, PlanError, RankOptions, TorchEngine
from autotune.cli.console import ranks
from autotune.engines.budgeted_engine import BudgetedEngine
from autotune.engines.cluster_pool import cluster_pool
from autotune.engines.engine import Engine
from autotune.engines.engine_calls import described, measured
from autotune.engines.pool_engine import PoolEngine
from autotune.engines.rank_processes import Report
from autotune.engines.registry import ENGINES, EngineEntry
from autotune.errors import EngineError, InputError
from autotune.measurement import Failure, Measurement
from autotune.plan import Launch, Precision
from autotune.profiling.profiler import ProfilerOptions
from autotune.profiling.rank_profiler import profiled_rank
from autotune.profiling.tracing_engine import WatchedEngine, watched_ranks
from autotune.records.journal import Journal, JournaledEngine
from autotune.simulator.random_jobs import draw_job

JOB = str(Path(tiny_job.__file__))
OPTIONS = EngineOptions(discard_steps=1)


def simulated_engine() -> SimulatedEngine:
    return SimulatedEngine(draw_job(np.random.default_rng(0), depth=(3, 3)))


class EngineContract:
    """Contract that every engine fulfils.

    Attributes:
        has_state: whether the engine has one training state, which can be saved and evaluated.
        trains: whether the same steps after a restore give the same losses; replayed windows do not train.
        tells_parts: whether windows tell where the time of their steps goes; simulated ones do not.
        closes: whether closing it ends it; a budgeted engine leaves that to the caller that made the wrapped engine.
    """

    has_state = True
    trains = True
    closes = True
    tells_parts = True

    def make(self) -> Engine:
        raise NotImplementedError

    @pytest.fixture
    def engine(self) -> Iterator[Any]:
        engine = self.make()
        yield engine
        engine.close()

    @pytest.fixture
    def engine_to_close(self) -> Any:
        return self.make()

    def test_parts_of_a_step_sum_to_its_time(self, engine: Any) -> None:
        window = engine.run(4)
        assert (window.parts is not None) == self.tells_parts
        if window.parts is not None:
            assert math.fsum(window.parts.seconds().values()) == pytest.approx(
                statistics.fmean(window.step_s), rel=0.02
            )

    def test_engine_begins_with_the_baseline_and_no_budget(self, engine: Any) -> None:
        assert isinstance(engine, Engine)
        assert engine.plan == engine.space.baseline()
        assert engine.memory_budget_bytes is None

    def test_plan_outside_the_space_is_rejected_and_the_previous_one_stays(self, engine: Any) -> None:
        engine.apply(engine.space.leanest())
        for wrong in (
            engine.plan.changed(accumulation_steps=3),
            engine.plan.changed(precision={"nowhere": Precision.FP32}),
        ):
            with pytest.raises(PlanError, match=r"accumulation_steps is 3|unknown unit 'nowhere'"):
                engine.apply(wrong)
        assert engine.plan == engine.space.leanest()

    def test_applied_plan_names_every_unit(self, engine: Any) -> None:
        engine.apply(Plan())
        assert list(engine.plan.precision) == [unit.name for unit in engine.space.units]
        assert list(engine.plan.storage) == list(engine.space.recomputable)

    def test_window_reports_the_steps_and_samples_it_consumed(self, engine: Any) -> None:
        for plan in (engine.space.baseline(), engine.space.leanest()):
            engine.apply(plan)
            window = engine.run(4)
            assert window.failure is None
            assert window.steps == 4
            assert window.samples >= window.steps
            assert window.seconds_per_step is not None
            assert window.seconds_per_step > 0
            assert window.peak_bytes is None or window.peak_bytes > 0
            assert window.loss is not None
            assert Measurement.from_json(window.to_json()) == window

    def test_exceeded_budget_is_a_failure_until_the_budget_is_lifted(self, engine: Any) -> None:
        engine.run(2)
        engine.apply(engine.space.leanest())
        engine.memory_budget_bytes = 1000
        window = engine.run(3)
        assert window.failure is Failure.OVER_BUDGET
        assert not window.within_budget
        assert window.memory_budget_bytes == 1000
        engine.memory_budget_bytes = None
        assert engine.run(3).failure is None
        engine.apply(engine.space.baseline())
        assert engine.run(3).failure is None

    def test_restored_snapshot_has_the_same_metric_and_keeps_the_plan(self, engine: Any) -> None:
        engine.run(2)
        if not self.has_state:
            for ask in (engine.snapshot, engine.evaluate, lambda: engine.restore(None)):
                with pytest.raises(EngineError, match="share no training state"):
                    ask()
            return
        snapshot, metric = engine.snapshot(), engine.evaluate()
        engine.apply(engine.space.leanest())
        engine.run(5)
        engine.restore(snapshot)
        assert engine.evaluate() == metric
        assert engine.plan == engine.space.leanest()

    def test_training_after_restore_continues_as_before(self, engine: Any) -> None:
        if not (self.has_state and self.trains):
            pytest.skip("its windows do not train one state")
        engine.run(2)
        snapshot = engine.snapshot()
        first = engine.run(3).loss
        engine.evaluate()
        engine.restore(snapshot)
        assert engine.run(3).loss == first

    def test_closed_engine_refuses_to_run_and_can_be_closed_again(self, engine_to_close: Any) -> None:
        engine_to_close.close()
        if self.closes:
            with pytest.raises(EngineError, match="closed"):
                engine_to_close.run(1)
        engine_to_close.close()


@pytest.fixture(scope="module")
def started() -> Iterator[dict[type, Engine]]:
    """Return the engines shared by several tests."""
    engines: dict[type, Engine] = {}
    yield engines
    for engine in engines.values():
        engine.close()


class StartedEngineContract(EngineContract):
    """The contract on one engine for all tests, since starting its processes takes seconds."""

    @pytest.fixture
    def engine(self, started: dict[type, Engine]) -> Iterator[Any]:
        engine = started.get(type(self)) or started.setdefault(type(self), self.make())
        yield engine
        engine.apply(engine.space.baseline())
        engine.memory_budget_bytes = None

    @pytest.fixture
    def engine_to_close(self, started: dict[type, Engine]) -> Any:
        return started.pop(type(self), None) or self.make()


class TestTorchEngine(EngineContract):
    def make(self) -> Engine:
        return TorchEngine(tiny_job.job(), options=OPTIONS)


class TestTracingEngine(EngineContract):
    def make(self) -> Engine:
        return WatchedEngine(tiny_job.job(), options=OPTIONS)


class TestIsolatedEngine(StartedEngineContract):
    def make(self) -> Engine:
        return IsolatedEngine(JOB, options=OPTIONS, threads=1)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
class TestDeepSpeedEngine(StartedEngineContract):
    def make(self) -> Engine:
        return IsolatedEngine(JOB, options=OPTIONS, ranks=RankOptions(count=2, zero_stage=1))


@pytest.mark.slow
class TestFsdp2Engine(StartedEngineContract):
    def make(self) -> Engine:
        return IsolatedEngine(JOB, options=OPTIONS, ranks=RankOptions(count=2, engine="fsdp2"))


@pytest.mark.slow
class TestPipelineEngine(StartedEngineContract):
    def make(self) -> Engine:
        return IsolatedEngine(JOB, options=OPTIONS, ranks=RankOptions(count=2, engine="pipeline"))


class TestSimulatedEngine(EngineContract):
    tells_parts = False

    def make(self) -> Engine:
        return simulated_engine()


class TestReplayEngine(EngineContract):
    tells_parts = False
    trains = False

    def make(self) -> Engine:
        source = simulated_engine()

        def answer(plan: Plan, steps: int) -> Measurement:
            source.apply(plan)
            source.memory_budget_bytes = engine.memory_budget_bytes
            return source.run(steps)

        engine = ReplayEngine(source.space, answer, metrics=(2.0,))
        return engine


class TestBudgetedEngine(EngineContract):
    tells_parts = False
    closes = False

    def make(self) -> Engine:
        return BudgetedEngine(simulated_engine(), 1000)


class TestJournaledEngine(EngineContract):
    def make(self) -> Engine:
        return JournaledEngine(TorchEngine(tiny_job.job(), options=OPTIONS), Journal())


def test_every_engine_name_can_be_loaded_and_takes_the_options_of_its_entry() -> None:
    for entry in ENGINES.values():
        parameters = inspect.signature(entry.load()).parameters
        assert {"seed", "device", "options", *entry.options} <= set(parameters)


def test_a_registered_engine_can_be_named_in_rank_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        ENGINES, "traced", EngineEntry("autotune.profiling.tracing_engine", "WatchedEngine", has_ranks=True)
    )
    assert RankOptions(engine="traced").arguments() == {}
    monkeypatch.setitem(ENGINES, "alone", EngineEntry("autotune.profiling.tracing_engine", "WatchedEngine"))
    assert ranks("alone", None, "0", None) == RankOptions(count=1, engine="alone")
    assert RankOptions(count=1, engine="alone").launched(Launch()) == Launch()
    for foreign in ({"count": 2}, {"zero_stage": "3"}, {"mesh": "dp=1"}):
        with pytest.raises(InputError, match="--engine alone cannot be combined with --"):
            ranks("alone", **{"count": None, "zero_stage": "0", "config": None, **foreign})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="engine is 'unknown'"):
        RankOptions(engine="unknown")


class Counted(TorchEngine):
    """An engine of several ranks that counts its windows."""

    windows = 0

    def __init__(self, job: Job, *, zero_stage: int = 0, **options: Any) -> None:
        super().__init__(job, **options)
        self.stage = zero_stage

    def run(self, steps: int) -> Measurement:
        Counted.windows += 1
        return super().run(steps)


def test_ranks_are_profiled_on_the_engine_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(ENGINES, "counted", EngineEntry("test_engines", "Counted", ("zero_stage",)))
    asked = {
        "job": JOB,
        "ranks": {"count": 1, "zero_stage": 1, "config": None, "engine": "counted"},
        "device": "cpu",
        "device_name": "here",
        "fingerprint": "",
        "options": dataclasses.asdict(ProfilerOptions.lean()),
        "no_room": [],
    }
    monkeypatch.setattr(importlib.import_module("test_engines").Counted, "windows", 0)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        found = profiled_rank(asked, Report(None))
    finally:
        distributed.destroy_process_group()
    assert importlib.import_module("test_engines").Counted.windows > 4
    assert found["tables"]
    with pytest.raises(InputError, match="engine IsolatedEngine cannot be profiled"):
        watched_ranks(IsolatedEngine)


class LocalWorker:
    """A worker of a pool that runs its windows on an engine in this process."""

    def __init__(self) -> None:
        self._engine = simulated_engine()

    def describe(self) -> dict[str, Any]:
        return described(self._engine)

    def run(self, plan: dict[str, Any], steps: int, memory_budget_bytes: int | None) -> dict[str, Any]:
        return measured(self._engine, plan, steps, memory_budget_bytes)

    def close(self) -> None:
        self._engine.close()


class TestPoolEngine(EngineContract):
    tells_parts = False
    has_state = False

    def make(self) -> Engine:
        return PoolEngine([LocalWorker(), LocalWorker()])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
class TestClusterPool(StartedEngineContract):
    has_state = False

    def make(self) -> Engine:
        return cluster_pool(ClusterOptions(address="local:2"), JOB, seed=0, measuring=OPTIONS)
