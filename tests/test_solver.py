"""Tests of the exact solver against brute force, and of its laws."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.agents.planner import close_plans, densest_plan, greedy_plan, offering
from autotune.agents.search_methods import METHODS
from autotune.choices import COMPILED_STORAGES, DEFAULT_STORAGES, STORAGES
from autotune.cost_model import choice_program
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.paper_equations import Weights
from autotune.cost_model.profile import Profile, Segment, choice_name
from autotune.cost_model.solver import (
    SAFETY_MARGIN,
    Goal,
    fastest_uniform,
    pareto_front,
    smallest,
    solve,
    solve_each,
    with_shadow_price,
)
from autotune.cost_model.time_model import seconds_per_step
from autotune.errors import BudgetError
from autotune.plan import Plan, Precision
from autotune.simulator.random_jobs import Shape, draw_profile

ALL = (Precision.FP32, Precision.BF16, Precision.FP16)
SHARES = (1.0, 0.75, 0.55, 0.4, 0.3)
seeds = st.integers(0, 2**32 - 1)


def drawn(seed: int, units: int, **shape: object) -> Profile:
    return draw_profile(np.random.default_rng(seed), Shape(units=units, precisions=ALL, **shape))


def everything(profile: Profile) -> np.ndarray:
    """Return predicted seconds and peak of every plan of a profile."""
    space = profile.space
    plans = (space.decode(indices) for indices in itertools.product(*(range(size) for size in space.sizes)))
    return np.array([(seconds_per_step(profile, plan), peak_bytes(profile, plan)) for plan in plans])


def assert_exact(profile: Profile) -> None:
    table = everything(profile)
    baseline = peak_bytes(profile, profile.space.baseline())
    for share in SHARES:
        budget = int(share * baseline)
        fitting = table[table[:, 1] <= budget * (1 - SAFETY_MARGIN)]
        if len(fitting) == 0:
            with pytest.raises(BudgetError, match="at least"):
                solve(profile, budget)
            continue
        found = solve(profile, budget)
        assert found.peak_bytes == peak_bytes(profile, found.plan) <= budget
        assert found.seconds_per_step == pytest.approx(fitting[:, 0].min(), rel=1e-9)
    assert smallest(profile).peak_bytes == table[:, 1].min()


@pytest.mark.parametrize("seed", range(12))
def test_optimum_matches_brute_force(seed: int):
    assert_exact(drawn(seed, 1 + seed % 2, identical=seed % 3 == 0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_optimum_matches_brute_force_up_to_five_units(seed: int):
    # An embedding and a head are added to the recomputable units.
    assert_exact(drawn(1000 + seed, 1 + seed % 3, identical=seed % 4 == 0))


def test_where_the_fastest_choices_fit_no_program_is_solved(monkeypatch: pytest.MonkeyPatch):
    profile = drawn(3, 3)
    found = solve(profile)
    monkeypatch.setattr(choice_program, "milp", None)
    monkeypatch.setattr(choice_program, "linprog", None)
    assert solve(profile, 2 * found.peak_bytes) == found
    with pytest.raises(TypeError):
        solve(profile, int(0.7 * found.peak_bytes))


def timed_alike(profile: Profile, seconds: float) -> Profile:
    """Return a profile in which every choice takes as long."""

    def alike(segment: Segment) -> Segment:
        if segment.unit is None:
            return segment
        costs = {name: replace(cost, forward_s=seconds, backward_s=0.0) for name, cost in segment.costs.items()}
        return replace(segment, costs=costs)

    tables = tuple(replace(table, segments=tuple(map(alike, table.segments))) for table in profile.tables)
    return replace(profile, tables=tables, uniform_tables={})


def test_of_choices_that_take_as_long_one_that_needs_more_is_not_chosen():
    profile = timed_alike(drawn(0, 2), 1.0)
    plan = solve(profile).plan
    for segment in profile.tables[0].segments:
        if segment.unit is not None:
            chosen = choice_name(plan.precision_of(segment.unit), plan.storage_of(segment.unit))
            most = max(cost.saved_bytes for cost in segment.costs.values())
            assert segment.costs[chosen].saved_bytes < most


def test_objectives_that_are_zero_everywhere_have_an_optimum():
    profile = timed_alike(drawn(0, 2), 0.0)
    goal = Goal(weights=Weights(time=0.0, energy=1.0))
    assert solve(profile, int(1.01 * smallest(profile).peak_bytes), goal).gap == 0.0


@settings(max_examples=20)
@given(seeds, st.floats(0.3, 0.9), st.floats(1.0, 1.5))
def test_larger_budget_never_has_a_slower_optimum(seed: int, share: float, more: float):
    profile = drawn(seed, 4)
    budget = int(share * peak_bytes(profile, profile.space.baseline()))
    try:
        tight = solve(profile, budget)
    except BudgetError:
        return
    assert solve(profile, int(budget * more) + 1).objective <= tight.objective * (1 + 1e-6)


@settings(max_examples=10)
@given(seeds)
def test_pareto_front_falls_from_the_smallest_plan_to_the_fastest(seed: int):
    profile = drawn(seed, 4)
    front = pareto_front(profile, points=6)
    assert front[0].peak_bytes <= smallest(profile).peak_bytes * (1 + 2 * SAFETY_MARGIN)
    assert front[-1].seconds_per_step == pytest.approx(solve(profile).seconds_per_step, rel=1e-6)
    assert all(
        one.seconds_per_sample > two.seconds_per_sample and one.peak_bytes < two.peak_bytes
        for one, two in itertools.pairwise(front)
    )


def test_unreachable_budget_error_names_the_smallest_reachable_one():
    profile = drawn(1, 3)
    with pytest.raises(
        BudgetError, match=r"the smallest plan \(k=.*\) needs more \(allowed: at least \d+ bytes"
    ) as raised:
        solve(profile, profile.static_bytes)
    needed = int(str(raised.value).split("at least ")[1].split()[0])
    assert solve(profile, needed).peak_bytes <= needed


def test_memory_can_be_weighted_instead_of_bounded():
    profile = drawn(2, 4)
    fast = solve(profile)
    lean = solve(profile, goal=Goal(weights=Weights(time=0.1, memory=1.0)))
    assert lean.peak_bytes < fast.peak_bytes
    assert lean.seconds_per_step >= fast.seconds_per_step


def test_price_of_memory_is_the_time_saved_by_more_memory():
    profile = drawn(4, 6)
    budget = int(0.5 * (smallest(profile).peak_bytes + solve(profile).peak_bytes))
    priced = with_shadow_price(profile, solve(profile, budget), budget)
    assert priced.shadow_price >= 0
    free = with_shadow_price(profile, solve(profile), 10**12)
    assert free.shadow_price == 0


def test_small_noise_scale_lowers_the_value_of_a_large_batch_under_adaptive_batching():
    profile = drawn(6, 3, batching="adaptive")
    assert solve(profile, goal=Goal(noise_scale=1e-3)).plan.accumulation_steps == 1
    assert solve(profile, goal=Goal(noise_scale=1e9)).objective <= solve(profile, goal=Goal(noise_scale=1e-3)).objective


@settings(max_examples=20)
@given(seeds, st.sampled_from(SHARES))
def test_greedy_plan_fits_and_is_never_better_than_exact(seed: int, share: float):
    profile = drawn(seed, 4)
    budget = int(share * peak_bytes(profile, profile.space.baseline()))
    try:
        plan = greedy_plan(profile, budget, Goal())
    except BudgetError:
        return
    assert peak_bytes(profile, plan) <= budget
    assert seconds_per_step(profile, plan) >= solve(profile, budget).seconds_per_step * (1 - 1e-9)


@settings(max_examples=20)
@given(seeds, st.sampled_from(SHARES))
def test_greedy_plan_leaves_out_what_could_not_be_profiled(seed: int, share: float) -> None:
    profile = drawn(seed, 4)
    baseline = profile.space.baseline()

    def kept(unit: str, choice: str) -> bool:
        usual = choice_name(baseline.precision_of(unit), baseline.storage_of(unit))
        return choice == usual or random.Random(f"{seed} {unit} {choice}").random() < 0.6

    left = profile.offering(kept)
    with contextlib.suppress(BudgetError):
        plan = greedy_plan(left, int(share * peak_bytes(left, baseline)), Goal())
        # What could not be profiled has no predicted time.
        assert seconds_per_step(left, plan) > 0


@settings(max_examples=20)
@given(seeds, st.sampled_from(SHARES), st.sampled_from(["fixed", "adaptive"]))
def test_densest_plan_has_the_most_samples_per_second_and_byte_of_the_k_that_fit(
    seed: int, share: float, batching: str
) -> None:
    profile = drawn(seed, 4, batching=batching)
    baseline = profile.space.baseline()
    plans = [baseline.changed(accumulation_steps=k) for k in profile.accumulation_choices]
    budget = int(share * peak_bytes(profile, baseline))
    fitting = [plan for plan in plans if peak_bytes(profile, plan) <= budget * (1 - SAFETY_MARGIN)]
    if not fitting:
        with pytest.raises(BudgetError, match="fit at no k"):
            densest_plan(profile, budget)
        return

    def density(plan: Plan) -> float:
        samples = profile.batch_size * (plan.accumulation_steps if batching == "adaptive" else 1)
        return samples / seconds_per_step(profile, plan) / peak_bytes(profile, plan)

    found = densest_plan(profile, budget)
    assert found in fitting
    assert density(found) == pytest.approx(max(map(density, fitting)))
    assert METHODS["k-optimal"].plans(profile, budget, Goal()) == [found]


def test_planner_proposes_the_optimum_first():
    profile = drawn(7, 4)
    budget = int(0.6 * peak_bytes(profile, profile.space.baseline()))
    assert close_plans(profile, budget, Goal())[0] == solve(profile, budget).plan
    solutions = solve_each(profile, budget)
    close = [solution.plan for solution in solutions if solution.objective <= 1.1 * solutions[0].objective]
    # Plans predicted to be much slower are not measured, because they could win only by noise.
    uniform = fastest_uniform(profile, budget)
    assert set(close_plans(profile, budget, Goal())) <= {*close, uniform.plan if uniform else close[0]}
    assert [plan for plan in close_plans(profile, budget, Goal()) if plan in close] == close
    assert METHODS["greedy"].plans(profile, budget, Goal()) == [greedy_plan(profile, budget, Goal())]


def test_best_plan_with_the_usual_storages_is_measured_beside_one_with_further_storages():
    compared = 0
    for seed in range(12):
        profile = drawn(seed, 6, storages=STORAGES)
        budget = int(0.4 * peak_bytes(profile, profile.space.baseline()))
        best, usual = solve(profile, budget), solve(offering(profile, DEFAULT_STORAGES), budget)
        close = close_plans(profile, budget, Goal())
        assert close[0] == best.plan
        assert len(set(close)) == len(close)
        if usual.objective <= 1.1 * best.objective and usual.plan != best.plan:
            assert close[1] == usual.plan
            compared += 1
    assert compared > 2


@settings(max_examples=30)
@given(seeds, st.floats(0.2, 1.0))
def test_the_fastest_uniform_plan_is_the_best_of_all_uniform_plans_that_fit(seed: int, share: float):
    profile = drawn(seed, 2, storages=STORAGES)
    space, budget = profile.space, int(share * peak_bytes(profile, profile.space.baseline()))
    every = itertools.product(space.accumulation_choices, space.precisions, space.storages)
    plans = [space.plan(accumulation_steps=k, precision=one, storage=storage) for k, one, storage in every]
    fitting = [plan for plan in plans if peak_bytes(profile, plan) <= budget * (1 - SAFETY_MARGIN)]
    found = fastest_uniform(profile, budget)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert found.plan in fitting
    assert found.objective >= solve(profile, budget).objective * (1 - 1e-9)
    seconds = {plan: seconds_per_step(profile, plan) for plan in fitting if plan.accumulation_steps == 1}
    if found.plan in seconds:
        assert seconds[found.plan] == min(seconds.values())


def test_uniform_plans_that_may_be_as_fast_as_the_optimum_are_measured_too():
    """Times of compiled units rest on few steps, so that their uniform plans may be farther from the optimum."""
    compared = [0, 0]
    for seed in range(8):
        profile = drawn(seed, 6, storages=STORAGES)
        budget = int(0.6 * peak_bytes(profile, profile.space.baseline()))
        best, close = solve(profile, budget), close_plans(profile, budget, Goal())[:4]
        for which, storages in enumerate((STORAGES, COMPILED_STORAGES)):
            found = fastest_uniform(profile, budget, storages=storages)
            if found is not None and found.plan != best.plan:
                compiled = {*found.plan.storage.values()} <= {*COMPILED_STORAGES}
                near = found.objective <= (1.25 if compiled else 1.1) * best.objective
                assert (found.plan in close) == near
                compared[which] += near
    assert min(compared) > 2


def test_unknown_noise_scale_does_not_make_large_batches_look_free():
    profile = drawn(5, 3, batching="adaptive")
    one_batch = Goal(noise_scale=float(profile.batch_size))
    assert solve(profile).plan == solve(profile, goal=one_batch).plan
    assert solve(profile).objective == pytest.approx(solve(profile, goal=one_batch).objective)


@pytest.mark.parametrize("seed", range(4))
def test_nonrecomputable_unit_is_saved_even_if_recomputing_it_was_measured(seed: int):
    profile = drawn(seed, 3)
    locked = next(index for index, unit in enumerate(profile.units) if unit.recomputable)
    units = [replace(unit, recomputable=unit.recomputable and i != locked) for i, unit in enumerate(profile.units)]
    assert_exact(replace(profile, units=tuple(units)))


def test_solver_that_times_out_still_returns_a_plan(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choice_program, "_TIME_LIMIT_S", 0.0)
    profile = drawn(3, 12)
    least = smallest(profile)
    assert solve(profile).seconds_per_sample <= least.seconds_per_sample
    assert solve(profile, least.peak_bytes * 101 // 100).plan == least.plan
    with pytest.raises(BudgetError, match="the smallest plan"):
        solve(profile, least.peak_bytes // 2)


@pytest.mark.parametrize("identical", [False, True])
def test_many_units_with_all_storages_are_solved_nearly_to_the_proof(identical: bool):
    shape = Shape(units=200, accumulation_choices=(4,), identical=identical, storages=STORAGES)
    profile = draw_profile(np.random.default_rng(5), shape)
    least, free = smallest(profile).peak_bytes, solve(profile).peak_bytes
    solution = solve(profile, round(least + 0.3 * (free - least)))
    assert solution.gap < 1e-3
    assert solution.peak_bytes <= least + 0.3 * (free - least)
