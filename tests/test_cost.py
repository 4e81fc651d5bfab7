"""Tests of the paper's formulas at known points, and of their laws."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.cost_model.paper_equations import (
    Constraints,
    Weights,
    accumulated_gradient,
    checkpointed_activations,
    clipped,
    cost,
    gradient_step,
    kept_layers,
    net_speedup,
    optimal_accumulation,
    precision_savings,
    recomputation,
    stored_activations,
    total_memory,
)

positive = st.floats(1e-3, 1e6)
weights = st.builds(Weights, time=st.floats(0.1, 10), memory=st.floats(0, 10), energy=st.floats(0, 10))


# ------------------------------------------------------------------------------------------- cost, equation 3


def test_cost_of_the_baseline_is_the_sum_of_the_weights():
    assert cost(1.0, 1.0, 1.0, Weights(time=0.5, memory=0.3, energy=0.2)) == pytest.approx(1.0)


def test_default_cost_is_time():
    assert cost(0.7, 3.0, None, Weights()) == 0.7


def test_cost_is_the_weighted_sum_of_its_terms():
    assert cost(2.0, 3.0, 5.0, Weights(time=7.0, memory=11.0, energy=13.0)) == 2 * 7 + 3 * 11 + 5 * 13


@given(weights, positive, positive, positive, positive)
def test_cost_never_falls_if_one_of_its_terms_rises(given_weights, time, memory, energy, more):
    base = cost(time, memory, energy, given_weights)
    assert cost(time + more, memory, energy, given_weights) >= base
    assert cost(time, memory + more, energy, given_weights) >= base
    assert cost(time, memory, energy + more, given_weights) >= base


def test_weighted_energy_must_be_measured():
    with pytest.raises(ValueError, match="energy has a weight but was not measured"):
        cost(1.0, 1.0, None, Weights(energy=0.1))


@pytest.mark.parametrize(
    "values",
    [
        {"time": -1.0},
        {"memory": -0.1},
        {"energy": math.nan},
        {"time": math.inf},
        {"time": 0.0},
        {"time": 0.0, "memory": 0.0, "energy": 0.0},
    ],
)
def test_weights_must_be_finite_nonnegative_and_not_all_zero(values):
    with pytest.raises(ValueError, match="weights must be finite, not negative, and not all zero"):
        Weights(**values)


LIMITS = Constraints(target_loss=1.0, memory_budget=2.0, gradient_norm=3.0)


def test_constraints_include_their_limits():
    assert LIMITS.met(loss=1.0, memory=2.0, gradient_norm=3.0)


@pytest.mark.parametrize("name", ["loss", "memory", "gradient_norm"])
@pytest.mark.parametrize("value", [3.1, math.nan, math.inf])
def test_one_violated_constraint_is_enough(name, value):
    assert not LIMITS.met(**{"loss": 0.5, "memory": 0.5, "gradient_norm": 0.5, name: value})


@pytest.mark.parametrize("name", ["loss", "memory", "gradient_norm"])
@given(value=st.floats())
def test_omitted_constraint_always_holds(name, value):
    left_out = {"loss": "target_loss", "memory": "memory_budget", "gradient_norm": "gradient_norm"}[name]
    limits = Constraints(**{**dict.fromkeys(("target_loss", "memory_budget", "gradient_norm"), 1.0), left_out: None})
    assert limits.met(**{"loss": 0.5, "memory": 0.5, "gradient_norm": 0.5, name: value})


# --------------------------------------------------------------------------- accumulation, equations 4, 5 and 9


def test_accumulated_gradient_is_the_mean():
    assert accumulated_gradient([1.0, 2.0, 6.0]) == 3.0


@given(st.floats(-1e3, 1e3), st.integers(1, 9))
def test_equal_gradients_accumulate_to_themselves(gradient, k):
    assert accumulated_gradient([gradient] * k) == pytest.approx(gradient, rel=1e-12)


def test_gradient_step_goes_against_the_gradient():
    assert gradient_step(1.0, 2.0, 0.25) == 0.5


def test_optimal_k_has_the_most_throughput_per_byte():
    assert optimal_accumulation({1: 100.0, 2: 90.0, 4: 60.0}, {1: 10.0, 2: 6.0, 4: 5.0}) == 2


def test_smallest_k_wins_a_tie():
    assert optimal_accumulation({4: 50.0, 1: 100.0, 2: 100.0}, {4: 5.0, 1: 10.0, 2: 10.0}) == 1


@given(st.dictionaries(st.integers(1, 32), st.tuples(positive, positive), min_size=1))
def test_no_k_has_more_throughput_per_byte_than_the_optimal_one(table):
    throughput = {k: pair[0] for k, pair in table.items()}
    memory = {k: pair[1] for k, pair in table.items()}
    best = optimal_accumulation(throughput, memory)
    assert all(throughput[k] / memory[k] <= throughput[best] / memory[best] for k in table)


# ----------------------------------------------------------------------------- memory, equations 8 and 17 to 20


def test_accumulation_reduces_only_activation_memory():
    assert total_memory(10.0, 20.0, 40.0, 1) == 70.0
    assert total_memory(10.0, 20.0, 40.0, 4) == 40.0


@given(positive, positive, positive, st.integers(1, 100))
def test_memory_falls_with_k_but_never_below_model_and_optimizer(model, optimizer, activation, k):
    assert model + optimizer <= total_memory(model, optimizer, activation, k + 1)
    assert total_memory(model, optimizer, activation, k + 1) <= total_memory(model, optimizer, activation, k)


def test_16_bit_weights_and_gradients_halve_both():
    assert precision_savings(10.0, 6.0) == 8.0


def test_all_activations_are_stored_without_checkpointing():
    assert stored_activations([1.0, 2.0, 3.5]) == 6.5
    assert stored_activations([]) == 0


@pytest.mark.parametrize(("layers", "kept"), [(0, 0), (1, 1), (4, 2), (5, 3), (9, 3), (16, 4), (17, 5)])
def test_square_root_of_the_number_of_layers_is_kept(layers, kept):
    assert len(kept_layers(layers)) == kept
    assert checkpointed_activations(2.0, layers) == 2.0 * kept
    assert recomputation(3.0, layers) == 3.0 * (layers - kept)


@pytest.mark.parametrize(
    ("layers", "kept"), [(-1, ()), (0, ()), (1, (0,)), (2, (0, 1)), (4, (1, 3)), (9, (2, 5, 8)), (10, (2, 4, 7, 9))]
)
def test_kept_layers_are_the_expected_ones(layers, kept):
    assert kept_layers(layers) == kept


@given(st.integers(1, 2000))
def test_kept_layers_are_distinct_in_range_evenly_spaced_and_include_the_last(layers):
    kept = kept_layers(layers)
    assert len(set(kept)) == len(kept) == math.ceil(math.sqrt(layers))
    assert kept[-1] == layers - 1
    gaps = [second - first for first, second in zip((-1, *kept), kept, strict=False)]
    assert max(gaps) - min(gaps) <= 1
    assert sum(gaps) == layers


@given(positive, st.integers(1, 500))
def test_every_layer_is_either_kept_or_recomputed(layer, layers):
    kept, repeated = checkpointed_activations(layer, layers), recomputation(layer, layers)
    assert kept + repeated == pytest.approx(stored_activations([layer] * layers), rel=1e-9)


# ------------------------------------------------------------------------------------ clipping, equation 12


def test_gradient_within_the_limit_is_not_clipped():
    assert clipped(0.5, 1.0) == clipped(1.0, 1.0) == clipped(0.0, 1.0) == 1.0


@given(positive, positive)
def test_clipped_gradient_has_at_most_the_limit_as_its_norm(norm, limit):
    assert norm * clipped(norm, limit) == pytest.approx(min(norm, limit), rel=1e-12)
    assert 0 < clipped(norm, limit) <= 1


# ----------------------------------------------------------------------------------- speed-up, equation 21


def test_net_speedup_subtracts_the_cost_of_recomputation():
    assert net_speedup(2.0, 0.25) == 1.6


@given(positive, st.floats(0, 10))
def test_net_speedup_without_recomputation_is_the_gain_and_an_upper_bound(gain, overhead):
    assert net_speedup(gain, 0.0) == gain
    assert net_speedup(gain, overhead) <= gain
