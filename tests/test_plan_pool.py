"""Tests of plan pools: as good as the exact solver, equal to the cost model, and without dominated plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autotune.cost_model.cost_arrays import CostArrays, Plans
from autotune.cost_model.plan_pool import LENGTHS, PlanPool, PoolSettings, make_pool
from autotune.cost_model.profile import Profile, StepTable
from autotune.cost_model.solver import SAFETY_MARGIN, samples_of_progress, smallest, solve
from autotune.plan import Precision
from autotune.simulator.random_jobs import Shape, draw_job, draw_profile
from autotune.simulator.simulated_job import SimulatedJob

# Shares of the baseline's peak; smaller ones are raised to just above the leanest plan's peak.
SHARES = (0.3, 0.45, 0.67, 1.0)
PROFILED = int(np.abs(LENGTHS - 1.0).argmin())


def drawn_jobs(count: int = 20, seed: int = 5) -> list[SimulatedJob]:
    generator = np.random.default_rng(seed)
    return [draw_job(generator, depth=(2, 6)) for _ in range(count)]


class Pooled:
    """Jobs, their costs and their plans."""

    def __init__(self, profiles: list[Profile], settings: PoolSettings | None = None) -> None:
        self.profiles = profiles
        self.arrays = CostArrays(profiles)
        self.pool = make_pool(self.arrays, settings)
        self.ones = np.ones(len(profiles))
        self.peaks = self.pool.peak_bytes(self.ones)
        self.seconds = self.pool.seconds_per_step(self.factor(), self.ones)

    def factor(self, generator: np.random.Generator | None = None) -> np.ndarray:
        shape = (len(self.profiles), self.arrays.max_units, self.arrays.max_choices // 2)
        return np.ones(shape) if generator is None else np.exp(0.3 * generator.standard_normal(shape))

    def every(self) -> Plans:
        """Return all plans of all jobs, one lane each, padding included."""
        jobs, size = self.pool.k.shape
        choices = self.pool.choices.reshape(jobs * size, -1)
        return Plans(np.repeat(np.arange(jobs), size), self.pool.k.reshape(-1), choices)

    def gaps(self, job: int, most: float) -> list[float]:
        """Return how much slower the pool's best fitting plan is than the exact optimum, per budget.

        Args:
            job: number of the job.
            most: largest budget in bytes.
        """
        profile, found = self.profiles[job], []
        least = 1.02 * smallest(profile).peak_bytes
        worth = np.array([samples_of_progress(profile, k, None) for k in profile.accumulation_choices])
        for share in SHARES:
            budget = int(max(share * most, least) / (1 - SAFETY_MARGIN)) + 1
            fits = self.pool.there[job] & (self.peaks[job] <= budget * (1 - SAFETY_MARGIN))
            per_sample = np.where(fits, self.seconds[job] / worth[self.pool.k[job]], np.inf)
            found.append(float(per_sample.min()) / solve(profile, budget).seconds_per_sample - 1)
        return found


@pytest.fixture(scope="module")
def pooled() -> Pooled:
    return Pooled([job.profile for job in drawn_jobs()])


def test_best_fitting_plan_is_within_a_thousandth_of_the_exact_optimum(pooled: Pooled) -> None:
    jobs = range(len(pooled.profiles))
    gaps = np.array([pooled.gaps(job, pooled.peaks[job, pooled.pool.baseline[job]]) for job in jobs])
    assert gaps.shape == (20, 4)
    assert gaps.min() > -1e-9
    assert np.median(gaps) < 1e-3
    assert np.quantile(gaps, 0.95) < 1.5e-2


def test_peaks_and_seconds_equal_the_cost_model_at_every_tabulated_length(pooled: Pooled) -> None:
    every, size = pooled.every(), pooled.pool.k.shape
    generator = np.random.default_rng(0)
    factor = pooled.factor(generator)
    lanes = every.job
    told = pooled.arrays.unit_seconds[lanes, pooled.arrays.variant(every)] * np.repeat(factor[lanes], 2, axis=2)
    for length in LENGTHS[::6]:
        at = np.full(len(pooled.profiles), length)
        expected = pooled.arrays.peak_bytes(every, length).reshape(size)
        np.testing.assert_allclose(pooled.pool.peak_bytes(at), expected, rtol=1e-12)
        seconds = pooled.arrays.seconds_per_step(every, length, told).reshape(size)
        np.testing.assert_allclose(pooled.pool.seconds_per_step(factor, at), seconds, rtol=1e-12)


def test_interpolated_peak_is_never_too_low(pooled: Pooled) -> None:
    every, size = pooled.every(), pooled.pool.k.shape
    assert pooled.pool.there.sum() > 500
    over = []
    for length in np.exp(np.random.default_rng(1).uniform(np.log(LENGTHS[0]), np.log(LENGTHS[-1]), 12)):
        assert np.abs(LENGTHS - length).min() > 1e-9
        real = pooled.arrays.peak_bytes(every, length).reshape(size)
        told = pooled.pool.peak_bytes(np.full(len(pooled.profiles), length))
        assert (told >= real * (1 - 1e-12)).all()
        over.append(told / real - 1)
    # Nor is it much higher, so that little memory is wasted.
    assert np.max(over) < 1e-2
    assert np.mean(over) < 1e-3


def test_single_plan_costs_the_same_as_among_all_plans(pooled: Pooled) -> None:
    generator = np.random.default_rng(2)
    jobs, rows = len(pooled.profiles), np.arange(len(pooled.profiles))
    factor, length = pooled.factor(generator), np.exp(generator.uniform(-1, 1, jobs))
    plan = generator.integers(0, pooled.pool.there.sum(axis=1))
    peaks, seconds = pooled.pool.peak_bytes(length), pooled.pool.seconds_per_step(factor, length)
    np.testing.assert_allclose(pooled.pool.peak_of(plan, length), peaks[rows, plan], rtol=1e-12)
    np.testing.assert_allclose(pooled.pool.seconds_of(plan, factor, length), seconds[rows, plan], rtol=1e-12)


@pytest.mark.parametrize("share", [0.4, 0.7, 1.0, 1.7])
def test_longest_fitting_length_is_where_the_peak_meets_the_budget(pooled: Pooled, share: float) -> None:
    pool, jobs = pooled.pool, len(pooled.profiles)
    budget = share * pool.peak_of(pool.baseline, pooled.ones)
    longest = pool.longest(budget)
    at_all = pool.peaks[:, :, 0] <= budget[:, None]
    assert (longest[~at_all] < LENGTHS[0]).all()
    assert (longest[at_all] >= LENGTHS[0]).all()
    checked = 0
    for plan in range(pool.k.shape[1]):
        number, length = np.full(jobs, plan), longest[:, plan]
        inside = at_all[:, plan] & (length < LENGTHS[-1])
        peak = pool.peak_of(number, np.clip(length, LENGTHS[0], LENGTHS[-1]))
        np.testing.assert_allclose(peak[inside], budget[inside], rtol=1e-9)
        beyond = at_all[:, plan] & (length >= LENGTHS[-1])
        assert (peak[beyond] <= budget[beyond] * (1 + 1e-12)).all()
        checked += int(inside.sum())
    assert checked > 500


def test_padding_is_never_chosen(pooled: Pooled) -> None:
    pool = pooled.pool
    padded = ~pool.there
    assert padded.any()
    assert (pool.there == (np.arange(pool.k.shape[1]) < pool.there.sum(axis=1)[:, None])).all()
    rows = np.arange(len(pooled.profiles))
    assert pool.there[rows, pool.baseline].all()
    assert pool.there[rows, pool.leanest].all()
    # Padding repeats an existing plan, so the first of the best plans is never padding.
    for quantity in (pooled.seconds, pooled.peaks):
        assert pool.there[rows, quantity.argmin(axis=1)].all()
        np.testing.assert_allclose(quantity[padded], np.repeat(quantity[:, 0], padded.sum(axis=1)), rtol=1e-12)


def test_baseline_and_leanest_plan_are_included_and_no_plan_twice(pooled: Pooled) -> None:
    pool = pooled.pool
    for job, profile in enumerate(pooled.profiles):
        plans = [
            pooled.arrays.decode(job, int(k), choices)
            for k, choices in zip(pool.k[job][pool.there[job]], pool.choices[job][pool.there[job]], strict=True)
        ]
        assert len(set(plans)) == len(plans)
        assert plans[pool.baseline[job]] == profile.space.baseline()
        assert all(profile.space.check(plan) == plan for plan in plans)
        lean = {
            profile.space.check(profile.space.leanest().changed(accumulation_steps=k))
            for k in profile.accumulation_choices
        }
        assert lean <= set(plans)
        assert pooled.peaks[job][pool.leanest[job]] == pooled.peaks[job][pool.there[job]].min()
        assert pooled.peaks[job][pool.leanest[job]] <= smallest(profile).peak_bytes * 1.005


def test_requested_plans_are_included_and_the_pool_has_its_size() -> None:
    profiles = [job.profile for job in drawn_jobs(4, seed=8)]
    arrays, generator = CostArrays(profiles), np.random.default_rng(0)
    asked = []
    for _ in range(3):
        encoded = [arrays.encode(job, profile.space.sample(generator)) for job, profile in enumerate(profiles)]
        asked.append(Plans(np.arange(4), np.array([k for k, _ in encoded]), np.stack([one for _, one in encoded])))
    pool = make_pool(arrays, PoolSettings(size=24), asked)
    assert pool.k.shape[1] <= 24
    for plans, job in itertools.product(asked, range(4)):
        rows = np.concatenate([pool.k[job][:, None], pool.choices[job]], axis=1)[pool.there[job]]
        assert (rows == np.concatenate([plans.k[job : job + 1], plans.choices[job]])).all(axis=1).any()


def test_selected_lanes_keep_all_data_of_their_job(pooled: Pooled) -> None:
    job = np.array([3, 0, 3, 7])
    taken = pooled.pool.take(job)
    assert isinstance(taken, PlanPool)
    np.testing.assert_array_equal(taken.peaks[0], taken.peaks[2])
    np.testing.assert_array_equal(taken.peak_bytes(np.ones(4)), pooled.peaks[job])
    np.testing.assert_array_equal(taken.baseline, pooled.pool.baseline[job])


def test_same_jobs_have_the_same_pools() -> None:
    profiles = [job.profile for job in drawn_jobs(6, seed=9)]
    first, again = make_pool(CostArrays(profiles)), make_pool(CostArrays(profiles))
    np.testing.assert_array_equal(first.choices, again.choices)
    np.testing.assert_array_equal(first.peaks, again.peaks)


def drawn(seed: int, **shape: object) -> Profile:
    return draw_profile(np.random.default_rng(seed), Shape(units=4, **shape))


def with_uniform_tables(profile: Profile) -> Profile:
    """Return a profile in which uniform 16-bit plans cost less than the sum over units."""

    def cheaper(table: StepTable) -> StepTable:
        segments = tuple(
            replace(
                segment,
                costs={
                    name: replace(cost, forward_s=0.7 * cost.forward_s, saved_bytes=int(0.8 * cost.saved_bytes))
                    for name, cost in segment.costs.items()
                    if not name.startswith("fp32")
                },
            )
            for segment in table.segments
        )
        return replace(table, segments=segments)

    return replace(profile, uniform_tables={"bf16": tuple(cheaper(table) for table in profile.tables)})


def without(profile: Profile, gone: Callable[[str | None, str], bool], ks: tuple[int, ...] = (1, 2, 4)) -> Profile:
    """Return a profile without some choices of some units, as if they had not run during profiling."""

    def poorer(table: StepTable) -> StepTable:
        if table.accumulation_steps not in ks:
            return table
        segments = tuple(
            replace(one, costs={name: cost for name, cost in one.costs.items() if not gone(one.unit, name)})
            for one in table.segments
        )
        return replace(table, segments=segments)

    return replace(profile, tables=tuple(poorer(table) for table in profile.tables))


def is_bf16(_unit: str | None, name: str) -> bool:
    return name.startswith("bf16")


KINDS: dict[str, Callable[[int], Profile]] = {
    "one k": lambda seed: drawn(seed, accumulation_choices=(1,)),
    "one k above 1": lambda seed: drawn(seed, accumulation_choices=(4,)),
    "one precision": lambda seed: drawn(seed, precisions=(Precision.FP32,)),
    "adaptive": lambda seed: drawn(seed, batching="adaptive"),
    "uniform tables": lambda seed: with_uniform_tables(drawn(seed)),
    "the smallest k could not be profiled": lambda seed: without(drawn(seed), lambda unit, _: unit is not None, (1,)),
    "saving could not be profiled at the smallest k": lambda seed: without(
        drawn(seed), lambda unit, name: str(unit).startswith("blocks") and name.endswith("save"), (1,)
    ),
    "a format that could not be profiled": lambda seed: without(drawn(seed), is_bf16),
    "one choice of one unit that could not be profiled": lambda seed: without(
        drawn(seed), lambda unit, name: unit == "blocks.1" and name == "bf16/recompute"
    ),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", KINDS)
def test_every_profile_has_a_nearly_exact_pool(kind: str) -> None:
    gaps = []
    for seed in range(5):
        pooled = Pooled([KINDS[kind](seed)])
        assert pooled.pool.there[0, pooled.pool.leanest[0]]
        runs = pooled.peaks[0] < 1e15
        # Choices without a profile are not planned, except the baseline, which planners require.
        assert set(np.flatnonzero(pooled.pool.there[0] & ~runs)) <= {int(pooled.pool.baseline[0])}
        assert (pooled.pool.choices[0, pooled.pool.baseline[0]] == 0).all()
        gaps += pooled.gaps(0, pooled.peaks[0, runs].max())
    assert min(gaps) > -1e-9
    assert np.median(gaps) < 1e-3
    assert np.quantile(gaps, 0.8) < 1.5e-2
    assert max(gaps) < 0.5
