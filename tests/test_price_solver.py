"""Tests of planning with a price per byte: near the optimum, within the budget and monotone in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.cost_model.cost_arrays import CostArrays
from autotune.cost_model.price_solver import PriceSolver, make_chains
from autotune.cost_model.solver import SAFETY_MARGIN, smallest, solve
from autotune.simulator.random_jobs import Shape, draw_profile


def drawn(seed: int, units: int = 6):
    return draw_profile(np.random.default_rng(seed), Shape(units=units))


def test_plans_fit_and_are_close_to_the_exact_optimum() -> None:
    profiles = [drawn(seed, units) for seed in range(12) for units in (2, 8)]
    arrays = CostArrays(profiles)
    jobs = np.arange(len(profiles))
    least = np.array([smallest(profile).peak_bytes for profile in profiles])
    most = np.array([solve(profile).peak_bytes for profile in profiles])
    gaps = []
    for tightness in (0.05, 0.4, 0.8):
        budgets = least + tightness * np.maximum(most - least, 0)
        plans, fits = PriceSolver(arrays).solve(jobs, budgets)
        assert (arrays.peak_bytes(plans)[fits] <= budgets[fits]).all()
        assert fits.mean() > 0.9
        seconds = arrays.seconds_per_step(plans)
        for job in jobs[fits]:
            exact = solve(profiles[job], int(budgets[job] / (1 - SAFETY_MARGIN)) + 1).seconds_per_step
            gaps.append(seconds[job] / exact - 1)
    assert min(gaps) > -1e-9
    assert np.median(gaps) < 0.01
    assert np.quantile(gaps, 0.95) < 0.05


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.floats(0.3, 1.0), st.floats(1.0, 2.0))
def test_larger_budget_never_gives_a_slower_plan(seed: int, share: float, factor: float) -> None:
    profile = drawn(seed)
    arrays = CostArrays([profile])
    budget = share * solve(profile).peak_bytes + smallest(profile).peak_bytes * (1 - share)
    both = np.array([budget, budget * factor])
    plans, fits = PriceSolver(arrays).solve(np.zeros(2, dtype=np.int64), both)
    assert fits[1] or not fits[0]
    if fits.all():
        small, large = arrays.seconds_per_step(plans)
        assert large <= small * (1 + 1e-12)


def test_unreachable_budget_gives_the_leanest_plan_and_reports_it() -> None:
    arrays = CostArrays([drawn(0)])
    plans, fits = PriceSolver(arrays).solve(np.array([0]), np.array([1.0]))
    assert not fits[0]
    assert arrays.peak_bytes(plans)[0] <= smallest(drawn(0)).peak_bytes * 1.2


def test_k_with_the_most_progress_per_second_is_chosen() -> None:
    profile = drawn(1)
    arrays = CostArrays([profile])
    worth = np.array([[1.0, 1.0, 100.0]])
    plans, _ = PriceSolver(arrays).solve(np.array([0]), np.array([np.inf]), worth=worth)
    assert plans.k[0] == 2


def test_links_are_ordered_by_bytes_per_second_and_dominated_choices_are_skipped() -> None:
    # One unit with a fast and large choice, a dominated one, an intermediate one and a lean one.
    seconds = np.array([[[1.0, 2.0, 2.0, 4.0]]])
    size = np.array([[[100.0, 100.0, 40.0, 10.0]]])
    chains = make_chains(seconds, size, np.ones((1, 1, 4), dtype=bool))
    taken = [int(chains.choices(np.array([0]), np.array([links]))[0, 0]) for links in range(4)]
    assert taken == [0, 2, 3, 3]
    assert chains.count.tolist() == [2]


@pytest.mark.parametrize("length", [0.5, 2.0])
def test_plans_for_longer_sequences_account_for_their_length(length: float) -> None:
    profile = drawn(3)
    arrays = CostArrays([profile])
    budget = np.array([1.3 * smallest(profile).peak_bytes * max(length, 1.0)])
    plans, fits = PriceSolver(arrays).solve(np.array([0]), budget, length)
    assert fits[0]
    assert arrays.peak_bytes(plans, length)[0] <= budget[0]
