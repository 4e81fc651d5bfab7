"""The integer program of one k: the choice of each unit with which the step costs least and its peak fits.

The memory model is linear in the choices: the level in each pass of each segment is the sum of what earlier segments
keep and of what the running one needs. Of thousands of levels few reach the peak, so a row is added only when a
solution violates it. The linear relaxation is nearly integral, since few rows share many units. A small program over
the choices that cost next to nothing more than those of the relaxation finds a plan. The difference of the two
objectives tells which choices no better plan can contain, and a last program without these proves the best plan.

Source: the core of knapsack problems, with reduced-cost fixing (Balas and Zemel, 1980).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_array, csr_array, vstack

from autotune.cost_model.memory_model import levels
from autotune.cost_model.profile import FIXED, Boundary, Cost, Segment, StepTable

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]
_Terms = list[tuple[int, float]]
# Values in bytes are too large for the solver's tolerances.
MIB = 2.0**20
_TOLERANCE_MIB = 1e-6
_RELATIVE_GAP = 1e-6
# Thousands of equal units have too many equivalent plans to prove the last hundredth of a percent.
_TIME_LIMIT_S = 1.5
# Choices beside the relaxation's own with which the search for a plan begins, and the factor by which they grow.
_CORE, _GROWTH = 100, 10
# A step is cut into so many stretches; of each, the most violated row is added.
_STRETCHES = 16
_PEAK = 0
_TIME_IS_UP = 1


@dataclass(frozen=True, slots=True)
class _Levels:
    """The levels of all passes as linear functions of the columns, in MiB.

    Attributes:
        segment: shape (entries,), segment of each entry, ascending; an entry is a choice of a segment's unit.
        column: same shape, its column.
        saved: same shape, what the segment keeps.
        needs: shape (2, entries), what its forward and its backward pass need.
        fixed_saved: shape (segments,), what code between units keeps.
        fixed_needs: shape (2, segments), what its passes need.
        born: shape (boundaries,), the segment that allocates each boundary.
        last_use: same shape, the last segment whose forward pass needs it.
        size: same shape.
        kept: same shape, column that is 1 if it stays until backward.
    """

    segment: Indices
    column: Indices
    saved: Floats
    needs: Floats
    fixed_saved: Floats
    fixed_needs: Floats
    born: Indices
    last_use: Indices
    size: Floats
    kept: Indices

    def at(self, values: Floats) -> Floats:
        """Return the levels under a solution, shape (2, segments)."""
        count = len(self.fixed_saved)
        chosen = values[self.column]
        saved = self.fixed_saved + np.bincount(self.segment, self.saved * chosen, count)
        staying = self.size * values[self.kept]
        base = np.cumsum(saved) - saved + self._from(self.born, staying, count)
        leaving = self.size - staying
        passing = self._from(self.born, leaving, count) - self._from(self.last_use, leaving, count)
        needs = [fixed + np.bincount(self.segment, own * chosen, count) for fixed, own in self._each_pass()]
        return np.stack([base + passing + needs[0], base + needs[1]])

    def _each_pass(self) -> zip[tuple[Floats, Floats]]:
        return zip(self.fixed_needs, self.needs, strict=True)

    @staticmethod
    def _from(segment: Indices, size: Floats, count: int) -> Floats:
        """Return the sum of the sizes of all boundaries after whose segment each segment runs."""
        return np.asarray(np.cumsum(np.bincount(segment + 1, size, count + 1)[: count + 1])[:count])

    def row(self, backward: int, segment: int, columns: int) -> tuple[Floats, float]:
        """Return the coefficients of a level, shape (columns,), and its constant part."""
        row = np.zeros(columns)
        earlier, own = np.searchsorted(self.segment, (segment, segment + 1))
        np.add.at(row, self.column[:earlier], self.saved[:earlier])
        np.add.at(row, self.column[earlier:own], self.needs[backward, earlier:own])
        there = self.born < segment
        passing = there & (segment <= self.last_use) & (not backward)
        staying = there & ~passing
        np.add.at(row, self.kept[staying], self.size[staying])
        fixed = self.fixed_saved[:segment].sum() + self.fixed_needs[backward, segment] + self.size[passing].sum()
        return row, float(fixed)


@dataclass(frozen=True, slots=True)
class _Found:
    """A solution: the columns' values, the objective, and an upper bound on the relative improvement left."""

    values: Floats
    cost: float
    gap: float


class ChoiceProgram:
    """The program of one k.

    Args:
        table: the costs at this k.
        options: for each unit, the part of each of its choices in the objective.
        cost_per_mib: part of a MiB of the peak in the objective.
        room_bytes: largest peak above the static bytes; infinity for any.
    """

    def __init__(
        self, table: StepTable, options: Mapping[str, Mapping[str, float]], cost_per_mib: float, room_bytes: float
    ) -> None:
        options = useful_choices(table, options)
        pairs = [(unit, name) for unit, names in options.items() for name in names]
        self._columns = {pair: number for number, pair in enumerate(pairs, start=_PEAK + 1)}
        choices, boundaries = len(self._columns), len(table.boundaries)
        self._count = 1 + choices + boundaries
        self._cost = np.zeros(self._count)
        self._cost[_PEAK] = cost_per_mib
        self._cost[1 : 1 + choices] = [cost for names in options.values() for cost in names.values()]
        self._lower, self._upper = np.zeros(self._count), np.ones(self._count)
        self._lower[_PEAK], self._upper[_PEAK] = table.update_peak_bytes / MIB, room_bytes / MIB
        self._lower[1 + choices :] = [boundary.held for boundary in table.boundaries]
        self._is_choice = np.zeros(self._count, dtype=bool)
        self._is_choice[1 : 1 + choices] = True
        self._levels = _level_functions(table, self._columns, 1 + choices)
        self._one_each = self._matrix(
            [[(self._columns[unit, name], 1.0) for name in options[unit]] for unit in options]
        )
        self._rows = self._matrix(self._keeping(table.boundaries, table.segments, 1 + choices))
        self._most = np.zeros(self._rows.shape[0])
        self._known: set[int] = set()
        self._deadline = time.monotonic() + _TIME_LIMIT_S

    def solve(self) -> tuple[dict[str, str] | None, float]:
        """Return each unit's choice, or ``None`` if no plan fits; and an upper bound on the relative improvement left.

        Raises:
            TimeoutError: if the time limit is reached without a plan.
        """
        if self._lower[_PEAK] > self._upper[_PEAK]:
            return None, 0.0
        relaxed = self._relaxed()
        if relaxed is None:
            return None, 0.0
        bound, extra = relaxed
        best, allowed, size = None, extra < 0, _CORE
        while best is None and not allowed.all():
            allowed = _cheapest(extra, size)
            best = self._integral(allowed)
            size *= _GROWTH
        if best is None:
            return None, 0.0
        left = best.cost - bound
        possible = extra <= left
        if left <= _RELATIVE_GAP * abs(best.cost):
            best = replace(best, gap=max(left, 0.0) / abs(best.cost) if best.cost else 0.0)
        elif (possible & ~allowed).any():
            best = self._proven(replace(best, gap=left / abs(best.cost)), possible)
        return {unit: name for (unit, name), column in self._columns.items() if best.values[column] > 0.5}, best.gap

    def _proven(self, best: _Found, possible: Mask) -> _Found:
        """Return the best plan of the possible choices, or the given one with the gap that is left when time is up."""
        try:
            found = self._integral(possible)
        except TimeoutError:
            return best
        if found is None:
            return best
        return replace(min(found, best, key=lambda one: one.cost), gap=min(found.gap, best.gap))

    def _relaxed(self) -> tuple[float, Floats] | None:
        """Return the relaxation's objective, and what each column would add to it at least; ``None`` if none fits."""
        bounds = np.stack([self._lower, np.where(self._is_choice, np.inf, self._upper)], axis=1)
        equal = np.ones(self._one_each.shape[0])
        while True:
            result = linprog(
                self._cost, self._rows, self._most, self._one_each, equal, bounds=bounds, method="highs-ds"
            )
            if result.x is None:
                return None
            if not self._add_violated(result.x):
                return float(result.fun), np.where(self._is_choice, result.lower.marginals, 0.0)

    def _integral(self, allowed: Mask) -> _Found | None:
        """Return the best plan of the allowed choices; ``None`` if none fits.

        Raises:
            TimeoutError: if the time limit is reached without a plan.
        """
        bounds = Bounds(self._lower, np.where(allowed, self._upper, 0.0))
        one_each = LinearConstraint(self._one_each, 1.0, 1.0)
        while True:
            seconds = max(self._deadline - time.monotonic(), 0.0)
            result = milp(
                self._cost,
                integrality=self._is_choice,
                bounds=bounds,
                constraints=(one_each, LinearConstraint(self._rows, -np.inf, self._most)),
                options={"mip_rel_gap": _RELATIVE_GAP, "time_limit": seconds},
            )
            if result.x is None:
                if result.status == _TIME_IS_UP:
                    raise TimeoutError
                return None
            if not self._add_violated(result.x):
                return _Found(result.x, float(result.fun), float(result.mip_gap or 0.0))

    def _add_violated(self, values: Floats) -> bool:
        """Add the most violated rows; return whether there were any."""
        over = (self._levels.at(values) - values[_PEAK]).reshape(-1)
        worst = [part[over[part].argmax()] for part in np.array_split(np.arange(len(over)), _STRETCHES) if len(part)]
        new = [int(place) for place in worst if over[place] > _TOLERANCE_MIB and int(place) not in self._known]
        rows = [self._levels.row(*divmod(place, len(over) // 2), self._count) for place in new]
        for row, _ in rows:
            row[_PEAK] -= 1.0
        if rows:
            self._known.update(new)
            self._rows = vstack([self._rows, csr_array(np.stack([row for row, _ in rows]))], format="csr")
            self._most = np.concatenate([self._most, [-fixed for _, fixed in rows]])
        return bool(rows)

    def _keeping(self, boundaries: Sequence[Boundary], segments: Sequence[Segment], first: int) -> list[_Terms]:
        """Return rows by which a boundary is kept if any choice keeps it; the first boundary's column is given."""
        rows = []
        for number, boundary in enumerate(boundaries):
            for segment, names in boundary.keepers.items():
                unit = segments[segment].unit or ""
                own = [self._columns[unit, name] for name in names if (unit, name) in self._columns]
                if own and not boundary.held:
                    rows.append([*((column, 1.0) for column in own), (first + number, -1.0)])
        return rows

    def _matrix(self, rows: Sequence[_Terms]) -> csr_array:
        entries = [(number, column, value) for number, terms in enumerate(rows) for column, value in terms]
        where = np.array(entries, dtype=float).reshape(-1, 3)
        at = where[:, :2].astype(np.int64)
        return coo_array((where[:, 2], (at[:, 0], at[:, 1])), shape=(len(rows), self._count)).tocsr()


def useful_choices(table: StepTable, options: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the choices of each unit without those that are no better than another in any respect."""
    facts: dict[str, dict[str, list[float]]] = {
        unit: {name: [cost] for name, cost in own.items()} for unit, own in options.items()
    }
    for segment in table.segments:
        for name, known in facts.get(segment.unit or "", {}).items():
            cost = segment.cost(name)
            known += [cost.saved_bytes, *cost.forward_peak_bytes, *cost.backward_peak_bytes]
    for boundary in table.boundaries:
        for index, names in boundary.keepers.items():
            for name, known in facts.get(table.segments[index].unit or "", {}).items():
                known.append(name in names)
    return {
        unit: {
            name: options[unit][name] for name, useful in zip(own, _front(list(own.values())), strict=True) if useful
        }
        for unit, own in facts.items()
    }


def _front(facts: Sequence[Sequence[float]]) -> Mask:
    """Return which rows no other row is below in all columns; of equal rows, the first one."""
    rows = np.array(facts).reshape(len(facts), -1 if facts else 0)
    at_most = (rows[:, None] <= rows[None, :]).all(axis=2)
    first = np.arange(len(rows))[:, None] < np.arange(len(rows))[None, :]
    return ~np.asarray((at_most & (~at_most.T | first)).any(axis=0))


def _level_functions(table: StepTable, columns: Mapping[tuple[str, str], int], first: int) -> _Levels:
    """Return the levels of a step; the first boundary's column is given."""
    gradients = [segment.gradient_bytes for segment in table.segments]
    around = levels(gradients, [0] * len(gradients), (), ())
    later = table.accumulation_steps > 1

    def terms(index: int, cost: Cost) -> tuple[float, float, float]:
        forward, backward = cost.forward_peak_bytes, cost.backward_peak_bytes
        needs = (
            (forward[0], around.gradients_before + forward[1]),
            (around.gradients_after[index] + backward[0], around.gradients_before + backward[1]),
        )
        return cost.saved_bytes / MIB, *(max(need[: 1 + later]) / MIB for need in needs)  # type: ignore[return-value]

    fixed = np.zeros((3, len(table.segments)))
    entries = []
    for index, segment in enumerate(table.segments):
        if segment.unit is None:
            fixed[:, index] = terms(index, segment.costs[FIXED])
        else:
            own = ((columns.get((segment.unit, name)), cost) for name, cost in segment.costs.items())
            entries += [(index, column, *terms(index, cost)) for column, cost in own if column is not None]
    found = np.array(entries, dtype=float).reshape(-1, 5)
    boundaries = np.array([(b.born, b.last_use, b.size_bytes / MIB) for b in table.boundaries]).reshape(-1, 3)
    return _Levels(
        segment=found[:, 0].astype(np.int64),
        column=found[:, 1].astype(np.int64),
        saved=found[:, 2],
        needs=found[:, 3:].T,
        fixed_saved=fixed[0],
        fixed_needs=fixed[1:],
        born=boundaries[:, 0].astype(np.int64),
        last_use=np.minimum(boundaries[:, 1].astype(np.int64), len(table.segments) - 1),
        size=boundaries[:, 2],
        kept=first + np.arange(len(boundaries)),
    )


def _cheapest(extra: Floats, count: int) -> Mask:
    """Return the columns that add nothing, and so many of the others that add least."""
    free = int((extra <= 0).sum())
    most = np.partition(extra, min(free + count, len(extra)) - 1)[min(free + count, len(extra)) - 1]
    return np.asarray(extra <= most)
