"""A pool of good plans for each job, so that replanning is one matrix product.

Under any budget, length and cost errors, the best plan is nearly always one of a few hundred. These are found once: by
the price solver under many random costs and budgets, and by changing single units of its plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from autotune.cost_model.cost_arrays import CostArrays, Floats, Indices, Plans
from autotune.cost_model.price_solver import PriceSolver

# Factors on the profiled length at which peaks are tabulated. A peak is convex in the length, so interpolation between
# them is an upper bound.
LENGTHS = np.exp(np.linspace(np.log(0.125), np.log(8.0), 49))
_PROFILED = 24
# Larger peaks belong to plans with a choice that could not be profiled.
_NEVER = 1e17


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Settings for the search of plans.

    Attributes:
        size: largest number of plans per job.
        worlds: number of sets of costs, the profile's own included; the others are random.
        budgets: budgets per set of costs, from the leanest plan's peak to the baseline's.
        cost_error: standard deviation of the logarithm of each random cost factor: one per unit, one per precision.
        rounds: number of rounds in which single units of the plans are changed.
        changes: largest number of such changes in a round; if more are possible, they are drawn at random. Deep models
            have more but need fewer, since one unit is a small part.
        seed: random seed for costs and changes.
    """

    size: int = 256
    worlds: int = 8
    budgets: int = 48
    cost_error: float = 0.3
    rounds: int = 2
    changes: int = 8192
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPool:
    """Up to m plans of each job; arrays of shape (jobs, m, ...), padded.

    Attributes:
        there: shape (jobs, m), false for padding.
        k: shape (jobs, m), the index of each plan's k.
        choices: shape (jobs, m, max_units); see :class:`autotune.cost_model.cost_arrays.Numbering`.
        peaks: shape (jobs, m, len(LENGTHS)), bytes at each length.
        weights: shape (jobs, m, max_units x precisions), seconds of each unit in its precision; 0 in others.
        between: shape (jobs, m), seconds of the code between units, which also grow with the length.
        constant: shape (jobs, m), constant seconds.
        baseline: shape (jobs,), index of the baseline plan.
        leanest: shape (jobs,), index of the plan with the smallest peak at the profiled length.
    """

    there: NDArray[np.bool_]
    k: Indices
    choices: Indices
    peaks: Floats
    weights: Floats
    between: Floats
    constant: Floats
    baseline: Indices
    leanest: Indices

    def take(self, job: Indices) -> PlanPool:
        """Return one row per lane, given the index of each lane's job."""
        return PlanPool(**{item.name: getattr(self, item.name)[job] for item in fields(self)})

    def peak_bytes(self, length: Floats) -> Floats:
        """Return every plan's peak in bytes at each lane's length, shape (lanes, m); call :meth:`take` first."""
        place, share = _between(length)
        lanes = np.arange(len(place))
        low, high = self.peaks[lanes, :, place], self.peaks[lanes, :, place + 1]
        return np.asarray(low + share[:, None] * (high - low))

    def longest(self, budget_bytes: Floats, lanes: Indices | slice = slice(None)) -> Floats:
        """Return the largest length at which each plan fits a budget, shape (lanes, m); call :meth:`take` first.

        Args:
            budget_bytes: shape (lanes,), memory budgets.
            lanes: the lanes that these are of.
        """
        budget, plans = budget_bytes[:, None], self.peaks.shape[1]
        row = np.arange(len(self.peaks))[lanes, None] * plans + np.arange(plans)
        peaks, begin = self.peaks.reshape(-1), row * len(LENGTHS)
        # The last place in which a peak fits, by halving: peaks grow with the length.
        place, step = np.zeros_like(row), 1 << (len(LENGTHS) - 1).bit_length() - 1
        while step:
            further = np.minimum(place + step, len(LENGTHS) - 2)
            place = np.where(peaks[begin + further] <= budget, further, place)
            step //= 2
        low, high = peaks[begin + place], peaks[begin + place + 1]
        share = np.clip((budget - low) / np.maximum(high - low, 1.0), 0.0, 1.0)
        longest = LENGTHS[place] + share * (LENGTHS[place + 1] - LENGTHS[place])
        return np.where(peaks[begin] <= budget, longest, 1e-3)

    def seconds_per_step(self, factor: Floats, length: Floats) -> Floats:
        """Return every plan's seconds per step, shape (lanes, m); call :meth:`take` first.

        Args:
            factor: shape (lanes, max_units, precisions), factors on the seconds of units.
            length: shape (lanes,), sequence length relative to the profiled one.
        """
        units = np.matmul(self.weights, factor.reshape(len(factor), -1, 1))[:, :, 0]
        return np.asarray((units + self.between) * length[:, None] + self.constant)

    def peak_of(self, plan: Indices, length: Floats) -> Floats:
        """Return the peak of one plan per lane in bytes, shape (lanes,); call :meth:`take` first."""
        place, share = _between(length)
        lanes = np.arange(len(place))
        low, high = self.peaks[lanes, plan, place], self.peaks[lanes, plan, place + 1]
        return np.asarray(low + share * (high - low))

    def seconds_of(self, plan: Indices, factor: Floats, length: Floats) -> Floats:
        """Return the seconds per step of one plan per lane, shape (lanes,); call :meth:`take` first."""
        lanes = np.arange(len(plan))
        units = (self.weights[lanes, plan] * factor.reshape(len(plan), -1)).sum(axis=1)
        return np.asarray((units + self.between[lanes, plan]) * length + self.constant[lanes, plan])


def _between(length: Floats) -> tuple[Indices, Floats]:
    """Return the index in ``LENGTHS`` below each length, and its fraction of the way to the next."""
    place = np.clip(np.searchsorted(LENGTHS, length, side="right") - 1, 0, len(LENGTHS) - 2)
    return place, (length - LENGTHS[place]) / (LENGTHS[place + 1] - LENGTHS[place])


def make_pool(arrays: CostArrays, settings: PoolSettings | None = None, also: Sequence[Plans] = ()) -> PlanPool:
    """Return a pool of good plans for every job.

    Args:
        arrays: costs of the jobs.
        settings: settings for the search of plans.
        also: further plans for the pool; each item has one per job.
    """
    settings = settings or PoolSettings()
    solver = PriceSolver(arrays)
    pools = [_job_pool(arrays, solver, job, settings, also) for job in range(len(arrays.profiles))]
    size = max(len(k) for k, _ in pools)
    jobs, units = len(pools), arrays.max_units
    there = np.zeros((jobs, size), dtype=bool)
    numbers, choices = np.zeros((jobs, size), dtype=np.int64), np.zeros((jobs, size, units), dtype=np.int64)
    for job, (k, chosen) in enumerate(pools):
        there[job, : len(k)] = True
        # Padding repeats the first plan, so that its numbers are valid.
        numbers[job], choices[job] = k[0], chosen[0]
        numbers[job, : len(k)], choices[job, : len(k)] = k, chosen
    return _filled(arrays, there, numbers, choices)


def _filled(arrays: CostArrays, there: NDArray[np.bool_], k: Indices, choices: Indices) -> PlanPool:
    jobs, size = k.shape
    flat = Plans(np.repeat(np.arange(jobs), size), k.reshape(-1), choices.reshape(jobs * size, -1))
    variant = arrays.variant(flat)
    peaks = arrays.peaks_by_length(flat, LENGTHS)
    told = arrays.unit_seconds[flat.job, variant]
    own = np.take_along_axis(told, flat.choices[:, :, None], axis=2)
    weights = np.zeros((jobs * size, arrays.max_units, arrays.max_precisions))
    np.put_along_axis(weights, arrays.numbering.precision(flat.choices)[:, :, None], own, axis=2)
    peaks = peaks.reshape(jobs, size, -1)
    none = (choices == 0).all(axis=2) & (k == 0) & there
    return PlanPool(
        there=there,
        k=k,
        choices=choices,
        peaks=peaks,
        weights=weights.reshape(jobs, size, -1),
        between=arrays.between_seconds[flat.job, variant].reshape(jobs, size),
        constant=arrays.constant_seconds[flat.job, variant].reshape(jobs, size),
        baseline=none.argmax(axis=1),
        leanest=np.where(there, peaks[:, :, _PROFILED], np.inf).argmin(axis=1),
    )


def _job_pool(
    arrays: CostArrays, solver: PriceSolver, job: int, settings: PoolSettings, also: Sequence[Plans]
) -> tuple[Indices, Indices]:
    """Return the indices of k, shape (m,), and the choices, shape (m, max_units), of one job's plans."""
    generator = np.random.default_rng(settings.seed)
    shape = (settings.worlds, arrays.max_units, arrays.max_precisions)
    worlds = np.exp(settings.cost_error * generator.standard_normal(shape))
    # Half of an error's variance is common to a precision, which decides whether that precision is the best one.
    worlds *= np.exp(settings.cost_error * generator.standard_normal((settings.worlds, 1, shape[2])))
    worlds[0] = 1.0
    fixed = _known(arrays, job, also)
    found = _unique(np.concatenate([fixed, _solved(arrays, solver, job, worlds, settings)]))
    for _ in range(settings.rounds):
        chosen = found[_best(arrays, job, found, worlds, settings)]
        found = _unique(np.concatenate([fixed, chosen, _neighbours(arrays, job, chosen, settings.changes, generator)]))
    kept = found[_best(arrays, job, found, worlds, settings)]
    pool = _unique(np.concatenate([fixed, kept[: settings.size - len(fixed)]]))
    return pool[:, 0], pool[:, 1:]


def _known(arrays: CostArrays, job: int, also: Sequence[Plans]) -> Indices:
    """Return the baseline, the leanest plan of each k, and the further plans, as rows of k and choices."""
    space = arrays.profiles[job].space
    lean = []
    for k in range(int(arrays.num_k[job])):
        _, choices = arrays.encode(job, space.leanest().changed(accumulation_steps=space.accumulation_choices[k]))
        lean.append(_profiled(arrays, job, k, choices, -arrays.unit_kept_bytes[job, k]))
    runs = [row for row, peak in zip(lean, _peaks(arrays, job, np.stack(lean)), strict=True) if peak < _NEVER]
    asked = [np.concatenate([plans.k[job : job + 1], plans.choices[job]]) for plans in also]
    return np.stack([np.zeros(1 + arrays.max_units, dtype=np.int64), *runs, *asked])


def _profiled(arrays: CostArrays, job: int, k: int, choices: Indices, liked: Floats) -> Indices:
    """Return a row in which the preferred choice replaces each choice that could not be profiled."""
    lacks = _lacking(arrays, job)[k]
    other = np.where(lacks, -np.inf, liked).argmax(axis=1)
    return np.concatenate([[k], np.where(lacks[np.arange(len(lacks)), choices], other, choices)])


def _lacking(arrays: CostArrays, job: int) -> NDArray[np.bool_]:
    """Return which choices could not be profiled, if the unit has others; shape (variants, max_units, choices)."""
    missing = arrays.missing[job]
    return np.asarray(missing & ~missing.all(axis=2, keepdims=True))


def _peaks(arrays: CostArrays, job: int, rows: Indices) -> Floats:
    return arrays.peak_bytes(Plans(np.full(len(rows), job), rows[:, 0], rows[:, 1:]))


def _bounds(arrays: CostArrays, job: int, budgets: int) -> Floats:
    """Return geometrically spaced budgets from the leanest plan's peak to the baseline's, and infinity."""
    rows = _known(arrays, job, ())
    peaks = _peaks(arrays, job, rows)
    least = float(peaks[1:].min(initial=_NEVER))
    if peaks[0] >= _NEVER:
        # If the baseline could not be profiled, the plans that keep the most bytes replace it.
        save = np.zeros(arrays.max_units, dtype=np.int64)
        kept = arrays.unit_kept_bytes[job]
        rows = np.stack([_profiled(arrays, job, k, save, kept[k]) for k in range(int(arrays.num_k[job]))])
        peaks = np.append(peaks[1:], _peaks(arrays, job, rows))
    most = float(peaks[peaks < _NEVER].max(initial=least))
    # Small budgets are closer together, since a byte saves the most time there.
    return np.append(np.geomspace(least, max(most, 1.01 * least), budgets - 1), np.inf)


def _solved(arrays: CostArrays, solver: PriceSolver, job: int, worlds: Floats, settings: PoolSettings) -> Indices:
    """Return the price solver's plans for every k, budget and set of costs."""
    budgets = _bounds(arrays, job, settings.budgets)
    ks = np.arange(int(arrays.num_k[job]))
    world, budget, k = (
        axis.reshape(-1) for axis in np.meshgrid(range(len(worlds)), range(len(budgets)), ks, indexing="ij")
    )
    lanes = np.full(len(world), job)
    told = np.where(_lacking(arrays, job), np.inf, arrays.unit_seconds[job])
    seconds = told[None] * np.repeat(worlds[world], len(arrays.numbering.storages), axis=2)[:, None]
    worth = np.where(np.arange(arrays.max_k)[None, :] == k[:, None], 1.0, 1e-9)
    # If none of a variant's choices could be profiled, the solver's rates are NaN and none is taken.
    with np.errstate(invalid="ignore"):
        plans, _ = solver.solve(lanes, budgets[budget], 1.0, worth, seconds)
    return np.concatenate([plans.k[:, None], plans.choices], axis=1)


def _neighbours(arrays: CostArrays, job: int, rows: Indices, most: int, generator: np.random.Generator) -> Indices:
    """Return plans that differ in one unit from given ones: all of them, or at most ``most`` drawn at random."""
    choices = len(arrays.numbering.storages) * int(arrays.num_precisions[job])
    unit, choice = np.nonzero(
        (np.arange(arrays.max_units)[:, None] < arrays.num_units[job])
        & (arrays.recomputable[job][:, None] | (arrays.numbering.storage(np.arange(choices)) == 0))
    )
    changes = len(rows) * len(unit)
    drawn = np.arange(changes) if changes <= most else generator.choice(changes, most, replace=False)
    row, move = np.divmod(drawn, len(unit))
    other = rows[row]
    other[np.arange(len(other)), 1 + unit[move]] = choice[move]
    return other


def _best(arrays: CostArrays, job: int, rows: Indices, worlds: Floats, settings: PoolSettings) -> Indices:
    """Return the indices of the plans that are best for some k, budget and costs, by descending frequency."""
    plans = Plans(np.full(len(rows), job), rows[:, 0], rows[:, 1:])
    variant = arrays.variant(plans)
    peak = arrays.peak_bytes(plans)
    own = np.take_along_axis(arrays.unit_seconds[plans.job, variant], plans.choices[:, :, None], axis=2)[:, :, 0]
    rest = arrays.between_seconds[job, variant] + arrays.constant_seconds[job, variant]
    precision = arrays.numbering.precision(plans.choices)
    fits = (peak[:, None] <= _bounds(arrays, job, settings.budgets)[None, :]) & (peak[:, None] < _NEVER)
    votes = np.zeros(len(rows))
    for number, world in enumerate(worlds):
        seconds = rest + (own * np.take_along_axis(world[None], precision[:, :, None], axis=2)[:, :, 0]).sum(axis=1)
        for k in range(int(arrays.num_k[job])):
            cost = np.where(fits & (rows[:, 0] == k)[:, None], seconds[:, None], np.inf)
            best = cost.argmin(axis=0)
            # The profile's own costs outweigh all random ones.
            np.add.at(votes, best[np.isfinite(cost.min(axis=0))], 1000.0 if number == 0 else 1.0)
    order = np.argsort(-votes, kind="stable")
    return np.asarray(order[votes[order] > 0])


def _unique(rows: Indices) -> Indices:
    """Return rows without repetitions, in the order of their first appearance."""
    # Rows are compared by a random dot product, since sorting whole rows would take most of the time.
    product = rows @ np.random.default_rng(0).integers(-(2**62), 2**62, rows.shape[1])
    _, first = np.unique(product, return_index=True)
    return np.asarray(rows[np.sort(first)])
