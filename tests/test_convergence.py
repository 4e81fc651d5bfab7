"""Tests of the convergence model: its laws, and fits that recover the generating model."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.cost_model.goodput import efficiency, step_efficiency
from autotune.errors import ProfileError
from autotune.plan import Plan, Precision
from autotune.simulator.convergence import (
    Convergence,
    Curve,
    NoiseLaw,
    RunRecord,
    fit,
    fit_curve,
    fit_noise,
)

positive = st.floats(1e-2, 1e5)
CURVE = Curve(asymptote=1.0, drop=4.0, scale=10.0, exponent=0.7)
MODEL = Convergence(loss=CURVE, metric=CURVE, noise=NoiseLaw(reference=8.0, reference_loss=5.0, exponent=3.0))


@given(positive, st.floats(0, 1e6), st.floats(0, 10))
def test_step_is_worth_more_than_zero_and_at_most_one_step(batch, noise, error):
    assert 0 < step_efficiency(batch, noise, error) <= 1


@given(positive, positive, st.floats(0, 1e6), st.floats(0, 10))
def test_a_larger_batch_never_makes_a_step_worth_less(first, second, noise, error):
    small, large = sorted((first, second))
    assert step_efficiency(small, noise, error) <= step_efficiency(large, noise, error)


@given(positive, positive, st.floats(0, 1e6))
def test_a_larger_batch_never_makes_a_sample_worth_more(first, second, noise):
    small, large = sorted((first, second))
    assert step_efficiency(small, noise) / small >= step_efficiency(large, noise) / large * (1 - 1e-12)


def test_step_is_worth_half_if_the_batch_equals_the_noise_scale():
    assert step_efficiency(64.0, 64.0) == 0.5


@given(positive, positive, positive)
def test_value_of_a_step_agrees_with_pollux_efficiency(batch, reference, noise):
    ratio = (step_efficiency(batch, noise) / batch) / (step_efficiency(reference, noise) / reference)
    assert ratio == pytest.approx(efficiency(batch, noise, reference), rel=1e-9)


@given(st.floats(0, 1e4), st.floats(0, 1e4))
def test_curves_fall_and_can_be_inverted(first, second):
    early, late = sorted((first, second))
    assert CURVE.at(early) >= CURVE.at(late)
    assert CURVE.effort_to(CURVE.at(early)) == pytest.approx(early, rel=1e-6, abs=1e-6)


def test_target_beyond_the_asymptote_is_never_reached():
    assert CURVE.effort_to(0.9) == math.inf
    assert CURVE.effort_to(6.0) == 0.0
    assert MODEL.steps_to(0.9, 32.0) == math.inf


@given(st.floats(1.5, 4.5), st.floats(1.5, 4.5), positive)
def test_a_harder_target_takes_more_steps(first, second, batch):
    hard, easy = sorted((first, second))
    assert MODEL.steps_to(hard, batch) >= MODEL.steps_to(easy, batch)


def test_number_of_steps_equals_a_step_by_step_simulation():
    effort, steps, batch = 0.0, 0, 16.0
    while CURVE.at(effort) > 2.0:
        effort += step_efficiency(batch, MODEL.noise_scale(CURVE.at(effort)), 0.01)
        steps += 1
    assert MODEL.steps_to(2.0, batch, 0.01) == pytest.approx(steps, rel=0.02)


def test_errors_of_units_add_up():
    model = Convergence(
        loss=CURVE, metric=CURVE, noise=MODEL.noise, squared_errors={"a": {"bf16": 0.25}, "b": {"bf16": 0.5}}
    )
    plan = Plan(accumulation_steps=1, precision={"a": Precision.BF16, "b": Precision.FP32}, storage={})
    assert model.squared_error(plan) == 0.25
    both = plan.changed(precision={"a": Precision.BF16, "b": Precision.BF16})
    assert model.squared_error(both) == 0.75


def run_of(truth: Convergence, batch: float, steps: int, generator: np.random.Generator, noise: float) -> RunRecord:
    """Return a run that follows a model, in windows of five steps."""
    effort, losses, metrics, scales = 0.0, [], [], []
    for _ in range(steps // 5):
        seen = []
        for _ in range(5):
            loss = truth.loss.at(effort)
            seen.append(loss)
            effort += step_efficiency(batch, truth.noise_factor * truth.noise.at(loss))
        losses.append(float(np.mean(seen) * (1 + noise * generator.standard_normal())))
        metrics.append(float(truth.metric.at(effort) * (1 + noise * generator.standard_normal())))
        scales.append(truth.noise.at(losses[-1]) * math.exp(0.3 * generator.standard_normal()))
    ends = tuple(range(5, 5 * len(losses) + 1, 5))
    return RunRecord(batch=batch, steps=ends, losses=tuple(losses), metrics=tuple(metrics), noise_scales=tuple(scales))


@pytest.mark.parametrize("factor", [1.0, pytest.param(4.0, marks=pytest.mark.slow)])
def test_fit_recovers_the_model_that_generated_the_runs(factor):
    generator = np.random.default_rng(0)
    truth = Convergence(loss=CURVE, metric=CURVE, noise=MODEL.noise, noise_factor=factor)
    runs = [run_of(truth, batch, steps, generator, 0.01) for batch, steps in ((8.0, 200), (16.0, 150), (64.0, 100))]
    found = fit(runs)
    assert found.loss_error_frac < 0.03
    assert found.metric_error_frac < 0.03
    assert found.noise.exponent == pytest.approx(3.0, abs=0.5)
    assert factor / 2 <= found.noise_factor <= factor * 2
    for batch in (8.0, 32.0, 128.0):
        assert found.steps_to(2.2, batch) == pytest.approx(truth.steps_to(2.2, batch), rel=0.25)


def test_runs_with_one_batch_size_do_not_determine_the_noise_factor():
    generator = np.random.default_rng(0)
    assert fit([run_of(MODEL, 16.0, 100, generator, 0.01)]).noise_factor == 1.0


def test_every_step_counts_equally_if_the_noise_scale_is_unknown():
    run = RunRecord(
        batch=8.0, steps=(5, 10, 15), losses=(3.0, 2.0, 1.5), metrics=(3.0, 2.0, 1.5), noise_scales=(None,) * 3
    )
    assert fit_noise([run]).reference == 0.0
    assert list(run.efforts(fit_noise([run]), 1.0)) == [5.0, 10.0, 15.0]


def test_increasing_metric_can_be_fitted():
    efforts = np.arange(1.0, 60.0)
    grown = Curve(asymptote=0.95, drop=-0.8, scale=8.0, exponent=1.0)
    found, error = fit_curve(efforts, grown.along(efforts))
    assert error < 0.01
    assert found.drop < 0


def test_constant_metric_can_be_fitted():
    found, error = fit_curve(np.arange(1.0, 6.0), np.full(5, 2.0))
    assert error < 1e-6
    assert found.at(3.0) == pytest.approx(2.0)


def test_fit_requires_a_run():
    with pytest.raises(ValueError, match="at least three windows"):
        fit([])


def test_documents_round_trip_and_errors_name_the_invalid_part():
    assert Convergence.from_json(MODEL.to_json()) == MODEL
    with pytest.raises(ProfileError, match="version is 7"):
        Convergence.from_json({**MODEL.to_json(), "version": 7})
    with pytest.raises(ProfileError, match=r"loss\.asymptote is missing"):
        Convergence.from_json({**MODEL.to_json(), "loss": {}})
