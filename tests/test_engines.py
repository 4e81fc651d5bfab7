"""What every engine promises, whatever is behind it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tiny_job
from replay_engine import ReplayEngine
from simulated_engine import SimulatedEngine

from autotune import EngineOptions, Plan, PlanError, TorchEngine
from autotune.engines.budgeted_engine import MeteredEngine
from autotune.engines.engine import Engine
from autotune.errors import EngineError
from autotune.measurement import Failure, Measurement
from autotune.plan import Precision
from autotune.simulator.random_jobs import draw_job


def torch_engine() -> Engine:
    return TorchEngine(tiny_job.job(), options=EngineOptions(discard_steps=1))


def simulated_engine() -> Engine:
    return SimulatedEngine(draw_job(np.random.default_rng(0), depth=(3, 3)))


def replay_engine() -> Engine:
    """Replay what a simulated engine answers."""
    source = simulated_engine()

    def answer(plan: Plan, steps: int) -> Measurement:
        source.apply(plan)
        source.memory_budget_bytes = engine.memory_budget_bytes
        return source.run(steps)

    engine = ReplayEngine(source.space, answer, metrics=(2.0,))
    return engine


def metered_engine() -> Engine:
    return MeteredEngine(simulated_engine(), 1000)


ENGINES = (torch_engine, simulated_engine, replay_engine, metered_engine)
every_engine = pytest.mark.parametrize("make", ENGINES, ids=lambda make: make.__name__)


@every_engine
def test_it_is_an_engine(make: Callable[[], Engine]) -> None:
    assert isinstance(make(), Engine)


@every_engine
def test_it_begins_under_the_baseline_without_a_budget(make: Callable[[], Engine]) -> None:
    engine = make()
    assert engine.plan == engine.space.baseline()
    assert engine.memory_budget_bytes is None


@every_engine
def test_a_plan_outside_the_space_is_refused_and_the_former_one_stays(make: Callable[[], Engine]) -> None:
    engine = make()
    engine.apply(engine.space.leanest())
    for wrong in (
        engine.plan.changed(accumulation_steps=3),
        engine.plan.changed(precision={"nowhere": Precision.FP32}),
    ):
        with pytest.raises(PlanError):
            engine.apply(wrong)
    assert engine.plan == engine.space.leanest()


@every_engine
def test_a_window_counts_what_it_consumed(make: Callable[[], Engine]) -> None:
    engine = make()
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


@every_engine
def test_a_budget_that_is_too_small_is_a_value_and_another_one_heals_it(make: Callable[[], Engine]) -> None:
    engine = make()
    engine.run(2)
    engine.apply(engine.space.leanest())
    engine.memory_budget_bytes = 1000
    window = engine.run(3)
    assert window.failure is Failure.OVER_BUDGET
    assert not window.within_budget
    assert window.memory_budget_bytes == 1000
    engine.memory_budget_bytes = None
    engine.apply(engine.space.baseline())
    assert engine.run(3).failure is None


@every_engine
def test_a_snapshot_returns_to_the_same_metric(make: Callable[[], Engine]) -> None:
    engine = make()
    engine.run(2)
    snapshot, metric = engine.snapshot(), engine.evaluate()
    engine.run(5)
    engine.restore(snapshot)
    assert engine.evaluate() == metric


@pytest.mark.parametrize("make", [torch_engine, simulated_engine, replay_engine], ids=lambda make: make.__name__)
def test_a_closed_engine_refuses_to_run(make: Callable[[], Engine]) -> None:
    engine = make()
    engine.close()
    with pytest.raises(EngineError):
        engine.run(1)


@pytest.mark.parametrize("make", [torch_engine, simulated_engine], ids=lambda make: make.__name__)
def test_training_goes_on_as_it_would_have_after_a_restore(make: Callable[[], Engine]) -> None:
    engine = make()
    engine.run(2)
    snapshot = engine.snapshot()
    first = engine.run(3).loss
    engine.restore(snapshot)
    assert engine.run(3).loss == first
