"""Tests of the learning rate: its schedule over time and its scaling with the effective batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune import WarmupCosine
from autotune.cost_model.learning_rate import batch_factor


@given(st.floats(0, 1), st.floats(0.01, 0.9), st.floats(1e-5, 10), st.floats(0, 1), st.integers(10, 10_000))
def test_rate_follows_equation_10(share, warmup_share, base, minimum_share, total):
    step, warmup, minimum = share * total, warmup_share * total, minimum_share * base
    if step <= warmup:
        expected = base * step / warmup
    else:
        angle = math.pi * (step - warmup) / (total - warmup)
        expected = minimum + (base - minimum) * (1 + math.cos(angle)) / 2
    schedule = WarmupCosine(warmup_frac=warmup_share, minimum_frac=minimum_share)
    assert base * schedule.factor(step / total) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("step", "rate"), [(0, 0.0), (5, 0.5), (10, 1.0), (55, 0.55), (100, 0.1), (110, 0.1)])
def test_rate_at_known_steps(step, rate):
    assert WarmupCosine(warmup_frac=0.1, minimum_frac=0.1).factor(step / 100) == pytest.approx(rate)


def test_rate_begins_at_its_base_without_warmup():
    assert WarmupCosine(warmup_frac=0).factor(0) == 1


def test_default_warmup_is_5_percent_and_default_floor_a_tenth():
    assert WarmupCosine() == WarmupCosine(warmup_frac=0.05, minimum_frac=0.1)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_rate_follows_a_batch_four_times_as_large(rule, factor):
    assert batch_factor(rule, 256, 64) == factor


@given(st.sampled_from(["linear", "sqrt", "none"]), st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 1000))
def test_factors_multiply_along_a_chain_of_batches_and_are_1_at_the_base(rule, first, second, third):
    assert batch_factor(rule, first, first) == 1
    product = batch_factor(rule, second, first) * batch_factor(rule, third, second)
    assert product == pytest.approx(batch_factor(rule, third, first), rel=1e-12)


@given(st.integers(2, 1000), st.integers(1, 1000))
def test_linear_rule_raises_the_rate_most_for_a_larger_batch(times, base):
    linear, sqrt, none = (batch_factor(rule, times * base, base) for rule in ("linear", "sqrt", "none"))
    assert linear > sqrt > none == 1
