"""A fast solver for many lanes at once: a price per byte of memory, found by bisection, decides for each unit alone.

Each unit's useful choices form a chain from its fastest to its leanest, and each link saves bytes at a cost in seconds.
Taking links in descending order of bytes per second until the plan fits is equivalent to a price per byte (Everett
1963: a Lagrange multiplier for a resource). Plans are within one or two percent of the exact solver's, and take
microseconds instead of milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.cost_model.cost_arrays import CostArrays, Floats, Indices, Plans

# Smallest cost of a link in seconds, so that free links come first at a finite rate.
_FREE_S = 1e-12


@dataclass(frozen=True, slots=True)
class Chains:
    """Each unit's chain of choices, and the order in which all links of a row are taken.

    Attributes:
        vertex: shape (rows, max_units, links + 1), a unit's choice after 0, 1, ... of its links.
        rank: shape (rows, max_units, links), position of each link in its row's order, from 1; absent links come last.
        count: shape (rows,), number of links.
    """

    vertex: Indices
    rank: Indices
    count: Indices

    def choices(self, rows: Indices, taken: Indices) -> Indices:
        """Return every unit's choice after the first links of its row, shape (n, max_units).

        Args:
            rows: shape (n,), indices of rows.
            taken: shape (n,), number of links to take.
        """
        steps = (np.take(self.rank, rows, axis=0) <= taken[:, None, None]).sum(axis=2)
        return np.take_along_axis(np.take(self.vertex, rows, axis=0), steps[:, :, None], axis=2)[:, :, 0]


def make_chains(seconds: Floats, size: Floats, allowed: NDArray[np.bool_]) -> Chains:
    """Return the chains for the seconds and bytes of each choice.

    Args:
        seconds: shape (rows, max_units, choices), seconds of each choice.
        size: same shape, bytes of each choice.
        allowed: same shape, whether a unit has a choice; all false for padding.
    """
    rows, units, choices = seconds.shape
    fastest = np.argmin(np.where(allowed, seconds, np.inf), axis=2)
    vertex, rates = [fastest], []
    for _ in range(choices - 1):
        here = vertex[-1][:, :, None]
        paid = np.maximum(seconds - np.take_along_axis(seconds, here, axis=2), _FREE_S)
        gained = np.take_along_axis(size, here, axis=2) - size
        rate = np.where(allowed & (gained > 0), gained / paid, 0.0)
        best = np.argmax(rate, axis=2)
        best_rate = np.take_along_axis(rate, best[:, :, None], axis=2)[:, :, 0]
        vertex.append(np.where(best_rate > 0, best, vertex[-1]))
        rates.append(best_rate)
    rate = np.stack(rates, axis=2).reshape(rows, -1)
    order = np.argsort(-rate, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(1, rate.shape[1] + 1), order.shape), axis=1)
    rank[rate <= 0] = rate.shape[1] + 2
    return Chains(
        vertex=np.stack(vertex, axis=2),
        rank=rank.reshape(rows, units, choices - 1),
        count=(rate > 0).sum(axis=1),
    )


class PriceSolver:
    """A solver for many lanes of many jobs.

    Args:
        arrays: costs of the jobs.
    """

    def __init__(self, arrays: CostArrays) -> None:
        self.arrays = arrays
        choice = np.arange(arrays.max_choices)
        unit = np.arange(arrays.max_units)
        there = unit[None, :] < arrays.num_units[:, None]
        has = arrays.numbering.precision(choice)[None, :] < arrays.num_precisions[:, None]
        kept = arrays.recomputable[:, :, None] | (arrays.numbering.storage(choice) == 0)
        own = there[:, :, None] & has[:, None, :] & kept
        # A variant for one 16-bit precision allows no other precision.
        regime = np.arange(arrays.variants) // arrays.max_k
        within = (regime[:, None] == 0) | (arrays.numbering.precision(choice)[None, :] == regime[:, None])
        # Shape (jobs, variants, max_units, choices).
        self._allowed = own[:, None] & within[None, :, None, :] & ~arrays.missing
        shape = (-1, arrays.max_units, arrays.max_choices)
        self._chains = make_chains(
            arrays.unit_seconds.reshape(shape), arrays.unit_kept_bytes.reshape(shape), self._allowed.reshape(shape)
        )
        self._valid = (np.arange(arrays.variants) % arrays.max_k < arrays.num_k[:, None]) & (
            regime < arrays.num_precisions[:, None]
        )

    def solve(
        self,
        job: Indices,
        budget_bytes: Floats,
        length: Floats | float = 1.0,
        worth: Floats | None = None,
        unit_seconds: Floats | None = None,
    ) -> tuple[Plans, NDArray[np.bool_]]:
        """Return a plan per lane, and whether its predicted peak fits.

        Args:
            job: shape (n,), number of each lane's job.
            budget_bytes: shape (n,), memory budgets; infinity for none.
            length: factor on activations, as for :meth:`CostArrays.peak_bytes`.
            worth: shape (n, max_k), progress of a step with each k; ``None`` if all are equal. The solver minimises
                seconds per progress.
            unit_seconds: shape (n, variants, max_units, max_choices), seconds of the units; ``None`` takes the
                profiles.

        Returns:
            The plans; if none fits, the leanest one on the chains.
        """
        lanes = _Lanes(self, job, budget_bytes, length, unit_seconds)
        worth = np.ones((len(job), self.arrays.max_k)) if worth is None else worth
        bound = np.where(self._valid[job], lanes.fastest() / np.tile(worth, self.arrays.regimes), np.inf)
        order = np.argsort(bound, axis=1, kind="stable")
        best = _Best(len(job), self.arrays.max_units)
        for place in range(self.arrays.variants):
            variant = order[:, place]
            # Skip lanes where even the fastest plan without a budget is slower than the best one so far.
            least = np.take_along_axis(bound, variant[:, None], 1)[:, 0]
            at = np.flatnonzero((least < best.cost) & (least < np.inf))
            if not len(at):
                break
            plans, peak, seconds = lanes.fit(at, variant[at])
            best.take(at, plans, peak, seconds / worth[at, plans.k], peak <= budget_bytes[at])
        return Plans(job=job, k=best.k, choices=best.choices), best.fits

    def chains(self, job: Indices, unit_seconds: Floats | None) -> tuple[Chains, Indices]:
        """Return chains with one row per variant, and the number of each lane's first row."""
        arrays = self.arrays
        if unit_seconds is None:
            return self._chains, job * arrays.variants
        shape = (-1, arrays.max_units, arrays.max_choices)
        chains = make_chains(
            unit_seconds.reshape(shape),
            arrays.unit_kept_bytes[job].reshape(shape),
            self._allowed[job].reshape(shape),
        )
        return chains, np.arange(len(job)) * arrays.variants


class _Lanes:
    """The planning problem of each lane."""

    def __init__(
        self,
        solver: PriceSolver,
        job: Indices,
        budget: Floats,
        length: Floats | float,
        unit_seconds: Floats | None,
    ) -> None:
        self._arrays = solver.arrays
        self._job = job
        self._budget = budget
        self._length = np.broadcast_to(np.asarray(length, dtype=np.float64), job.shape)
        self._unit_seconds = unit_seconds
        self._chains, self._first = solver.chains(job, unit_seconds)

    def fastest(self) -> Floats:
        """Return the seconds per step of each variant's fastest plan, shape (n, variants)."""
        count = self._arrays.variants
        lanes = np.repeat(np.arange(len(self._job)), count)
        variant = np.tile(np.arange(count), len(self._job))
        plans = self._plans(lanes, variant, np.zeros(len(lanes), dtype=np.int64))
        return self._seconds(lanes, plans).reshape(-1, count)

    def fit(self, lanes: Indices, variant: Indices) -> tuple[Plans, Floats, Floats]:
        """Return, for some lanes, the plan with the fewest links that fits, its peak and its seconds."""
        low, high = np.zeros(len(lanes), dtype=np.int64), self._chains.count[self._first[lanes] + variant]
        open_ = np.flatnonzero(low < high)
        while len(open_):
            middle = (low[open_] + high[open_]) // 2
            peak = self._peak(lanes[open_], self._plans(lanes[open_], variant[open_], middle))
            fits = peak <= self._budget[lanes[open_]]
            high[open_] = np.where(fits, middle, high[open_])
            low[open_] = np.where(fits, low[open_], middle + 1)
            open_ = open_[low[open_] < high[open_]]
        plans = self._plans(lanes, variant, high)
        return plans, self._peak(lanes, plans), self._seconds(lanes, plans)

    def _plans(self, lanes: Indices, variant: Indices, taken: Indices) -> Plans:
        choices = self._chains.choices(self._first[lanes] + variant, taken)
        return Plans(job=self._job[lanes], k=variant % self._arrays.max_k, choices=choices)

    def _peak(self, lanes: Indices, plans: Plans) -> Floats:
        return self._arrays.peak_bytes(plans, self._length[lanes])

    def _seconds(self, lanes: Indices, plans: Plans) -> Floats:
        own = None if self._unit_seconds is None else self._unit_seconds[lanes, self._arrays.variant(plans)]
        return self._arrays.seconds_per_step(plans, self._length[lanes], own)


class _Best:
    """The best plan of each lane so far: the cheapest that fits, or the one with the smallest peak if none fits."""

    def __init__(self, lanes: int, max_units: int) -> None:
        self.k = np.zeros(lanes, dtype=np.int64)
        self.choices = np.zeros((lanes, max_units), dtype=np.int64)
        self.cost, self.fits = np.full(lanes, np.inf), np.zeros(lanes, dtype=bool)
        self._least = np.full(lanes, np.inf)

    def take(self, at: Indices, plans: Plans, peak: Floats, cost: Floats, fits: NDArray[np.bool_]) -> None:
        """Update the best plan of some lanes with one more plan each."""
        better = np.where(fits, cost < self.cost[at], ~self.fits[at] & (peak < self._least[at]))
        chosen, won = at[better], at[better & fits]
        self.k[chosen], self.choices[chosen] = plans.k[better], plans.choices[better]
        self._least[chosen] = peak[better]
        self.cost[won], self.fits[won] = cost[better & fits], True
