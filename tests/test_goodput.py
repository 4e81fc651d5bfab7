"""Tests of goodput: the progress per sample at a batch size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.cost_model.goodput import efficiency, goodput

positive = st.floats(1e-2, 1e5)


@given(positive, st.floats(0, 1e6))
def test_reference_batch_has_efficiency_1(batch, noise_scale):
    assert efficiency(batch, noise_scale, batch) == 1


@given(positive, positive, st.floats(0, 1e6), positive)
def test_efficiency_is_positive_and_never_rises_with_the_batch(first, second, noise_scale, reference):
    small, large = sorted((first, second))
    assert efficiency(small, noise_scale, reference) >= efficiency(large, noise_scale, reference) > 0


@given(positive, st.floats(1, 1e3), st.floats(0, 1e5), st.floats(0, 1e5))
def test_more_noise_raises_the_value_of_a_larger_batch(reference, factor, first, second):
    calm, noisy = sorted((first, second))
    batch = reference * factor
    assert efficiency(batch, noisy, reference) >= efficiency(batch, calm, reference) * (1 - 1e-12)


def test_doubling_the_batch_halves_efficiency_without_noise():
    assert efficiency(128, 0.0, 64) == 0.5


def test_efficiency_at_a_known_point():
    assert efficiency(256, 128.0, 64) == 0.5


@given(positive, positive, st.floats(0, 1e6), positive)
def test_goodput_is_throughput_times_efficiency(throughput, batch, noise_scale, reference):
    expected = throughput * efficiency(batch, noise_scale, reference)
    assert goodput(throughput, batch, noise_scale, reference) == expected


def test_goodput_at_the_reference_batch_is_throughput():
    assert goodput(100.0, 64, 50.0, 64) == pytest.approx(100.0)
