"""The fastest plan that fits a batch into a budget, found within microseconds.

All plans worth considering are found once, when a profile is made. At each step their peaks are interpolated to the
batch's size, rounded up, and the fastest plan that fits is taken.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autotune.choices import STORAGES
from autotune.cost_model.cost_arrays import CostArrays, Plans
from autotune.cost_model.plan_pool import LENGTHS, PoolSettings, make_pool
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import SAFETY_MARGIN, fitting
from autotune.cost_model.time_model import seconds_per_step
from autotune.errors import ProfileError
from autotune.mechanics.cutting import unevenness
from autotune.plan import Plan
from autotune.profiling.memory_scaling import Scaling

# One set of costs, which the live run has measured; with more, planning would take seconds.
_SETTINGS = PoolSettings(size=128, worlds=1, budgets=32, rounds=1, changes=1024)
# Relative difference below which predicted peaks count as equal.
_AS_GOOD_AS_EQUAL = 0.01
# A CPU generator's state: the only part of a recomputed unit that does not shrink with the batch.
_STATE_BYTES = 5056


class Placements:
    """The plans of a profile with their peaks at any batch size.

    Attributes:
        profile: the profile.
        scaling: as the argument.

    Args:
        profile: costs of the run.
        budget_bytes: the current budget, whose exact optimum is among the plans; ``None`` for none.
        scaling: bounds of memory at other sizes than the profiled one.
    """

    def __init__(self, profile: Profile, budget_bytes: int | None = None, scaling: Scaling | None = None) -> None:
        self.profile = profile
        self.scaling = scaling or Scaling()
        self._arrays = CostArrays([profile])
        solved = [self._arrays.encode(0, item.plan) for item in fitting(profile, budget_bytes)]
        zero = np.zeros(1, dtype=np.int64)
        pool = make_pool(self._arrays, _SETTINGS, [Plans(zero, np.array([k]), row[None]) for k, row in solved])
        there = pool.there[0]
        rates = np.ones((1, self._arrays.max_units, self._arrays.max_precisions))
        seconds = pool.seconds_per_step(rates, np.ones(1))[0][there]
        k, choices = pool.k[0][there], pool.choices[0][there]
        # Among plans of about the same time, the one that recomputes least comes first.
        recomputed = self._arrays.numbering.recomputes(choices).sum(axis=1)
        order = np.lexsort((recomputed, np.round(seconds / seconds.min(), 4)))
        k, choices = k[order], choices[order]
        self.plans = [self._arrays.decode(0, int(one), row) for one, row in zip(k, choices, strict=True)]
        self.seconds: NDArray[np.float64] = seconds[order]
        self._k = np.array([plan.accumulation_steps for plan in self.plans], dtype=np.int64)
        self._all = np.arange(len(k))
        self._recomputed: NDArray[np.int64] = recomputed[order]
        self._peaks: NDArray[np.float64] = pool.peaks[0][there][order] + _states(self._recomputed)
        # Precisions stay between decisions, and so does k where it sets the samples of a step.
        self._groups: dict[tuple[int, ...], NDArray[np.int64]] = {}
        keys = [self._group_of(int(one), row) for one, row in zip(k, choices, strict=True)]
        for key in dict.fromkeys(keys):
            self._groups[key] = np.array([number for number, other in enumerate(keys) if other == key])
        self._known: dict[Plan, NDArray[np.float64]] = {}
        self._seconds: dict[Plan, float] = {}
        # The last query and its result: with batches of one size, the query is the same at each step.
        self._asked: tuple[tuple[float, float, int], NDArray[np.int64] | None] = ((0.0, 0.0, 0), None)
        self._answer: Plan | None = None

    def group(self, plan: Plan) -> NDArray[np.int64] | None:
        """Return the indices of the plans that may replace a plan at any step, the fastest first; ``None`` for none.

        They have the plan's precisions, and under adaptive batching its k.
        """
        try:
            k, choices = self._arrays.encode(0, plan)
        except ProfileError:
            return None
        return self._groups.get(self._group_of(k, choices))

    def _group_of(self, k: int, choices: NDArray[np.int64]) -> tuple[int, ...]:
        return (k if self.profile.batching == "adaptive" else 0, *self._arrays.numbering.precision(choices).tolist())

    def fastest(
        self, usable_bytes: float, length: float, rows: NDArray[np.int64] | None = None, *, samples: int = 0
    ) -> Plan | None:
        """Return the fastest plan whose predicted peak fits; ``None`` if there is none.

        Args:
            usable_bytes: bytes that plans may use, after the safety margin.
            length: the batch's size relative to the profiled batch.
            rows: indices of the plans to choose from, from :meth:`group`; ``None`` for all plans.
            samples: the batch's samples, if k cuts them as equally as it can; 0 for equal pieces.
        """
        asked, group = (usable_bytes, length, samples), self._asked[1]
        if asked != self._asked[0] or rows is not group:
            self._asked = asked, rows
            self._answer = self._fastest(usable_bytes, length, self._all if rows is None else rows, samples)
        return self._answer

    def _fastest(self, usable_bytes: float, length: float, rows: NDArray[np.int64], samples: int) -> Plan | None:
        # Pieces of the same k are equally unequal.
        for_k = {int(k): length * unevenness(samples, int(k)) for k in np.unique(self._k[rows])}
        fits = np.zeros(len(rows), dtype=bool)
        for k, size in for_k.items():
            of_k = self._k[rows] == k
            fits[of_k] = self._at(self._peaks[rows[of_k]], size) <= usable_bytes
        return self.plans[int(rows[fits.argmax()])] if fits.any() else None

    def peak_bytes(self, plan: Plan, length: float, samples: int = 0) -> float:
        """Return a plan's predicted peak at a batch size; infinite if the profile cannot predict it.

        Args:
            plan: the plan.
            length: the batch's size relative to the profiled batch.
            samples: as for :meth:`fastest`.
        """
        length *= unevenness(samples, plan.accumulation_steps)
        peaks = self._known.get(plan)
        if peaks is None:
            peaks = self._known[plan] = self._peaks_of(plan)
        return float(self._at(peaks, length)[0]) if peaks.size else float("inf")

    def _peaks_of(self, plan: Plan) -> NDArray[np.float64]:
        try:
            k, choices = self._arrays.encode(0, plan)
        except ProfileError:
            return np.empty((0, 0))
        if self._missing(k, choices).any():
            return np.empty((0, 0))
        one = Plans(np.zeros(1, dtype=np.int64), np.array([k]), choices[None])
        recomputed = self._arrays.numbering.recomputes(one.choices).sum(axis=1)
        return np.asarray(self._arrays.peaks_by_length(one, LENGTHS) + _states(recomputed))

    def reaches(self, length: float) -> bool:
        """Return whether peaks are predicted at a batch size: at eight times the profiled size, none is."""
        return bool(self.scaling.at(length) < LENGTHS[-1])

    def with_known_storages(self, plan: Plan) -> Plan:
        """Return a plan with the leanest storage for units in which its own was not seen."""
        try:
            k, choices = self._arrays.encode(0, plan)
        except ProfileError:
            return plan
        unseen = [
            unit.name for unit, lacks in zip(self.profile.units, self._missing(k, choices), strict=False) if lacks
        ]
        return plan.storing(unseen, self.profile.space.storages[-1])

    def _missing(self, k: int, choices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which units' choices the profile has no costs of, shape (max_units,)."""
        return np.asarray(self._arrays.missing[0, k, np.arange(len(choices)), choices])

    def alive_bytes(self, length: float) -> float:
        """Return the most bytes that are alive in the backward pass of a recomputed unit at a batch size."""
        costs = ((name, cost) for segment in self.profile.tables[0].segments for name, cost in segment.costs.items())
        names = {str(storage) for storage in STORAGES if storage.recomputes}
        peaks = [max(cost.backward_peak_bytes) for name, cost in costs if name.partition("/")[2] in names]
        return max(peaks, default=0) * max(self.scaling.at(length), 1.0)

    def seconds_of(self, plan: Plan) -> float:
        """Return a plan's predicted seconds per step at the profiled size; infinite if it cannot be predicted."""
        if plan not in self._seconds:
            try:
                self._seconds[plan] = seconds_per_step(self.profile, plan)
            except ProfileError:
                self._seconds[plan] = float("inf")
        return self._seconds[plan]

    def leanest(self) -> Plan:
        """Return the plan with the smallest predicted peak; among nearly equal ones, the one that recomputes most.

        It is that of the largest batch whose peaks are predicted, where plans differ most.
        """
        peaks = self._peaks[:, -1]
        close = peaks <= (1 + _AS_GOOD_AS_EQUAL) * peaks.min()
        return self.plans[int(np.where(close, self._recomputed, -1).argmax())]

    def _at(self, peaks: NDArray[np.float64], length: float) -> NDArray[np.float64]:
        size = self.scaling.at(length)
        if not self.reaches(length):
            return np.full(len(peaks), np.inf)
        place = max(int(np.searchsorted(LENGTHS, size, side="right")) - 1, 0)
        if size < LENGTHS[0]:
            return peaks[:, 0]
        share = (size - LENGTHS[place]) / (LENGTHS[place + 1] - LENGTHS[place])
        return np.asarray(peaks[:, place] + share * (peaks[:, place + 1] - peaks[:, place]))


def _states(recomputed: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the bytes of generators' states kept for recomputation, which do not shrink with a small batch.

    Args:
        recomputed: shape (plans,), number of recomputed units.
    """
    return np.asarray(_STATE_BYTES * recomputed[:, None] * np.maximum(1 - LENGTHS, 0.0))


def usable(budget_bytes: float | None) -> float:
    """Return the bytes that plans may be predicted to need within a budget; infinite without one."""
    return float("inf") if budget_bytes is None else budget_bytes * (1 - SAFETY_MARGIN)
