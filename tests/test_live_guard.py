"""Tests of the guard's rules, which apply to every policy, with a real profile and without one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from autotune import Limits, Plan, Precision, Storage
from autotune.cost_model.cost_arrays import CostArrays, Plans
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Profile
from autotune.cost_model.time_model import seconds_per_step
from autotune.live.guard import Breaker, Situation, SlowdownCheck, fallback, judge
from autotune.live.placement import Placements, usable
from autotune.live.tripwires import Reading, Wires
from autotune.profiling.memory_scaling import Scaling
from autotune.simulator.random_jobs import Shape, draw_profile

FREE = Limits(min_steps_between_switches=0, canary_steps=0, gain_frac=0.0)


def drawn(seed: int = 0) -> Profile:
    return draw_profile(np.random.default_rng(seed), Shape())


@pytest.fixture(scope="module")
def profile() -> Profile:
    return drawn()


@pytest.fixture(scope="module")
def placements(profile: Profile) -> Placements:
    return Placements(profile)


def situation(placements: Placements, **changes: object) -> Situation:
    space = placements.profile.space
    return dataclasses.replace(
        Situation(
            space=space,
            locks={},
            placements=placements,
            usable_bytes=float("inf"),
            length=1.0,
            current=space.leanest(),
            since_switch=10**6,
            switches=5,
        ),
        **changes,  # type: ignore[arg-type]
    )


def test_interpolated_predictions_are_never_below_the_memory_model(placements: Placements) -> None:
    profile = placements.profile
    generator = np.random.default_rng(0)
    for _ in range(30):
        plan = profile.space.sample(generator)
        if not np.isfinite(placements.peak_bytes(plan, 1.0)):
            continue
        assert placements.peak_bytes(plan, 1.0) == pytest.approx(peak_bytes(profile, plan), rel=1e-9)
        sizes = np.sort(generator.uniform(0.13, 1.0, size=6))
        arrays = CostArrays([profile])
        k, choices = arrays.encode(0, plan)
        one = Plans(np.zeros(1, dtype=np.int64), np.array([k]), choices[None])
        for size in sizes:
            assert placements.peak_bytes(plan, float(size)) >= arrays.peak_bytes(one, float(size))[0] * (1 - 1e-9)


def test_memory_beyond_the_largest_traced_size_is_assumed_to_grow_fast(profile: Profile) -> None:
    plan = profile.space.baseline()
    steep, gentle = Placements(profile), Placements(profile, scaling=Scaling(square_share=0.5))
    assert steep.peak_bytes(plan, 1.5) > gentle.peak_bytes(plan, 1.5)
    assert steep.peak_bytes(plan, 0.5) == gentle.peak_bytes(plan, 0.5)
    assert steep.peak_bytes(plan, 100.0) == float("inf")


def test_equal_plan_is_predicted_identically(placements: Placements, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = placements.plans[0]
    peak = placements.peak_bytes(plan, 1.0)
    # Policies build the same plan again at each decision, and predicting it takes longer than a short step may.
    monkeypatch.setattr(placements, "_peaks_of", None)
    assert placements.peak_bytes(Plan.from_json(plan.to_json()), 1.0) == peak


def test_fastest_fitting_plan_is_the_fastest_of_all_fitting_plans(placements: Placements) -> None:
    profile = placements.profile
    highest = max(placements.peak_bytes(plan, 1.0) for plan in placements.plans)
    lowest = placements.peak_bytes(placements.leanest(), 1.0)
    assert placements.fastest(lowest * 0.99, 1.0) is None
    for share in np.linspace(0, 1, 9):
        room = lowest + share * (highest - lowest)
        found = placements.fastest(room, 1.0)
        assert found is not None
        assert placements.peak_bytes(found, 1.0) <= room
        fitting = [plan for plan in placements.plans if placements.peak_bytes(plan, 1.0) <= room]
        assert seconds_per_step(profile, found) == pytest.approx(
            min(seconds_per_step(profile, p) for p in fitting), rel=1e-3
        )


@pytest.mark.parametrize("adaptive", [False, True])
def test_plan_group_shares_precisions_and_under_adaptive_batching_k(placements: Placements, *, adaptive: bool) -> None:
    if adaptive:
        placements = Placements(dataclasses.replace(placements.profile, batching="adaptive"))
    plan = placements.plans[0]
    rows = placements.group(plan)
    assert rows is not None
    others = [placements.plans[int(number)] for number in rows]
    assert {other.accumulation_steps for other in others} == ({plan.accumulation_steps} if adaptive else {1, 2, 4})
    assert all(other.precision == plan.precision for other in others)


@pytest.mark.parametrize("proposal", [None, 7, "plan", {"version": 1}, float("nan"), [1, 2]])
def test_object_that_is_not_a_plan_is_illegal(placements: Placements, proposal: object) -> None:
    verdict = judge(proposal, situation(placements), FREE)
    assert verdict.illegal
    assert verdict.refused == "plan"
    assert verdict.plan == placements.profile.space.leanest()


def test_plan_is_not_illegal_because_batches_are_too_large_to_predict_any(placements: Placements) -> None:
    baseline = placements.profile.space.baseline()
    assert placements.peak_bytes(baseline, 100.0) == float("inf")
    verdict = judge(baseline, situation(placements, length=100.0), FREE)
    assert verdict.refused == "predictable"
    assert not verdict.illegal


def test_plan_outside_the_space_or_the_profile_is_illegal(placements: Placements) -> None:
    space = placements.profile.space
    for wrong in (
        space.baseline().changed(accumulation_steps=997),
        space.baseline().changed(storage={"nothing": Storage.SAVE}),
        space.baseline().changed(precision={space.units[0].name: Precision.INHERIT}),
    ):
        verdict = judge(wrong, situation(placements), FREE)
        assert verdict.illegal, verdict
        assert verdict.refused in ("space", "predictable")


def test_locked_unit_is_never_recomputed(placements: Placements) -> None:
    space = placements.profile.space
    name = space.recomputable[0]
    verdict = judge(space.leanest(), situation(placements, locks={name: "hidden randomness"}), FREE)
    assert verdict.plan.storage_of(name) is Storage.SAVE or verdict.refused is not None
    assert verdict.rules["locks"] == "repaired"


def test_thousand_greedy_proposals_never_exceed_the_budget(placements: Placements) -> None:
    space = placements.profile.space
    generator = np.random.default_rng(1)
    lowest = placements.peak_bytes(placements.leanest(), 1.0)
    highest = placements.peak_bytes(space.baseline(), 1.0)
    current = placements.leanest()
    changed = 0
    for _ in range(1_000):
        room = float(generator.uniform(lowest, highest))
        length = float(generator.uniform(0.2, 1.0))
        # Usually the greediest plan, the one that uses the most memory.
        proposal: Plan = space.baseline() if generator.random() < 0.7 else space.sample(generator)
        verdict = judge(proposal, situation(placements, usable_bytes=room, length=length, current=current), FREE)
        if verdict.refused is None:
            assert placements.peak_bytes(verdict.plan, length) <= room
            changed += verdict.plan != current
            current = verdict.plan
    assert changed > 12


def test_switch_waits_and_must_pay_off(placements: Placements) -> None:
    limits = Limits(min_steps_between_switches=50, gain_frac=0.03)
    fast, slow = placements.plans[0], placements.plans[-1]
    soon = judge(fast, situation(placements, current=slow, since_switch=10), limits)
    assert soon.refused == "interval"
    worse = judge(slow, situation(placements, current=fast, since_switch=100), limits)
    assert worse.refused == "gain"
    # A plan that no longer fits is replaced without waiting.
    lean, room = placements.leanest(), placements.peak_bytes(fast, 1.0) * 0.999
    urgent = judge(lean, situation(placements, current=fast, since_switch=1, usable_bytes=room), limits)
    assert urgent.refused is None


def test_distrusted_policy_is_replaced_by_the_baseline_or_a_fitting_plan(placements: Placements) -> None:
    baseline = placements.profile.space.baseline()
    assert fallback(baseline, None, 1.0, 1.0) == baseline
    assert fallback(baseline, placements, float("inf"), 1.0) == baseline
    room = placements.peak_bytes(baseline, 1.0) * 0.9
    found = fallback(baseline, placements, room, 1.0)
    assert found != baseline
    assert placements.peak_bytes(found, 1.0) <= room or found == placements.leanest()


def test_trips_pause_for_increasing_periods_and_then_permanently() -> None:
    breaker = Breaker.closed(Limits(pause_steps=10, max_trips=3))
    assert breaker.allows(0)
    breaker.trip(100, "one")
    assert not breaker.allows(109)
    assert breaker.allows(110)
    breaker.trip(110, "two")
    assert not breaker.allows(129)
    assert breaker.allows(130)
    breaker.trip(130, "three")
    assert not breaker.allows(10**9)


def readings(**series: Any) -> list[str | None]:
    """Return the trip wires' results after each of a few windows."""
    wires = Wires(Limits())
    calm = {"pressure": None, "retries": 0, "graphs": 0, "placed": 0, "non_finite": 0, "rounds": False}
    count = max(len(values) for values in series.values())
    return [
        wires.after_window(Reading(**{**calm, **{name: values[number] for name, values in series.items()}}))
        for number in range(count)
    ]


def test_memory_pressure_trips_only_in_two_consecutive_windows() -> None:
    assert readings(pressure=[0.99]) == [None]
    assert readings(pressure=[0.99, 0.5, 0.99]) == [None] * 3
    said = readings(pressure=[0.1, 1.03, 1.05, 1.05])
    assert "103% and 105%" in str(said[2])
    # A message is logged once.
    assert [one is None for one in said] == [True, True, False, True]


def test_repeated_allocator_retries_trip() -> None:
    assert readings(retries=[3, 4, 4, 5]) == [None] * 4
    assert "1 and 2 times" in str(readings(retries=[3, 4, 6])[2])


def test_recompilations_trip_only_after_plan_switches() -> None:
    assert readings(graphs=[1, 2, 3], placed=[0, 0, 0]) == [None] * 3
    assert readings(graphs=[1, 2, 2, 3], placed=[0, 1, 2, 3]) == [None] * 4
    assert "2 graphs" in str(readings(graphs=[1, 2, 3], placed=[0, 1, 2])[2])


def test_nonfinite_loss_trips_unless_the_run_is_bit_identical() -> None:
    assert readings(non_finite=[1], rounds=[False]) == [None]
    assert "not finite" in str(readings(non_finite=[1], rounds=[True])[0])


def test_steps_skipped_under_the_users_precision_do_not_trip() -> None:
    wires = Wires(Limits())
    assert [wires.after_step(stepped=False, rounds=False) for _ in range(3)] == [None] * 3
    said = [wires.after_step(stepped=stepped, rounds=True) for stepped in (False, True, False, False)]
    assert [one is None for one in said] == [True, True, True, False]


@pytest.mark.parametrize(("own", "trips"), [(1.0, False), (1.3, True)])
def test_slowness_is_measured_against_the_baseline_in_alternating_steps(own: float, trips: bool) -> None:
    check, limits = SlowdownCheck(), Limits()
    generator = np.random.default_rng(0)
    check.begin_if_slow(1.5, limits, possible=False)
    check.begin_if_slow(1.5, limits, possible=False)
    assert not check.runs_baseline
    check.begin_if_slow(1.5, limits, possible=True)
    seen = set()
    for number in range(200):
        seen.add(check.runs_baseline)
        # The machine gets steadily slower, which no plan causes.
        drift = 1 + number / 50
        check.note(drift * (1.0 if check.runs_baseline else own) * generator.uniform(0.99, 1.01))
    assert seen == {True, False}
    assert (check.verdict(limits) is not None) == trips


def test_every_plan_is_usable_without_a_budget() -> None:
    assert usable(None) == float("inf")
    assert 0.99 * 1000 < usable(1000) < 1000


@pytest.mark.parametrize(("switches", "held"), [(0, False), (1, True), (2, False)])
def test_first_switch_is_kept_before_the_next_one(placements: Placements, switches: int, *, held: bool) -> None:
    limits = dataclasses.replace(FREE, canary_steps=20)
    now = situation(placements, current=placements.leanest(), since_switch=19, switches=switches)
    verdict = judge(placements.plans[0], now, limits)
    assert (verdict.refused == "interval") is held
    later = dataclasses.replace(now, since_switch=20)
    assert judge(placements.plans[0], later, limits).refused is None
