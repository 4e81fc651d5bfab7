"""Tests of jobs: what a user may pass, and what is rejected at once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune import Job, JobError, WarmupCosine


def job(**changes: object) -> Job:
    """Return a job that is never run."""
    settings = {
        "name": "job",
        "model": lambda: None,
        "batches": lambda seed: iter(()),
        "loss": lambda model, batch: None,
        "optimizer": lambda parameters: None,
        "evaluate": lambda model: 0.0,
        "target": 1.0,
        "batch_size": 8,
    }
    return Job(**{**settings, **changes})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("name", "", r"name is '' \(allowed: text of at most 1000 characters\)"),
        ("name", 3, r"name is 3 \(allowed: text of at most 1000 characters\)"),
        ("model", None, r"model is None \(allowed: a function\)"),
        ("batches", [1, 2], r"batches is \[1, 2\] \(allowed: a function\)"),
        ("loss", "mse", r"loss is 'mse' \(allowed: a function\)"),
        ("optimizer", "adamw", r"optimizer is 'adamw' \(allowed: a function\)"),
        ("evaluate", 0.5, r"evaluate is 0.5 \(allowed: a function\)"),
        ("count", 3, r"count is 3 \(allowed: a function"),
        ("goal", "less", r"goal is 'less' \(allowed: min, max\)"),
        ("batching", "elastic", r"batching is 'elastic' \(allowed: fixed, adaptive\)"),
        ("lr_rule", "cubic", r"lr_rule is 'cubic' \(allowed: linear, sqrt, none\)"),
        ("target", math.nan, r"target is nan \(allowed: a number, or None\)"),
        ("target", math.inf, r"target is inf \(allowed: a number, or None\)"),
        ("target", "low", r"target is 'low' \(allowed: a number, or None\)"),
        ("batch_size", 0, r"batch_size is 0 \(allowed: a whole number >= 1\)"),
        ("batch_size", 8.0, r"batch_size is 8.0 \(allowed: a whole number >= 1\)"),
        ("batch_size", True, r"batch_size is True \(allowed: a whole number >= 1\)"),
        ("max_steps", -1, r"max_steps is -1 \(allowed: a whole number >= 1\)"),
        ("evaluate_every", None, r"evaluate_every is None \(allowed: a whole number >= 1\)"),
        ("clip_norm", 0, r"clip_norm is 0 \(allowed: a number > 0, or None\)"),
        ("clip_norm", -1.0, r"clip_norm is -1.0 \(allowed: a number > 0, or None\)"),
        ("clip_norm", math.nan, r"clip_norm is nan \(allowed: a number > 0, or None\)"),
        ("clip_norm", "1", r"clip_norm is '1' \(allowed: a number > 0, or None\)"),
        ("accumulation_choices", (), r"accumulation_choices is \(\) \(allowed: ascending whole numbers"),
        ("accumulation_choices", (2, 4), r"accumulation_choices is \(2, 4\) \(allowed: .* begin with 1\)"),
        ("accumulation_choices", (1, 4, 2), r"accumulation_choices is \(1, 4, 2\) \(allowed: ascending"),
        ("accumulation_choices", (1, 2, 2), r"accumulation_choices is \(1, 2, 2\) \(allowed: ascending"),
        ("accumulation_choices", (1, 2.0), r"accumulation_choices is \(1, 2.0\) \(allowed: ascending"),
        ("accumulation_choices", (True, 2), r"accumulation_choices is \(True, 2\) \(allowed: ascending"),
        ("accumulation_choices", (1, "2"), r"accumulation_choices is \(1, '2'\) \(allowed: ascending"),
        ("accumulation_choices", 4, r"accumulation_choices is 4 \(allowed: ascending"),
        ("accumulation_choices", (1, 16), r"accumulation_choices is \(1, 16\) \(allowed: at most batch_size = 8"),
        ("schedule", "cosine", r"schedule is 'cosine' \(allowed: .*WarmupCosine"),
        ("units", "blocks", r"units is 'blocks' \(allowed: "),
        ("data_sources", ["x"], r"data_sources is \['x'\] \(allowed: a function"),
    ],
)
def test_invalid_job_is_rejected_with_field_value_and_allowed_values(name, value, message):
    with pytest.raises(JobError, match=message) as raised:
        job(**{name: value})
    assert "\n" not in str(raised.value)


def test_only_fixed_batching_limits_k_to_the_batch_size():
    assert job(batching="adaptive", accumulation_choices=(1, 16)).accumulation_choices == (1, 16)


def test_accumulation_choices_may_be_a_list():
    assert job(accumulation_choices=[1, 2, 8]).accumulation_choices == (1, 2, 8)


@pytest.mark.parametrize(
    ("goal", "metric", "arrived"),
    [
        ("min", 0.9, True),
        ("min", 1.0, True),
        ("min", 1.1, False),
        ("max", 1.1, True),
        ("max", 1.0, True),
        ("max", 0.9, False),
        ("min", math.nan, False),
        ("max", math.nan, False),
    ],
)
def test_target_is_reached_when_the_metric_meets_it(goal, metric, arrived):
    assert job(goal=goal, target=1.0).arrived(metric) is arrived


def test_a_job_without_a_target_never_arrives_and_commands_that_need_one_say_so():
    assert not job(target=None).arrived(0.0)
    with pytest.raises(JobError, match=r"bench batching: job 'job' has no target \(allowed: a job with a target\)"):
        job(target=None).required_target(where="bench batching")
    assert job(target=2.0).required_target(where="bench batching") == 2.0


def test_run_has_max_steps_times_batch_size_samples():
    assert job(max_steps=30, batch_size=8).total_samples == 240


# ------------------------------------------------------------------------------------------------- schedule

schedules = st.builds(WarmupCosine, warmup_frac=st.floats(0, 1), minimum_frac=st.floats(0, 1))


@given(schedules, st.floats(-1, 2))
def test_schedule_stays_between_zero_and_the_base_rate(schedule: WarmupCosine, progress: float):
    assert 0 <= schedule.factor(progress) <= 1


@given(schedules, st.floats(0, 1), st.floats(0, 1))
def test_schedule_rises_during_warmup_and_falls_afterwards(schedule, first, second):
    early, late = sorted((first, second))
    if late <= schedule.warmup_frac:
        assert schedule.factor(early) <= schedule.factor(late)
    elif early > schedule.warmup_frac:
        assert schedule.factor(early) >= schedule.factor(late) - 1e-12


@given(schedules)
def test_schedule_reaches_the_base_rate_after_warmup_and_its_floor_at_the_end(schedule: WarmupCosine):
    assert schedule.factor(schedule.warmup_frac) == 1
    if schedule.warmup_frac < 1:
        assert schedule.factor(1) == pytest.approx(schedule.minimum_frac, abs=1e-12)


@given(schedules, st.floats(1, 100), st.floats(-100, 0))
def test_progress_is_clamped_to_the_run(schedule, beyond, before):
    assert schedule.factor(beyond) == schedule.factor(1)
    assert schedule.factor(before) == schedule.factor(0)


@pytest.mark.parametrize(
    ("progress", "factor"),
    [(0.05, 0.5), (0.1, 1.0), (0.55, 0.1 + 0.9 * 0.5), (1.0, 0.1), (0.325, 0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5)))],
)
def test_schedule_at_known_points(progress, factor):
    assert WarmupCosine(warmup_frac=0.1, minimum_frac=0.1).factor(progress) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
@pytest.mark.parametrize("name", ["warmup_frac", "minimum_frac"])
def test_fraction_outside_0_to_1_is_rejected(name, value):
    with pytest.raises(JobError, match=rf"{name} is {value} \(allowed: 0 to 1\)"):
        WarmupCosine(**{name: value})
