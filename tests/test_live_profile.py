"""What is made of a live run's timed steps."""

from __future__ import annotations

import pytest

from autotune import Plan, Precision
from autotune.profiling.live_profile import Timed, _Clock

KINDS = {"a": ("block", 8), "b": ("block", 8), "c": ("head", 2)}


def timed(precision: Precision, seconds: tuple[float, float, float]) -> Timed:
    """Return a step in which units a, b and c ran forward for some seconds."""
    plan = Plan(precision=dict.fromkeys(KINDS, precision))
    return Timed(plan=plan, batch_bytes=1, seconds={("forward", 1 + 2 * n): s for n, s in enumerate(seconds)})


def test_a_precision_does_the_same_to_all_units_of_a_kind() -> None:
    """One of two like units was twice as fast in 16 bits, the other slower: by chance, as together they were slower."""
    steps = [timed(Precision.INHERIT, (1.0, 2.0, 4.0)), timed(Precision.BF16, (0.5, 3.1, 3.0))]
    clock = _Clock(tuple(KINDS), [], steps, 1, KINDS)
    found = [clock.seconds("forward", segment, "bf16/save") for segment in (1, 3, 5)]
    assert found == pytest.approx([1.2, 2.4, 3.0])
    assert [clock.seconds("forward", segment, "inherit/save") for segment in (1, 3, 5)] == [1.0, 2.0, 4.0]
