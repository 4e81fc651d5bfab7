"""Tests of changing conditions: planners against a clairvoyant, each mechanism alone, and none."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from autotune.cost_model.cost_arrays import Floats
from autotune.simulator.clairvoyant import best_static, clairvoyant, run_planner
from autotune.simulator.moving_conditions import Course, MovingRuns, Strengths, draw_course
from autotune.simulator.online_planner import Levers, Planner, Rises, Seen, Situation
from autotune.simulator.planner_settings import PlannerSettings
from autotune.simulator.random_jobs import draw_job

STRONG = Strengths(
    noise_error=0.5,
    cost_error=0.3,
    time_noise=0.02,
    drift=0.15,
    length=0.15,
    curriculum=0.4,
    jitter=0.05,
    event_every=6,
    event_told=0.5,
    switch_windows=0.3,
)
LANES, WINDOWS = 24, 20
SETTINGS = (
    PlannerSettings(),
    PlannerSettings(horizon=0.0),
    PlannerSettings(cost_error=0.0),
    PlannerSettings(rise=0.1),
    PlannerSettings(cost_error=1.0, common_share=0.0, drift=0.2, time_noise=0.0),
)


@pytest.fixture(scope="module")
def jobs():
    generator = np.random.default_rng(1)
    return [draw_job(generator, depth=(2, 6)) for _ in range(12)]


@pytest.fixture(scope="module")
def pools(jobs) -> MovingRuns:
    return MovingRuns(jobs, Strengths(), windows=WINDOWS)


def course_of(pools: MovingRuns, strengths: Strengths, seed: int = 3, share: float = 0.8) -> tuple[MovingRuns, Course]:
    """Return runs with budgets between the leanest and the baseline's peak, and their course."""
    runs = copy.copy(pools)
    runs.strengths = strengths
    job = np.arange(LANES) % len(runs.jobs)
    pool = runs.pool.take(job)
    peak = pool.peak_of(pool.baseline, np.ones(LANES)) * share
    course = draw_course(np.random.default_rng(seed), strengths, runs.arrays, job, peak, WINDOWS)
    needed = pool.peak_of(pool.leanest, course.longest.max(axis=1))
    lift = np.maximum(1.02 * needed / course.budget.min(axis=1), 1.0)[:, None]
    return runs, replace(course, budget=course.budget * lift, told=course.told * lift)


def total(runs: MovingRuns, course: Course, settings: PlannerSettings) -> Floats:
    """Return each lane's time under a planner, in windows of its baseline."""
    return np.asarray(run_planner(runs, course, settings).sum(axis=1) / runs.baseline_s)


def led(runs: MovingRuns, course: Course, settings: PlannerSettings, **levers: float) -> tuple[Floats, list[Seen]]:
    """Return each lane's time under a planner with non-neutral levers, and its measurements."""
    runs.begin(course)
    planner, windows = Planner(runs.lanes, settings), []
    moved = Levers.neutral(LANES)
    for name, value in levers.items():
        setattr(moved, name, np.full(LANES, value))
    for _ in range(runs.windows):
        windows.append(runs.run(planner.decide(runs.situation(), moved)))
        planner.observe(windows[-1])
    return runs.seconds / runs.baseline_s, windows


@pytest.mark.parametrize("settings", SETTINGS)
def test_planner_equals_the_clairvoyant_if_nothing_changes(pools, settings) -> None:
    runs, course = course_of(pools, Strengths())
    seconds = run_planner(runs, course, settings).sum(axis=1)
    np.testing.assert_allclose(seconds, clairvoyant(runs, course), rtol=1e-9)


@pytest.mark.parametrize(
    "names",
    [(), ("cost_error",), ("length", "jitter"), ("event_every", "switch_windows"), ("drift", "noise_error"), None],
)
def test_no_planner_is_faster_than_the_clairvoyant(pools, names) -> None:
    runs, course = course_of(pools, STRONG if names is None else STRONG.only(*names))
    best = clairvoyant(runs, course)
    for settings in (PlannerSettings(reserve=0.1), *SETTINGS):
        assert (best <= run_planner(runs, course, settings).sum(axis=1) * (1 + 1e-9)).all()
    assert (best <= best_static(runs, course) * (1 + 1e-9)).all()
    generator = np.random.default_rng(0)
    runs.begin(course)
    for _ in range(WINDOWS):
        runs.run(generator.integers(0, runs.lanes.pool.there.sum(axis=1)))
    assert (best <= runs.seconds * (1 + 1e-9)).all()


def test_planner_is_never_faster_than_the_best_constant_plan_if_nothing_changes(pools) -> None:
    runs, course = course_of(pools, Strengths())
    fixed = np.array([job.profile.batching == "fixed" for job in runs.jobs])[course.job]
    assert fixed.any()
    # Under adaptive batching the noise scale still grows, and with it the best k.
    np.testing.assert_allclose(best_static(runs, course)[fixed], clairvoyant(runs, course)[fixed], rtol=1e-9)
    seconds = run_planner(runs, course, PlannerSettings()).sum(axis=1)
    assert (seconds[fixed] >= best_static(runs, course)[fixed] * (1 - 1e-9)).all()


def test_constant_plan_loses_if_conditions_change_a_lot(pools) -> None:
    runs, course = course_of(pools, STRONG)
    assert np.mean(best_static(runs, course) / clairvoyant(runs, course)) > 1.01


def test_correcting_costs_by_measurements_helps_if_they_are_wrong(pools) -> None:
    runs, course = course_of(pools, STRONG.only("cost_error"))
    assert total(runs, course, PlannerSettings()).mean() < total(runs, course, PlannerSettings(cost_error=0.0)).mean()


def test_hysteresis_helps_if_switching_is_expensive(pools) -> None:
    runs, course = course_of(pools, replace(STRONG.only("event_every", "switch_windows", "drift"), event_told=1.0))
    assert total(runs, course, PlannerSettings()).mean() < total(runs, course, PlannerSettings(horizon=0.0)).mean()


def test_memory_reserve_helps_if_lengths_jump(pools) -> None:
    runs, course = course_of(pools, STRONG.only("length", "jitter"), share=0.6)
    assert total(runs, course, PlannerSettings(reserve=0.2)).mean() < total(runs, course, PlannerSettings()).mean()


def test_rise_probability_helps_if_lengths_jump_and_costs_nothing_otherwise(pools) -> None:
    runs, course = course_of(pools, STRONG.only("length", "jitter"), share=0.6)
    assert total(runs, course, PlannerSettings(rise=0.1)).mean() < total(runs, course, PlannerSettings()).mean()
    runs, course = course_of(pools, STRONG.only("cost_error"), share=0.6)
    assert course.still.all()
    np.testing.assert_allclose(
        total(runs, course, PlannerSettings(rise=0.1)), total(runs, course, PlannerSettings()), rtol=1e-9
    )


def test_unannounced_events_slow_a_planner_down_and_a_belief_about_them_helps(pools) -> None:
    strengths = replace(STRONG.only("event_every", "switch_windows"), switch_windows=0.05, event_every=3)
    runs, told = course_of(pools, replace(strengths, event_told=1.0))
    _, untold = course_of(pools, replace(strengths, event_told=0.0))
    np.testing.assert_array_equal(told.budget, untold.budget)
    assert (untold.told >= untold.budget).all()
    assert not np.array_equal(untold.told, untold.budget)
    np.testing.assert_array_equal(told.told, told.budget)
    known, unknown, expected, guessed = (
        led(runs, course, PlannerSettings(dips=dips))
        for course, dips in ((told, "none"), (untold, "none"), (untold, "belief"), (untold, "last"))
    )
    assert not any(window.ran_out.any() for window in known[1])
    failures = [sum(window.ran_out.sum() for window in one[1]) for one in (unknown, expected, guessed)]
    assert failures[0] > 2 * failures[1] > 0
    assert failures[0] > failures[2]
    assert known[0].mean() < expected[0].mean() < unknown[0].mean()
    assert guessed[0].mean() < unknown[0].mean()


@pytest.mark.parametrize("family", ["jittered", "missing", "bursts"])
def test_belief_wins_where_the_next_dip_cannot_be_counted(pools, family: str) -> None:
    strengths = Strengths(event_every=5, event_families=(family,), event_share=0.6, event_told=0.0)
    runs, course = course_of(pools, strengths)
    belief, last, none = (total(runs, course, PlannerSettings(dips=dips)).mean() for dips in ("belief", "last", "none"))
    assert belief < min(last, none)


def test_belief_changes_nothing_where_no_memory_dips(pools) -> None:
    runs, course = course_of(pools, STRONG.only("cost_error", "drift", "length", "jitter", "switch_windows"))
    for dips in ("belief", "last"):
        np.testing.assert_array_equal(
            total(runs, course, PlannerSettings(rise=0.1, dips=dips)),
            total(runs, course, PlannerSettings(rise=0.1, dips="none")),
        )


def test_odds_of_a_dip_change_nothing_before_the_first_and_then_lead_to_leaner_plans(pools) -> None:
    strengths = replace(STRONG.only("event_every"), event_every=3, event_told=0.0, event_share=0.7)
    runs, course = course_of(pools, strengths)
    runs.begin(course)
    planner, wary, bold = Planner(runs.lanes, PlannerSettings()), Levers.neutral(LANES), Levers.neutral(LANES)
    wary.dip_odds += 20.0
    bold.dip_odds -= 20.0
    np.testing.assert_array_equal(planner.decide(runs.situation(), wary), planner.decide(runs.situation()))
    for _ in range(9):
        planner.observe(runs.run(planner.decide(runs.situation())))
    assert (planner.dips.count > 0).all()
    # The memory of the next window is what was announced before, or what the last dip left.
    situation = runs.situation()
    peaks = [runs.lanes.pool.peak_of(planner.decide(situation, one), planner.length) for one in (bold, wary)]
    level, lean = np.exp(planner.dips.level), planner.decide(situation, wary) == runs.lanes.pool.leanest
    assert (peaks[1] <= np.maximum(peaks[0], level)).all()
    assert (peaks[1][~lean] <= level[~lean] * (1 + 1e-9)).all()
    assert (peaks[0] > level).any()
    assert (planner.left_free >= 0).all()
    assert planner.left_free.max() > 0
    # After a long silence, no memory is left free any more.
    calm = replace(planner_seen(planner), dip=np.zeros(LANES), budget=situation.budget[:, 0])
    for _ in range(600):
        planner.observe(calm)
    planner.decide(situation)
    assert planner.left_free.max() == 0


def planner_seen(planner: Planner) -> Seen:
    assert planner.seen is not None
    return planner.seen


def test_out_of_memory_costs_part_of_the_window_the_leanest_plan_and_two_switches(pools) -> None:
    for retry in (0.5, 1.0):
        runs, course = course_of(pools, Strengths(retry_windows=retry, switch_windows=0.1, length=0.1))
        runs.begin(course)
        # The run is launched with the first window's plan, so only the second can be a switch.
        first = runs.run(runs.lanes.pool.leanest)
        fat = runs.lanes.pool.baseline
        course.budget[:, 1] = 1.0
        every = runs.every_plan(1)
        working = runs.steps(1, fat[:, None])[:, 0] * runs.lanes.pool.seconds_of(
            fat, runs.factor(1), course.length[:, 1]
        )
        lean = runs.lanes.pool.leanest
        again = runs.steps(1, lean[:, None])[:, 0] * runs.lanes.pool.seconds_of(
            lean, runs.factor(1), course.length[:, 1]
        )
        seen = runs.run(fat)
        assert not first.ran_out.any()
        assert seen.ran_out.all()
        switched = (fat != lean) * runs.switch_s
        assert (runs.switch_s > 0).all()
        np.testing.assert_allclose(seen.total_s, retry * working + again + 2 * runs.switch_s + switched, rtol=1e-12)
        np.testing.assert_allclose(seen.window_s, working, rtol=1e-12)
        # The clairvoyant pays the same.
        np.testing.assert_allclose(every[np.arange(LANES), fat] + switched, seen.total_s, rtol=1e-12)
        np.testing.assert_allclose(runs.seconds, first.total_s + seen.total_s, rtol=1e-12)


def test_window_ends_at_the_same_loss_under_every_plan(pools) -> None:
    runs, course = course_of(pools, STRONG)
    runs.begin(course)
    pool, batch = runs.lanes.pool, runs.lanes.batch
    adaptive = runs.lanes.adaptive
    assert adaptive.any()
    assert not adaptive.all()
    every = np.broadcast_to(np.arange(pool.k.shape[1]), pool.k.shape)
    steps = runs.steps(5, every)
    # With a fixed batch, a plan only affects convergence by the noise of its formats; larger batches take fewer steps.
    assert (np.ptp(steps[~adaptive], axis=1) < 0.02 * steps[~adaptive].max(axis=1)).all()
    for lane in np.flatnonzero(adaptive):
        own, k = steps[lane][pool.there[lane]], runs.lanes.steps[lane][pool.there[lane]]
        fewest = [own[k == value].min() for value in np.unique(k)]
        assert (np.diff(fewest) < 0).all()
        # They do not take fewer samples either.
        assert (np.diff([value * few for value, few in zip(np.unique(k), fewest, strict=True)]) > 0).all()
    assert (batch > 0).all()


def test_same_course_gives_the_same_run(pools) -> None:
    runs, course = course_of(pools, STRONG)
    first = run_planner(runs, course, PlannerSettings(rise=0.1))
    np.testing.assert_array_equal(first, run_planner(runs, course, PlannerSettings(rise=0.1)))
    _, again = course_of(pools, STRONG)
    np.testing.assert_array_equal(first, run_planner(runs, again, PlannerSettings(rise=0.1)))
    _, other = course_of(pools, STRONG, seed=4)
    assert not np.array_equal(run_planner(runs, other, PlannerSettings(rise=0.1)), first)


def test_lane_gives_the_same_results_alone_and_with_others(pools) -> None:
    runs, course = course_of(pools, STRONG)
    together = run_planner(runs, course, PlannerSettings(rise=0.1))
    some = np.array([5, 17])
    alone = run_planner(runs, course.take(some), PlannerSettings(rise=0.1))
    np.testing.assert_allclose(alone, together[some], rtol=1e-9)


def test_run_begins_with_its_course(jobs) -> None:
    runs = MovingRuns(jobs[:2], Strengths(), windows=3)
    with pytest.raises(ValueError, match="begin a course first"):
        runs.noise_scale(0)


def test_neutral_levers_change_nothing_and_each_other_lever_value_does(pools) -> None:
    settings = PlannerSettings(rise=0.1)
    runs, course = course_of(pools, STRONG, share=0.6)
    runs.begin(course)
    planner = Planner(runs.lanes, settings)
    for _ in range(7):
        planner.observe(runs.run(planner.decide(runs.situation())))
    situation = runs.situation()
    plan = planner.decide(situation)
    np.testing.assert_array_equal(plan, planner.decide(situation, Levers.neutral(LANES)))
    pool, rows = runs.lanes.pool, np.arange(LANES)

    def moved(known: Situation = situation, **levers: float) -> np.ndarray:
        changed = Levers.neutral(LANES)
        # Without hysteresis the choice itself is visible.
        for name, value in {"stickiness": 0.0, **levers}.items():
            setattr(changed, name, np.full(LANES, value))
        return planner.decide(known, changed)

    free = moved()
    peak, lowered = pool.peaks[rows, :, 24], (pool.choices // 2 > 0).sum(axis=2)
    assert (peak[rows, moved(caution=1.0)] <= peak[rows, free]).mean() > 0.9
    assert peak[rows, moved(caution=1.0)].sum() < peak[rows, free].sum()
    assert peak[rows, moved(dip_odds=9.0)].sum() < peak[rows, free].sum()
    assert lowered[rows, moved(price_16_bit=3.0)].sum() < lowered[rows, free].sum()
    assert runs.lanes.steps[rows, moved(k_bias=0.6)].sum() > runs.lanes.steps[rows, moved(k_bias=-0.6)].sum()
    assert not np.array_equal(moved(optimism=2.0), free)
    stuck = moved(stickiness=1e9)
    assert (stuck == planner.plan).sum() > (free == planner.plan).sum()
    # A plan that no longer fits is left, whatever the hysteresis.
    tight = replace(situation, budget=0.85 * situation.budget)
    stuck, free = moved(tight, stickiness=1e9), moved(tight)
    fits = pool.peak_of(planner.plan, planner.length) <= tight.budget[:, 0]
    np.testing.assert_array_equal(stuck[fits], planner.plan[fits])
    assert (~fits).any()
    np.testing.assert_array_equal(stuck[~fits], free[~fits])


def test_single_mechanism_can_be_isolated() -> None:
    alone = STRONG.only("length")
    assert (alone.length, alone.length_windows) == (STRONG.length, STRONG.length_windows)
    assert (alone.cost_error, alone.event_every, alone.switch_windows) == (0.0, 0, 0.0)


def test_strengths_vary_between_lanes_within_their_spread(pools) -> None:
    _, course = course_of(pools, Strengths(switch_windows=0.2, spread=2.0))
    assert (course.switch_windows >= 0.1).all()
    assert (course.switch_windows <= 0.4).all()
    assert np.ptp(course.switch_windows) > 0.05
    _, same = course_of(pools, Strengths(switch_windows=0.2))
    np.testing.assert_allclose(same.switch_windows, 0.2)


def test_planners_know_which_lanes_have_constant_length(pools) -> None:
    runs, course = course_of(pools, Strengths(length=0.2, jitter=0.1, length_lanes=0.5))
    assert course.still.any()
    assert not course.still.all()
    assert (course.length[course.still] == 1).all()
    assert (course.longest[course.still] == 1).all()
    assert (course.longest[~course.still] >= course.length[~course.still]).all()
    assert (np.ptp(course.length[~course.still], axis=1) > 0).all()
    runs.begin(course)
    np.testing.assert_array_equal(runs.lanes.still, course.still)
    _, none = course_of(pools, Strengths(event_every=4))
    assert none.still.all()


def test_lane_without_measurements_learns_nothing(pools) -> None:
    runs, course = course_of(pools, STRONG)
    runs.begin(course)
    planner = Planner(runs.lanes, PlannerSettings(drift=0.0))
    seen = runs.run(planner.decide(runs.situation()))
    blind = np.arange(LANES) % 3
    step_s = np.where(blind == 0, np.nan, np.where(blind == 1, 0.0, seen.step_s))
    planner.observe(replace(seen, step_s=step_s, ran_out=np.zeros(LANES, dtype=bool)))
    assert (planner.belief.mean[blind < 2] == 1).all()
    assert (planner.belief.mean[blind == 2] != 1).any(axis=(1, 2)).all()
    planner.observe(replace(seen, ran_out=np.ones(LANES, dtype=bool)))
    assert (planner.belief.mean[blind < 2] == 1).all()


def test_belief_about_the_running_plan_converges_to_its_measurements(pools) -> None:
    runs, course = course_of(pools, STRONG.only("cost_error"))
    runs.begin(course)
    planner = Planner(runs.lanes, PlannerSettings(drift=0.0, time_noise=0.0))
    for _ in range(WINDOWS):
        seen = runs.run(runs.lanes.pool.baseline)
        planner.observe(replace(seen, ran_out=np.zeros(LANES, dtype=bool)))
    np.testing.assert_allclose(planner.step_seconds(seen.plan, seen.length), seen.step_s, rtol=1e-6)


def test_rises_are_learned_and_larger_rises_are_never_more_likely() -> None:
    generator = np.random.default_rng(0)
    rises = Rises(np.array([0.1, 0.1, 0.0]))
    zero = np.zeros(3)
    middle = rises.exceed(np.zeros((3, 1)), zero)
    np.testing.assert_allclose(middle, 0.5)
    for _ in range(400):
        rises.learn(np.array([0.3, 0.0, 0.0]) + np.array([0.05, 0.2, 0.0]) * generator.standard_normal(3))
    np.testing.assert_allclose(rises.mean, [0.3, 0.0, 0.0], atol=0.12)
    np.testing.assert_allclose(rises.deviation, [0.05, 0.2, 0.0], atol=0.06)
    grid = np.linspace(-1, 1, 41)[None].repeat(3, axis=0)
    chance = rises.exceed(grid, zero)
    assert (np.diff(chance, axis=1) <= 0).all()
    assert ((chance >= 0) & (chance <= 1)).all()
    assert (rises.exceed(grid, np.ones(3)) >= chance).all()
    # If no length ever rose, no rise is expected.
    assert chance[2, 21] < 1e-9
