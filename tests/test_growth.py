"""Tests of the law by which memory grows with batch size: it never lies below measured memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.plan import Plan
from autotune.profiling.attribution import Attribution
from autotune.profiling.memory_scaling import Growth, Scaling

coefficients = st.floats(0.0, 1e3)


def seen(*saved: float) -> Attribution:
    values = tuple(int(value) for value in saved)
    none = tuple((0, 0) for _ in values)
    return Attribution(
        saved=values, gradients=values, forward_peaks=none, backward_peaks=none, boundaries={}, update_peak=0
    )


def learnt(law: np.polynomial.Polynomial, small: int, large: int) -> Growth:
    growth, plan = Growth(), Plan(accumulation_steps=1)
    for size in (small, large):
        growth.note(plan, size, seen(law(size)))
    return growth


@given(coefficients, coefficients, coefficients, st.integers(100, 1000), st.floats(1.6, 6.0), st.floats(1.0, 2.0))
def test_any_polynomial_with_nonnegative_coefficients_is_bounded_beyond_the_larger_size(
    constant: float, linear: float, square: float, small: int, ratio: float, further: float
) -> None:
    law = np.polynomial.Polynomial([constant * 100, linear, square])
    large = int(small * ratio)
    growth = learnt(law, small, large)
    assert law(large * further) <= law(large) * growth.scaling.at(further) * 1.001 + 10
    assert law(large) <= law(small) * (large / small) ** growth.within * 1.001 + 10


@given(coefficients, coefficients, coefficients, st.integers(100, 1000), st.floats(1.2, 6.0), st.floats(0.01, 1.0))
def test_any_polynomial_with_nonnegative_coefficients_is_bounded_below_the_larger_size(
    constant: float, linear: float, square: float, small: int, ratio: float, length: float
) -> None:
    law = np.polynomial.Polynomial([constant * 100, linear, square])
    large = int(small * ratio)
    scaling = learnt(law, small, large).scaling
    assert law(large * length) <= law(large) * scaling.at(length) * 1.001 + 10
    assert scaling.at(length) <= 1


def test_memory_does_not_shrink_before_a_smaller_batch_was_traced() -> None:
    assert Scaling().at(0.1) == Scaling().at(1.0) == 1.0
    growth, plan = Growth(), Plan(accumulation_steps=1)
    growth.note(plan, 1000, seen(1000))
    assert growth.told_by(plan, 800)
    growth.note(plan, 800, seen(800))
    assert growth.scaling.at(0.9) == pytest.approx(0.9)
    assert not growth.told_by(plan, 700)
    assert growth.told_by(plan, 500)


def test_memory_that_does_not_depend_on_the_batch_is_kept() -> None:
    half_constant = learnt(np.polynomial.Polynomial([100_000, 100]), 200, 1000).scaling
    assert half_constant.at(0.6) == pytest.approx(0.8, rel=0.01)
    assert half_constant.at(0.0) == half_constant.kept_share >= 0.5


def test_proportional_growth_is_distinguished_from_faster_growth() -> None:
    line = np.polynomial.Polynomial([0, 1000])
    assert learnt(line, 100, 400).within == pytest.approx(1.1, abs=0.01)
    assert 1.1 < learnt(line, 100, 160).scaling.at(1.1) < 1.14
    assert learnt(np.polynomial.Polynomial([0, 0, 10]), 100, 400).within == 2.0


def test_steepest_part_decides() -> None:
    growth, plan = Growth(), Plan(accumulation_steps=1)
    growth.note(plan, 100, seen(100_000, 10_000))
    growth.note(plan, 200, seen(200_000, 40_000))
    assert (growth.within, growth.scaling.square_share) == (2.0, 1.0)


def test_similar_sizes_and_different_plans_give_no_information() -> None:
    growth, plan = Growth(), Plan(accumulation_steps=1)
    growth.note(plan, 100, seen(1000))
    assert not growth.told_by(plan, 105)
    assert not growth.told_by(plan.changed(accumulation_steps=2), 200)
    assert growth.told_by(plan, 200)
    growth.note(plan, 120, seen(1200))
    assert growth.within == 2.0
