"""Tests of profiles computed from a live run's timed steps."""

from __future__ import annotations

import pytest

from autotune import Plan, Precision
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
