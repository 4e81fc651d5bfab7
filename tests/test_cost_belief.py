"""Tests of the belief about costs: what whole steps teach, how errors are explained, and what trying is worth."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest

from autotune.cost_model.cost_arrays import Floats
from autotune.simulator.clairvoyant import run_planner
from autotune.simulator.cost_belief import CostBelief, CostFilter, expected_gain
from autotune.simulator.moving_conditions import MovingRuns, Strengths, draw_course
from autotune.simulator.online_planner import Planner
from autotune.simulator.planner_settings import PlannerSettings
from autotune.simulator.random_jobs import draw_job

UNITS, PRECISIONS = 3, 2
ALL_FP32 = np.array([[0.1, 0.0, 0.2, 0.0, 0.05, 0.0]])


Belief = TypeVar("Belief", CostBelief, CostFilter)


def belief(**settings: float) -> CostFilter:
    exact = PlannerSettings(**{"cost_error": 0.3, "drift": 0.0, "time_noise": 0.0, **settings})
    return CostFilter(1, UNITS, PRECISIONS, exact)


def taught(found: Belief, weights: Floats, factor: Floats, times: int, constant: float = 0.07) -> Belief:
    measured = constant + (weights * factor.reshape(1, -1)).sum(axis=1)
    for _ in range(times):
        found.learn(weights, np.array([constant]), measured, np.array([True]))
    return found


@pytest.mark.parametrize("settings", [{}, {"drift": 0.02, "time_noise": 0.02}, {"time_noise": 0.3}])
def test_believed_step_time_converges_to_the_measured_one(settings: dict[str, float]) -> None:
    factor = np.array([[[1.3, 0.7], [1.1, 0.9], [1.6, 1.2]]])
    real = 0.07 + float((ALL_FP32 * factor.reshape(1, -1)).sum())
    errors = []
    for times in (0, 1, 3, 10, 1000):
        found = taught(belief(**settings), ALL_FP32, factor, times)
        errors.append(abs(0.07 + float((ALL_FP32 * found.mean.reshape(1, -1)).sum()) - real) / real)
    assert errors[0] > 0.1
    assert (np.diff(errors) <= 1e-12).all()
    assert errors[-1] < 1e-3
    if not settings:
        # An exact measurement is believed at once.
        assert errors[1] < 1e-9


def test_unmeasured_format_is_updated_less_than_a_measured_one() -> None:
    found = taught(belief(), ALL_FP32, np.full((1, UNITS, PRECISIONS), 1.5), 5)
    fp32, bf16 = np.abs(found.mean[0, :, 0] - 1), np.abs(found.mean[0, :, 1] - 1)
    assert fp32.min() > 0.2
    # The other format was not measured, so the belief about it stays.
    np.testing.assert_allclose(bf16, 0.0, atol=1e-12)
    mixed = taught(belief(), np.array([[0.1, 0.0, 0.0, 0.2, 0.05, 0.0]]), np.full((1, UNITS, PRECISIONS), 1.5), 5)
    # Measured plans are the most certain, then plans that share a format with them, then all others.
    assert abs(mixed.mean[0, 1, 1] - 1) > abs(mixed.mean[0, 0, 1] - 1) > 0.0


def test_measurements_reduce_uncertainty_and_time_increases_it() -> None:
    found, factor = belief(time_noise=0.05), np.ones((1, UNITS, PRECISIONS))
    before = found.deviation().copy()
    np.testing.assert_allclose(before, 0.3)
    for _ in range(5):
        last = found.deviation().copy()
        taught(found, ALL_FP32, factor, 1)
        assert (found.deviation() <= last + 1e-15).all()
        assert (found.deviation()[0, :, 0] < last[0, :, 0]).all()
    np.testing.assert_allclose(found.deviation()[0, :, 1], 0.3)
    drifting = belief(drift=0.1)
    for _ in range(3):
        drifting.learn(ALL_FP32, np.zeros(1), np.ones(1), np.array([False]))
    np.testing.assert_allclose(drifting.deviation(), np.sqrt(0.09 + 3 * 0.01))
    np.testing.assert_array_equal(drifting.mean, 1.0)


def test_belief_without_prior_uncertainty_ignores_measurements() -> None:
    found = taught(
        CostBelief(1, UNITS, PRECISIONS, PlannerSettings(cost_error=0.0)),
        ALL_FP32,
        np.full((1, UNITS, PRECISIONS), 3.0),
        10,
    )
    np.testing.assert_array_equal(found.mean, 1.0)
    np.testing.assert_array_equal(found.deviation(), 0.0)


# --------------------------------------------------------------------------------------------------- explanations

USUAL = PlannerSettings(cost_error=0.2, drift=0.03, time_noise=0.05)
MUCH, LITTLE, RIGHT = range(3)


def measured_often(seconds: Floats) -> CostBelief:
    """Return a belief after measurements of one plan, which the profile tells to take 0.42 s."""
    found = CostBelief(1, UNITS, PRECISIONS, USUAL)
    for one in seconds:
        found.learn(ALL_FP32, np.array([0.07]), np.array([one]), np.array([True]))
    return found


def noisy(deviation: float, windows: int = 60) -> Floats:
    return 0.42 * np.exp(deviation * np.random.default_rng(0).standard_normal(windows))


@pytest.mark.parametrize("deviation", [0.0, 0.01, 0.05, 0.2])
def test_noise_of_any_size_is_not_mistaken_for_costs(deviation: float) -> None:
    found = measured_often(noisy(deviation))
    assert found.weights[RIGHT, 0] > found.weights[MUCH, 0]
    np.testing.assert_allclose(found.mean, 1.0, atol=0.03)


def test_a_wrong_profile_is_corrected() -> None:
    found = measured_often(1.4 * noisy(0.01))
    assert found.weights[RIGHT, 0] < 0.01
    believed = 0.07 + float((ALL_FP32 * found.mean.reshape(1, -1)).sum())
    assert believed == pytest.approx(1.4 * 0.42, rel=0.02)


def test_one_stalled_step_moves_little_and_a_lasting_change_is_learnt() -> None:
    stalled, slower = noisy(0.02), noisy(0.02)
    stalled[30] *= 1000
    np.testing.assert_allclose(measured_often(stalled[:31]).mean, 1.0, atol=0.05)
    np.testing.assert_allclose(measured_often(stalled).mean, 1.0, atol=0.02)
    slower[30:] *= 1.5
    for windows, off in ((31, 0.5), (36, 0.03)):
        found = measured_often(slower[:windows])
        believed = 0.07 + float((ALL_FP32 * found.mean.reshape(1, -1)).sum())
        assert abs(believed / (1.5 * 0.42) - 1) < off


@pytest.mark.some(1)
@pytest.mark.parametrize("deviation", [0.3, 0.0])
def test_belief_stays_finite_in_long_runs_and_forgets_old_evidence(deviation: float) -> None:
    found = measured_often(noisy(deviation, 20_000))
    assert np.isfinite(found.mean).all()
    assert np.isfinite(found.deviation()).all()
    assert found.weights.sum() == pytest.approx(1)
    for one in 1.4 * noisy(0.01, 100):
        found.learn(ALL_FP32, np.array([0.07]), np.array([one]), np.array([True]))
    believed = 0.07 + float((ALL_FP32 * found.mean.reshape(1, -1)).sum())
    assert believed == pytest.approx(1.4 * 0.42, rel=0.05)


# ------------------------------------------------------------------------------------------------- what trying is worth


def test_expected_gain_is_that_of_a_normal_change() -> None:
    slower, moved = np.array([0.0, 0.1, 0.3, 1.0]), np.array([0.2, 0.2, 0.2, 0.2])
    change = np.random.default_rng(0).standard_normal((400_000, 1)) * moved
    by_trying = np.maximum(change - slower, 0.0).mean(axis=0)
    np.testing.assert_allclose(expected_gain(slower, moved), by_trying, atol=1e-3)
    assert (np.diff(expected_gain(slower, moved)) < 0).all()


def test_nothing_is_gained_by_what_cannot_run_or_teaches_nothing() -> None:
    assert expected_gain(np.array([np.inf, 0.0, 1e300]), np.array([1.0, 0.0, 1e-300])).tolist() == [0.0, 0.0, 0.0]


def test_one_measurement_moves_expected_times_as_much_as_foreseen() -> None:
    generator = np.random.default_rng(0)
    settings = replace(USUAL, costs="assumed", drift=0.0)
    plan, other = np.array([0.1, 0.0, 0.0, 0.2, 0.05, 0.0]), ALL_FP32[0]
    prior = CostFilter(1, UNITS, PRECISIONS, settings).covariance[0]
    lanes = 20_000
    found = CostBelief(lanes, UNITS, PRECISIONS, settings)
    # Without measurements, errors have the assumed size as far as the profile is doubted at all.
    scale = found._filters[0].scale[:1] ** 0.5
    foreseen = CostBelief(1, UNITS, PRECISIONS, settings).moved(plan[None, None], other[None], np.array([[plan.sum()]]))
    factor = generator.multivariate_normal(np.ones(len(prior)), prior, size=lanes)
    measured = (factor @ plan) * (1 + 0.05 * generator.standard_normal(lanes))
    found.learn(np.tile(plan, (lanes, 1)), np.zeros(lanes), measured, np.ones(lanes, dtype=bool))
    difference = (found.mean.reshape(lanes, -1) - 1) @ (plan - other)
    assert difference.std() == pytest.approx(float(foreseen[0, 0] / scale[0]), rel=0.03)


# ---------------------------------------------------------------------------------------------------- under a planner

LANES, WINDOWS = 48, 60


@pytest.fixture(scope="module")
def runs() -> MovingRuns:
    generator = np.random.default_rng(11)
    return MovingRuns([draw_job(generator, depth=(2, 8)) for _ in range(24)], Strengths(), windows=WINDOWS)


def total(runs: MovingRuns, strengths: Strengths, costs: str) -> Floats:
    """Return each lane's time under a planner, in windows of its baseline."""
    runs.strengths = strengths
    job = np.arange(LANES) % len(runs.jobs)
    pool = runs.pool.take(job)
    budget = 0.5 * (pool.peak_of(pool.baseline, np.ones(LANES)) + pool.peak_of(pool.leanest, np.ones(LANES)))
    course = draw_course(np.random.default_rng(3), strengths, runs.arrays, job, budget, WINDOWS)
    return np.asarray(run_planner(runs, course, replace(USUAL, costs=costs)).sum(axis=1) / runs.baseline_s)


def test_planners_agree_where_costs_are_as_profiled(runs: MovingRuns) -> None:
    weighed, assumed = (total(runs, Strengths(), costs) for costs in ("weighed", "assumed"))
    np.testing.assert_allclose(weighed, assumed, rtol=1e-9)


@pytest.mark.parametrize(
    "strengths",
    [Strengths(time_noise=0.15), Strengths(cost_error=0.3, time_noise=0.05, drift=0.1)],
    ids=["noise alone", "wrong and drifting costs"],
)
def test_weighing_explanations_saves_time(runs: MovingRuns, strengths: Strengths) -> None:
    weighed, assumed = (total(runs, strengths, costs) for costs in ("weighed", "assumed"))
    assert weighed.mean() < assumed.mean()


def test_trials_and_plans_that_run_out_of_memory_are_not_repeated_without_an_idea_of_rises(runs: MovingRuns) -> None:
    # The longest batches are up to 1.5 times as long as the mean ones, which a planner without rises takes for certain.
    runs.strengths = Strengths(cost_error=0.2, jitter=0.2, time_noise=0.05)
    job = np.arange(LANES) % len(runs.jobs)
    pool = runs.pool.take(job)
    budget = pool.peak_of(pool.baseline, np.ones(LANES))
    course = draw_course(np.random.default_rng(3), runs.strengths, runs.arrays, job, budget, WINDOWS)
    seconds, failures = {}, {}
    for costs in ("weighed", "assumed"):
        runs.begin(course)
        planner, failed = Planner(runs.lanes, replace(USUAL, costs=costs)), []
        for _ in range(WINDOWS):
            seen = runs.run(planner.decide(runs.situation()))
            planner.observe(seen)
            failed.append(seen.ran_out)
        seconds[costs], failures[costs] = runs.seconds.copy(), np.stack(failed)
    assert failures["weighed"].mean() < 0.1
    assert failures["weighed"][-20:].mean() < failures["weighed"][:20].mean()
    assert np.quantile(seconds["weighed"] / seconds["assumed"], 0.95) < 1.1


def test_uncertain_plan_is_tried_only_for_what_it_teaches(runs: MovingRuns) -> None:
    runs.strengths = Strengths(cost_error=0.3)
    job = np.arange(LANES) % len(runs.jobs)
    pool = runs.pool.take(job)
    budget = pool.peak_of(pool.baseline, np.ones(LANES))
    course = draw_course(np.random.default_rng(3), runs.strengths, runs.arrays, job, budget, WINDOWS)
    tried = {}
    for costs in ("weighed", "assumed"):
        runs.begin(course)
        planner, plans = Planner(runs.lanes, replace(USUAL, costs=costs, drift=0.0)), []
        for _ in range(WINDOWS):
            seen = runs.run(planner.decide(runs.situation()))
            planner.observe(seen)
            plans.append(seen.plan)
        changes = np.stack(plans)[1:] != np.stack(plans)[:-1]
        tried[costs] = (changes[:10].sum(), changes[-20:].sum())
    assert tried["weighed"][0] > tried["assumed"][0]
    # Costs that do not change are known in the end.
    assert tried["weighed"][1] < tried["weighed"][0] / 5
