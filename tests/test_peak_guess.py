"""Tests of peak estimates for unmeasured plans from measured ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from known_problem import known_cost, known_peak
from test_deciders import known_window, observe
from test_env import SPACE

from autotune import Plan, Precision, Storage
from autotune.agents.optuna_search import OptunaSearch
from autotune.agents.peak_guess import PeakGuess
from autotune.units import Unit

UNITS = tuple(
    Unit(name=f"blocks.{i}", kind="Block", recomputable=True, parameter_names=(), num_parameters=10) for i in range(6)
)
WIDE = replace(SPACE, units=UNITS, accumulation_choices=(1, 2))


def share(plan: Plan, *, bend: float = 0.0) -> float:
    """Return the peak as a share of the budget: a sum over units plus a nonlinear term."""
    held = sum(
        (1.0 if plan.precision_of(unit.name) is Precision.FP32 else 0.6)
        * (1.0 if plan.storage_of(unit.name) is Storage.SAVE else 0.4)
        for unit in UNITS
    )
    return 0.3 + 0.25 * held / plan.accumulation_steps + bend * (held % 1.0)


def told(draws: int, *, bend: float = 0.0) -> PeakGuess:
    guess, draw = PeakGuess(WIDE), np.random.default_rng(0)
    for _ in range(draws):
        plan = WIDE.sample(draw)
        guess.tell(plan, share(plan, bend=bend))
    return guess


def test_every_plan_may_fit_before_any_measurement() -> None:
    assert PeakGuess(WIDE).may_fit(WIDE.baseline())
    guess = PeakGuess(WIDE)
    guess.tell(WIDE.baseline(), 1.5)
    assert not guess.may_fit(WIDE.baseline())
    assert guess.may_fit(WIDE.baseline().changed(accumulation_steps=2))


@pytest.mark.parametrize("bend", [0.0, 0.1])
def test_predicted_plans_rarely_exceed_the_budget_and_few_fitting_plans_are_excluded(bend: float) -> None:
    guess, draw = told(80, bend=bend), np.random.default_rng(1)
    plans = [WIDE.sample(draw) for _ in range(500)]
    fits = np.array([share(plan, bend=bend) <= 1.0 for plan in plans])
    may = np.array([guess.may_fit(plan) for plan in plans])
    assert 0.1 < fits.mean() < 0.9
    assert (may & ~fits).sum() < 0.35 * (~fits).sum()
    assert (fits & ~may).sum() < 0.05 * fits.sum()


def test_two_measured_plans_of_one_k_keep_their_own_verdicts() -> None:
    guess = PeakGuess(WIDE)
    for plan in (WIDE.baseline(), WIDE.leanest().changed(accumulation_steps=1)):
        guess.tell(plan, share(plan))
    assert not guess.may_fit(WIDE.baseline())
    assert guess.may_fit(WIDE.leanest().changed(accumulation_steps=1))


@pytest.mark.slow
def test_search_that_knows_all_nearby_plans_exceeds_the_budget_less_often(tmp_path: Path) -> None:
    search, over, known = OptunaSearch(SPACE, tmp_path, 1), list[bool](), set[Plan]()
    budget = int(0.6 * known_peak(SPACE.baseline()))
    while len(over) < 160:
        plan = search.ask()
        window = known_window(budget)(plan, 3)
        if plan not in known:
            over.append(window.failure is not None)
        known.add(plan)
        search.tell(plan, observe(plan, window, budget=budget), 4.0 if window.failure else known_cost(plan))
    search.close()
    assert sum(over[80:]) < 0.7 * sum(over[:80])
