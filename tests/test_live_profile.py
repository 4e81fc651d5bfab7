"""Tests of profiles computed from a live run's timed steps."""

from __future__ import annotations

import pytest

from autotune import Plan, Precision
from autotune.profiling.live_profile import _with_batch_of
from autotune.profiling.profile_assembly import seconds_by_choice
from autotune.profiling.step_record import TimedStep
from autotune.units import Unit

UNITS = [
    Unit(name=name, kind=kind, recomputable=True, parameter_names=(), num_parameters=8)
    for name, kind in [("a", "block"), ("b", "block"), ("c", "head")]
]
CALLS = [unit.name for unit in UNITS]


def timed(precision: Precision, seconds: tuple[float, float, float]) -> TimedStep:
    """Return a step in which units a, b and c ran forward for some seconds."""
    plan = Plan(precision=dict.fromkeys(CALLS, precision))
    return TimedStep(plan=plan, batch_bytes=1, seconds={("forward", 1 + 2 * n): s for n, s in enumerate(seconds)})


def test_units_of_one_kind_share_the_effect_of_a_precision() -> None:
    """One of two equal units happened to be twice as fast in 16 bits; together they were slower."""
    steps = [timed(Precision.INHERIT, (1.0, 2.0, 4.0)), timed(Precision.BF16, (0.5, 3.1, 3.0))]
    found = seconds_by_choice(steps, CALLS, 1, UNITS)
    assert [found["forward", segment, "bf16/save"] for segment in (1, 3, 5)] == pytest.approx([1.2, 2.4, 3.0])
    assert [found["forward", segment, "inherit/save"] for segment in (1, 3, 5)] == [1.0, 2.0, 4.0]


def passes(k: int, size: int, *, launch: float = 2.0, per_byte: float = 0.01, update: float = 5.0) -> TimedStep:
    """Return a step whose k micro-batches each take a time of their own, beside one for each byte."""
    seconds = k * launch + per_byte * size
    return TimedStep(
        plan=Plan(accumulation_steps=k, precision=dict.fromkeys(CALLS, Precision.INHERIT)),
        batch_bytes=size,
        seconds={("forward", 1): 0.3 * seconds, ("backward", 1): 0.7 * seconds, ("update", -1): update},
    )


def test_times_of_small_batches_are_scaled_by_what_launching_and_bytes_take() -> None:
    steps = [passes(1, 100), passes(4, 1000), passes(8, 1600)]
    for found, step in zip(_with_batch_of(1600, steps, []), steps, strict=True):
        expected = passes(step.plan.accumulation_steps, 1600)
        assert found.batch_bytes == 1600
        assert dict(found.seconds) == pytest.approx(dict(expected.seconds))


def test_steps_that_do_not_tell_what_launching_takes_are_scaled_by_bytes_or_as_others_tell() -> None:
    alone = [passes(1, 400), passes(2, 800)]
    by_bytes = _with_batch_of(800, alone, [])
    assert by_bytes[0].seconds["forward", 1] == pytest.approx(2 * alone[0].seconds["forward", 1])
    assert by_bytes[0].seconds["update", -1] == alone[0].seconds["update", -1]
    told = _with_batch_of(800, alone, [passes(1, 100), passes(1, 1600)])
    assert told[0].seconds["forward", 1] == pytest.approx(passes(1, 800).seconds["forward", 1])


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_times_that_do_not_grow_with_bytes_stay(seconds: float) -> None:
    steps = [passes(1, 100, launch=seconds, per_byte=0.0), passes(1, 800, launch=seconds, per_byte=0.0)]
    found = _with_batch_of(800, steps, [])
    assert found[0].seconds["backward", 1] == pytest.approx(0.7 * seconds)
