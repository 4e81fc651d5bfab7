"""Plan for many lanes at once: memory gets a price per byte, found by bisection, at which every unit decides alone.

Each unit's useful choices form a chain from its fastest to its leanest, and each link of the chain gives bytes for
seconds. Taking links in the order of bytes per second, until the plan fits, is what a price per byte comes to
(Everett 1963: a Lagrange multiplier for a resource). Against the exact solver the plans are within a percent or two;
they cost microseconds, not milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.physics.cost_arrays import CostArrays, Floats, Indices, Plans

# Seconds that a link costs at least: what is free is taken first, but not for an infinite rate.
_FREE_S = 1e-12


@dataclass(frozen=True, slots=True)
class Chains:
    """Hold each unit's chain of choices, and the order in which all links of a row are taken.

    Attributes:
        vertex: shape (rows, max_units, links + 1), the choice after so many of the unit's links.
        rank: shape (rows, max_units, links), when each link is taken: 1 for a row's first; beyond all for none.
        count: shape (rows,), links in all.
    """

    vertex: Indices
    rank: Indices
    count: Indices

    def choices(self, rows: Indices, taken: Indices) -> Indices:
        """Return every unit's choice once the first links of a row are taken.

        Args:
            rows: shape (n,).
            taken: shape (n,), how many links.
        """
        steps = (np.take(self.rank, rows, axis=0) <= taken[:, None, None]).sum(axis=2)
        return np.take_along_axis(np.take(self.vertex, rows, axis=0), steps[:, :, None], axis=2)[:, :, 0]


def make_chains(seconds: Floats, size: Floats, allowed: NDArray[np.bool_]) -> Chains:
    """Return the chains of units whose choices cost seconds and bytes.

    Args:
        seconds: shape (rows, max_units, choices).
        size: the same, in bytes.
        allowed: the same, which choices a unit has; of a unit that is not there, none.
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
    """Plan for many lanes of many jobs.

    Args:
        arrays: what the jobs cost.
    """

    def __init__(self, arrays: CostArrays) -> None:
        self.arrays = arrays
        rows = len(arrays.profiles) * arrays.max_k
        choice = np.arange(arrays.max_choices)
        unit = np.arange(arrays.max_units)
        there = unit[None, :] < arrays.num_units[:, None]
        has = choice[None, :] < 2 * arrays.num_precisions[:, None]
        kept = arrays.recomputable[:, :, None] | (choice % 2 == 0)
        allowed = np.repeat(there[:, :, None] & has[:, None, :] & kept, arrays.max_k, axis=0)
        shape = (rows, arrays.max_units, arrays.max_choices)
        self._chains = make_chains(arrays.unit_seconds.reshape(shape), arrays.unit_kept_bytes.reshape(shape), allowed)

    def solve(
        self, job: Indices, budget_bytes: Floats, length: Floats | float = 1.0, worth: Floats | None = None
    ) -> tuple[Plans, NDArray[np.bool_]]:
        """Return a plan per lane, and whether its predicted peak fits.

        Args:
            job: shape (n,).
            budget_bytes: shape (n,); infinity for none.
            length: factor on activations, as for :meth:`CostArrays.peak_bytes`.
            worth: shape (n, max_k), what a step at each k is worth; ``None`` counts all k the same. Time per worth is
                minimised.

        Returns:
            The plans; of lanes where nothing fits, the leanest that the chains reach.
        """
        arrays, lanes = self.arrays, len(job)
        length = np.broadcast_to(np.asarray(length, dtype=np.float64), (lanes,))
        worth = np.ones((lanes, arrays.max_k)) if worth is None else worth
        bound = self._fastest(job, length) / worth
        order = np.argsort(bound, axis=1, kind="stable")
        best_k, best_choices = np.zeros(lanes, dtype=np.int64), np.zeros((lanes, arrays.max_units), dtype=np.int64)
        best, fits = np.full(lanes, np.inf), np.zeros(lanes, dtype=bool)
        least = np.full(lanes, np.inf)
        for place in range(arrays.max_k):
            k = order[:, place]
            # Where even the unlimited plan at this k is slower than what was found, there is nothing to look for.
            open_ = (k < arrays.num_k[job]) & (np.take_along_axis(bound, k[:, None], 1)[:, 0] < best)
            at = np.flatnonzero(open_)
            if not len(at):
                break
            plans, peak = self._fit(job[at], k[at], budget_bytes[at], length[at])
            cost = arrays.seconds_per_step(plans, length[at]) / worth[at, plans.k]
            fit = peak <= budget_bytes[at]
            better = np.where(fit, cost < best[at], ~fits[at] & (peak < least[at]))
            chosen = at[better]
            best_k[chosen], best_choices[chosen] = plans.k[better], plans.choices[better]
            least[chosen] = peak[better]
            won = at[better & fit]
            best[won], fits[won] = cost[better & fit], True
        return Plans(job=job, k=best_k, choices=best_choices), fits

    def _fastest(self, job: Indices, length: Floats) -> Floats:
        """Return the seconds per step of each k's fastest plan, shape (n, max_k)."""
        lanes, count = len(job), self.arrays.max_k
        k = np.tile(np.arange(count), lanes)
        repeated = np.repeat(job, count)
        rows = repeated * count + k
        plans = Plans(job=repeated, k=k, choices=self._chains.choices(rows, np.zeros(len(rows), dtype=np.int64)))
        return self.arrays.seconds_per_step(plans, np.repeat(length, count)).reshape(lanes, count)

    def _fit(self, job: Indices, k: Indices, budget: Floats, length: Floats) -> tuple[Plans, Floats]:
        """Return the plan with the fewest links taken that fits, by bisection, and its peak."""
        rows = job * self.arrays.max_k + k

        def at(lanes: Indices, taken: Indices) -> tuple[Plans, Floats]:
            plans = Plans(job=job[lanes], k=k[lanes], choices=self._chains.choices(rows[lanes], taken))
            return plans, self.arrays.peak_bytes(plans, length[lanes])

        low, high = np.zeros(len(job), dtype=np.int64), self._chains.count[rows]
        open_ = np.flatnonzero(low < high)
        while len(open_):
            middle = (low[open_] + high[open_]) // 2
            fits = at(open_, middle)[1] <= budget[open_]
            high[open_] = np.where(fits, middle, high[open_])
            low[open_] = np.where(fits, low[open_], middle + 1)
            open_ = open_[low[open_] < high[open_]]
        return at(np.arange(len(job)), high)
