"""Tests of statistics: intervals and tests against their laws and independent computations."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from autotune.stats import (
    censored_median,
    clustered_mean_interval,
    mean_interval,
    mean_interval_bca,
    mean_upper_bound,
    mean_with_interval,
    median_interval,
    paired_ratio,
    rank_correlation,
    sign_flip_p_value,
    stratified_mean_interval,
    total_ratio_interval,
)


def test_mean_interval_is_student_t_and_a_constant_gives_a_point() -> None:
    values = [1.0, 2.0, 4.0, 3.0]
    expected = stats.t.interval(0.95, 3, loc=2.5, scale=stats.sem(values))
    assert mean_interval(values, 0.95) == pytest.approx(expected)
    assert mean_interval([2.0, 2.0], 0.95) == (2.0, 2.0)
    assert mean_upper_bound(values, 0.95) == pytest.approx(2.5 + stats.t.ppf(0.95, 3) * stats.sem(values))


def test_bca_interval_follows_a_skew_that_the_student_t_interval_ignores() -> None:
    values = [0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 2.0, 3.0]
    found, student = mean_interval_bca(values, 0.95), mean_interval(values, 0.95)
    assert found is not None
    mean = sum(values) / len(values)
    assert found[1] - mean > 1.5 * (mean - found[0])
    assert student[1] - mean == pytest.approx(mean - student[0])
    assert mean_interval_bca(values, 0.95) == found
    assert mean_interval_bca([1.0, 2.0], 0.95) is None
    assert mean_interval_bca([1.0] * 5, 0.95) is None


def test_sign_flip_test_is_exact_for_few_values() -> None:
    assert sign_flip_p_value([-1.0, -2.0, -3.0]) == 0.25
    assert sign_flip_p_value([-1.0] * 10) == pytest.approx(2 / 2**10)
    assert sign_flip_p_value([1.0, -1.0]) == 1.0
    assert sign_flip_p_value([-1.0] * 14) == pytest.approx(2 / 2**14)


def test_sign_flip_test_of_many_values_is_never_zero() -> None:
    assert 0 < sign_flip_p_value([-1.0 - number / 100 for number in range(40)]) <= 2 / 20_000


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12))
def test_interval_of_one_stratum_is_student_t(values: list[float]) -> None:
    assert stratified_mean_interval([values], 0.95)[1:] == pytest.approx(mean_interval(values, 0.95), abs=1e-9)


def test_stratified_interval_has_its_coverage_if_strata_differ_in_variance() -> None:
    generator, covered = np.random.default_rng(0), 0
    for _ in range(1000):
        strata = [generator.normal(mean, spread, 8).tolist() for mean, spread in ((-1.0, 0.01), (0.5, 0.3), (2.0, 1.0))]
        _, low, high = stratified_mean_interval(strata, 0.95)
        covered += low <= 0.5 <= high
    assert 925 <= covered <= 975


def test_clustered_interval_contains_the_mean_and_widens_if_clusters_agree() -> None:
    generator = np.random.default_rng(0)
    job = np.repeat(np.arange(20), 10)
    alone = generator.standard_normal((4, 200))
    common = np.repeat(generator.standard_normal(20), 10)[None] + 0.0 * alone
    widths = []
    for values in (alone, common):
        low, high = clustered_mean_interval(values, job, resamples=300)
        assert low <= values.mean() <= high
        widths.append(high - low)
    assert widths[1] > 2 * widths[0]
    seeds = np.repeat(np.array([[-1.0], [1.0]]), 200, axis=1)
    low, high = clustered_mean_interval(seeds, job, resamples=300)
    assert (low, high) == (-1.0, 1.0)
    assert clustered_mean_interval(np.full((3, 200), 0.5), job, resamples=50) == (0.5, 0.5)
    few = clustered_mean_interval(alone, job, resamples=300, confidence=0.5)
    assert few[1] - few[0] < widths[0]


def test_median_interval_of_equal_values_is_a_point_and_starts_are_resampled() -> None:
    assert median_interval([1.0] * 5) == (1.0, 1.0)
    # Two different starts are two values, however often each was measured.
    assert median_interval([1.0] * 5 + [2.0] * 5, starts=2) == (1.0, 2.0)
    assert median_interval([1.0, 1.1, 1.2] * 20)[0] > 1.0


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=2, max_size=8))
def test_paired_ratio_has_its_median_within_its_interval(pairs: list[tuple[float, float]]) -> None:
    own, others = zip(*pairs, strict=True)
    found = paired_ratio(own, others)
    ratios = [first / second for first, second in pairs]
    assert found["ratio_median"] == statistics.median(ratios)
    assert found["ratio_total"] == sum(own) / sum(others)
    low, high = found["ratio_ci95"]
    assert min(ratios) * (1 - 1e-12) <= low <= found["ratio_median"] * (1 + 1e-12)
    assert found["ratio_median"] * (1 - 1e-12) <= high <= max(ratios) * (1 + 1e-12)


def test_ratio_of_proportional_totals_is_a_point() -> None:
    assert total_ratio_interval([2.0, 4.0, 8.0], [1.0, 2.0, 4.0]) == (2.0, 2.0)
    low, high = total_ratio_interval([2.0, 4.0, 9.0], [1.0, 2.0, 4.0])
    assert low <= 15 / 7 <= high


def test_interval_of_a_single_value_is_a_point() -> None:
    assert mean_with_interval([2.0]) == {"mean": 2.0, "ci95": [2.0, 2.0], "values": [2.0]}
    assert mean_with_interval([1.0, 3.0])["ci95"] == list(mean_interval([1.0, 3.0]))


def test_median_is_known_if_most_values_are() -> None:
    assert censored_median([10, 20, None]) == 20
    assert censored_median([10, None, None]) is None
    assert censored_median([10, None]) is None


def test_rank_correlation_ignores_scale() -> None:
    assert rank_correlation([1, 2, 3], [10, 100, 1000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
