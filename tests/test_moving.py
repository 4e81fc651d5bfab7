"""Moving conditions: a planner against a clairvoyant, each mechanism alone, and none at all."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.physics.cost_arrays import Plans
from autotune.physics.moving import MovingRuns, Strengths, draw_course
from autotune.physics.planning import Levers, Planner, PlannerSettings, clairvoyant, run_planner
from autotune.physics.synthetic import draw_job

STRONG = Strengths(
    noise_error=0.5,
    cost_error=0.3,
    drift=0.15,
    length=0.15,
    curriculum=0.4,
    jitter=0.05,
    event_every=6,
    switch_windows=0.3,
)
LANES, WINDOWS = 24, 20


@pytest.fixture(scope="module")
def jobs():
    generator = np.random.default_rng(1)
    return [draw_job(generator, depth=(2, 8)) for _ in range(12)]


def course_of(jobs, strengths: Strengths, seed: int = 3):
    runs = MovingRuns(jobs, strengths, windows=WINDOWS)
    generator = np.random.default_rng(seed)
    job = np.arange(LANES) % len(jobs)
    zero = np.zeros((LANES, runs.arrays.max_units), dtype=np.int64)
    peak = runs.arrays.peak_bytes(Plans(job, np.zeros(LANES, dtype=np.int64), zero))
    return runs, draw_course(generator, strengths, runs.arrays, job, peak * 0.8, WINDOWS)


def test_with_everything_off_a_planner_is_as_good_as_a_clairvoyant(jobs) -> None:
    runs, course = course_of(jobs, Strengths())
    for settings in (PlannerSettings(), PlannerSettings(horizon=0.0), PlannerSettings(correction=0.0)):
        seconds, _ = run_planner(runs, course, settings)
        np.testing.assert_allclose(seconds, clairvoyant(runs, course), rtol=1e-9)


@pytest.mark.parametrize("names", [(), ("cost_error",), ("length", "jitter"), ("event_every", "switch_windows"), None])
def test_nobody_is_faster_than_the_clairvoyant(jobs, names) -> None:
    strengths = STRONG if names is None else STRONG.only(*names)
    runs, course = course_of(jobs, strengths)
    seconds, plans = run_planner(runs, course, PlannerSettings(reserve=0.1))
    best = clairvoyant(runs, course, plans)
    assert (best <= seconds * (1 + 1e-9)).all()


def test_correcting_costs_by_measurements_helps_where_they_are_wrong(jobs) -> None:
    runs, course = course_of(jobs, STRONG.only("cost_error"))
    corrected, _ = run_planner(runs, course, PlannerSettings())
    believed, _ = run_planner(runs, course, PlannerSettings(correction=0.0))
    assert corrected.mean() < believed.mean()


def test_hysteresis_helps_where_switching_is_dear(jobs) -> None:
    runs, course = course_of(jobs, STRONG.only("event_every", "switch_windows", "drift"))
    patient, _ = run_planner(runs, course, PlannerSettings())
    eager, _ = run_planner(runs, course, PlannerSettings(horizon=0.0))
    assert patient.mean() < eager.mean()


def test_a_reserve_helps_where_lengths_jump(jobs) -> None:
    runs, course = course_of(jobs, STRONG.only("length", "jitter"))
    reserved, _ = run_planner(runs, course, PlannerSettings(reserve=0.2))
    bold, _ = run_planner(runs, course, PlannerSettings())
    assert reserved.mean() < bold.mean()


def test_running_out_of_memory_costs_the_window_and_a_leaner_one(jobs) -> None:
    strengths = Strengths(retry_windows=1.0)
    runs, course = course_of(jobs, strengths)
    course.budget[:] = 1.0
    runs.begin(course)
    fat = np.zeros((LANES, runs.arrays.max_units), dtype=np.int64)
    k = np.zeros(LANES, dtype=np.int64)
    outcome = runs.run(k, fat)
    assert outcome.ran_out.all()
    assert (outcome.seconds > runs.window_seconds(0, k, fat, course.length[:, 0])).all()


def test_the_same_course_gives_the_same_run(jobs) -> None:
    runs, course = course_of(jobs, STRONG)
    first, _ = run_planner(runs, course, PlannerSettings())
    again, _ = run_planner(runs, course, PlannerSettings())
    np.testing.assert_array_equal(first, again)
    _, other = course_of(jobs, STRONG, seed=4)
    assert not np.array_equal(run_planner(runs, other, PlannerSettings())[0], first)


def test_neutral_levers_change_nothing_and_others_do(jobs) -> None:
    runs, course = course_of(jobs, STRONG)
    runs.begin(course)
    planner = Planner(runs, PlannerSettings(reserve=0.1))
    k, choices = planner.decide()
    same_k, same = planner.decide(Levers.neutral(LANES))
    np.testing.assert_array_equal(k, same_k)
    np.testing.assert_array_equal(choices, same)
    levers = Levers.neutral(LANES)
    levers.reserve += 0.5
    _, leaner = planner.decide(levers)
    assert not np.array_equal(choices, leaner)
    dear = Levers.neutral(LANES)
    dear.price_16_bit += 3.0
    _, full = planner.decide(dear)
    assert (full // 2).sum() < (choices // 2).sum()


def test_a_mechanism_can_be_kept_alone() -> None:
    alone = STRONG.only("length")
    assert (alone.length, alone.length_windows) == (STRONG.length, STRONG.length_windows)
    assert (alone.cost_error, alone.event_every, alone.switch_windows) == (0.0, 0, 0.0)
