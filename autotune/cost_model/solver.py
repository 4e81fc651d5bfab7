"""The exact solver: the best plan of a profile under a memory budget.

For each k a mixed-integer program chooses one precision and storage per unit. The memory model is linear in these
choices: a running total of what earlier segments keep, one row per pass of each segment, and one variable per boundary
that is 1 if any neighbour keeps it. HiGHS solves the program; every solution is checked with the memory model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from autotune.budget import format_bytes
from autotune.cost_model.goodput import efficiency
from autotune.cost_model.memory_model import levels, peak_bytes
from autotune.cost_model.paper_equations import Weights
from autotune.cost_model.profile import FIXED, Cost, Profile, StepTable, choice_name
from autotune.cost_model.time_model import seconds_per_step
from autotune.errors import BudgetError, ProfileError
from autotune.plan import Plan, Precision, Storage

# Share of a budget that is left free for memory outside the memory model.
SAFETY_MARGIN = 0.005
_MIB = 2.0**20
# Thousands of equal units have too many equivalent plans to prove the last hundredth of a percent.
_TIME_LIMIT_S = 1.5
# Status of SciPy's `milp` when the time limit is reached.
_TIME_IS_UP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The objective: w1 T + w2 M per sample of progress, relative to the baseline.

    Attributes:
        weights: w1, w2; energy is not predicted.
        noise_scale: tr(Sigma)/|G|^2 in samples. Under adaptive batching it reduces the progress per sample of a larger
            k; ``None`` assumes one batch, at which a step makes half the progress of a noise-free one.
    """

    weights: Weights = field(default_factory=Weights)
    noise_scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A plan and its predicted costs.

    Attributes:
        plan: the plan.
        seconds_per_step: predicted seconds of one step.
        seconds_per_sample: predicted seconds per sample of progress (a sample counts less in larger batches).
        peak_bytes: predicted peak.
        objective: value of the objective.
        gap: upper bound on the relative improvement that is still possible.
        shadow_price: predicted seconds per step that one more GiB would save; ``None`` if it was not computed.
    """

    plan: Plan
    seconds_per_step: float
    seconds_per_sample: float
    peak_bytes: int
    objective: float
    gap: float
    shadow_price: float | None = None


def solve(profile: Profile, budget_bytes: int | None = None, goal: Goal | None = None) -> Solution:
    """Return the best plan whose predicted peak, with the safety margin, fits a budget.

    Args:
        profile: the profile.
        budget_bytes: memory budget; ``None`` for none.
        goal: the objective; ``None`` for time alone.

    Raises:
        BudgetError: if no plan fits; the message gives the smallest feasible budget.
    """
    return solve_each(profile, budget_bytes, goal)[0]


def solve_each(profile: Profile, budget_bytes: int | None = None, goal: Goal | None = None) -> list[Solution]:
    """Return the best fitting plan of every k that has one, the best first; see :func:`solve`."""
    goal = goal or Goal()
    usable = math.inf if budget_bytes is None else budget_bytes * (1 - SAFETY_MARGIN)
    found = _best_of_each_k(profile, usable, goal)
    if not found:
        require_feasible(profile, budget_bytes or 0)
    return sorted(found, key=lambda solution: solution.objective)


def require_feasible(profile: Profile, budget_bytes: int) -> None:
    """Refuse a budget that no plan meets.

    Raises:
        BudgetError: if no plan meets it; the message gives the smallest feasible budget and its plan.
    """
    least = smallest(profile)
    needed = math.ceil(least.peak_bytes / (1 - SAFETY_MARGIN))
    if needed > budget_bytes:
        raise BudgetError(
            f"memory budget is {format_bytes(budget_bytes)}, but the smallest plan ({least.plan}) needs more",
            where="--memory-budget",
            allowed=f"at least {needed} bytes ({format_bytes(needed)})",
        )


def smallest(profile: Profile) -> Solution:
    """Return a plan with the smallest predicted peak, nearly the fastest of these.

    Raises:
        ProfileError: if the profile's numbers are too large for the solver.
    """
    goal = Goal(weights=Weights(time=1e-4, memory=1.0))
    found = _best_of_each_k(profile, math.inf, goal)
    if not found:
        raise ProfileError(
            "has sizes too large for the solver", where=f"profile of {profile.job}", allowed="those of a job"
        )
    return min(found, key=lambda item: item.peak_bytes)


def with_shadow_price(profile: Profile, solution: Solution, budget_bytes: int, goal: Goal | None = None) -> Solution:
    """Return the solution with the shadow price at its budget, found by solving for a 5 % larger budget."""
    more = round(budget_bytes * 1.05)
    relaxed = solve(profile, more, goal)
    saved = max(solution.seconds_per_step - relaxed.seconds_per_step, 0.0)
    return replace(solution, shadow_price=saved / ((more - budget_bytes) / 2**30))


def pareto_front(profile: Profile, points: int = 16, goal: Goal | None = None) -> list[Solution]:
    """Return the best plans at several budgets, the smallest feasible one first, without dominated plans."""
    least, fastest = smallest(profile), solve(profile, None, goal)
    budgets = np.geomspace(least.peak_bytes, max(fastest.peak_bytes, least.peak_bytes), points) / (1 - SAFETY_MARGIN)
    front: list[Solution] = []
    for budget in budgets:
        solution = solve(profile, math.ceil(budget) + 1, goal)
        if not front or solution.seconds_per_sample < front[-1].seconds_per_sample * (1 - 1e-9):
            front.append(solution)
    return front


def _best_of_each_k(profile: Profile, usable_bytes: float, goal: Goal) -> list[Solution]:
    """Return the best fitting plan of every k that has one, with mixed precisions or one 16-bit precision."""
    best: dict[int, Solution] = {}
    for table in (*profile.tables, *(table for tables in profile.uniform_tables.values() for table in tables)):
        solution = _best_at(profile, table, usable_bytes, goal)
        if solution is None:
            continue
        k = solution.plan.accumulation_steps
        if k not in best or solution.objective < best[k].objective:
            best[k] = solution
    return list(best.values())


def _best_at(profile: Profile, table: StepTable, usable_bytes: float, goal: Goal) -> Solution | None:
    """Return the best plan at one k, or ``None`` if none fits."""
    program = _Program(profile, table, usable_bytes, goal)
    try:
        chosen, gap = program.solve()
    except TimeoutError:
        return _leanest_at(profile, table, usable_bytes, goal)
    if chosen is None:
        return None
    plan = _plan(profile, table, chosen)
    peak = peak_bytes(profile, plan)
    if peak > usable_bytes and profile.table_for(plan) is not table:
        # All units use the same 16-bit precision, for which the profile has separate costs.
        return None
    if peak > usable_bytes * (1 + 1e-9):
        raise AssertionError(f"the program's solution needs {peak} bytes, over {usable_bytes:.0f}")
    return _solution(profile, plan, goal, gap)


def _leanest_at(profile: Profile, table: StepTable, usable_bytes: float, goal: Goal) -> Solution | None:
    """Return the leanest plan with one k if it fits: the fallback when the solver reaches its time limit."""
    plan = profile.space.leanest().changed(accumulation_steps=table.accumulation_steps)
    if profile.table_for(plan) is not table or peak_bytes(profile, plan) > usable_bytes:
        return None
    return _solution(profile, plan, goal, gap=1.0)


def _solution(profile: Profile, plan: Plan, goal: Goal, gap: float) -> Solution:
    seconds = seconds_per_step(profile, plan)
    worth = samples_of_progress(profile, plan.accumulation_steps, goal.noise_scale)
    base_s, base_bytes = _reference(profile, goal)
    time_ratio = (seconds / worth) / base_s
    peak = peak_bytes(profile, plan)
    memory_ratio = peak / base_bytes
    return Solution(
        plan=plan,
        seconds_per_step=seconds,
        seconds_per_sample=seconds / worth,
        peak_bytes=peak,
        objective=goal.weights.time * time_ratio + goal.weights.memory * memory_ratio,
        gap=gap,
    )


def _reference(profile: Profile, goal: Goal) -> tuple[float, int]:
    """Return the baseline's seconds per sample of progress and peak; the leanest plan's if it was not profiled."""
    plan = profile.space.baseline()
    try:
        peak = peak_bytes(profile, plan)
    except ProfileError:
        plan = profile.space.leanest()
        peak = peak_bytes(profile, plan)
    worth = samples_of_progress(profile, plan.accumulation_steps, goal.noise_scale)
    return seconds_per_step(profile, plan) / worth, peak


def samples_of_progress(profile: Profile, accumulation_steps: int, noise_scale: float | None) -> float:
    """Return the progress of a step with a given k, in samples at k = 1.

    Args:
        profile: the profile.
        accumulation_steps: k.
        noise_scale: gradient noise scale in samples; ``None`` if unknown.
    """
    single = float(profile.batch_size)
    if profile.batching == "fixed":
        return single
    # An unknown noise scale is assumed to be small, since a large one would overrate a larger k.
    noise = single if noise_scale is None else noise_scale
    return accumulation_steps * single * efficiency(accumulation_steps * single, noise, single)


def _plan(profile: Profile, table: StepTable, chosen: dict[str, str]) -> Plan:
    precision, storage = {}, {}
    for unit in profile.units:
        name = chosen.get(unit.name, choice_name(profile.precisions[0], Storage.SAVE))
        dtype, _, kept = name.partition("/")
        precision[unit.name] = Precision(dtype)
        if unit.recomputable:
            storage[unit.name] = Storage(kept)
    return Plan(accumulation_steps=table.accumulation_steps, precision=precision, storage=storage)


class _Program:
    """The mixed-integer program of one k.

    Columns: the choices of each unit, the boundaries, the running totals, the peak. Memory is in MiB, because values in
    bytes are too large for the solver's tolerances. Logical rows are not scaled, because values in MiB are too small.
    """

    def __init__(self, profile: Profile, table: StepTable, usable_bytes: float, goal: Goal) -> None:
        self._table = table
        self._saved_only = {unit.name for unit in profile.units if not unit.recomputable}
        self._rows: list[tuple[list[int], list[float], float, float]] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._cost: list[float] = []
        self._whole: list[int] = []
        self._options: dict[str, dict[str, int]] = {}
        worth = samples_of_progress(profile, table.accumulation_steps, goal.noise_scale)
        base_s, base_bytes = _reference(profile, goal)
        self._per_second = goal.weights.time * profile.calibration.scale / worth / base_s
        self._per_mib = goal.weights.memory * _MIB / base_bytes
        room = (usable_bytes - profile.static_bytes - table.batch_bytes) / _MIB
        self._peak = self._column(0.0, room, self._per_mib)
        self._infeasible = room < table.update_peak_bytes / _MIB
        self._choose()
        self._remember()

    def solve(self) -> tuple[dict[str, str] | None, float]:
        """Return each unit's choice, or ``None`` if no plan fits; and the relative gap.

        Raises:
            TimeoutError: if the time limit is reached without a solution.
        """
        if self._infeasible:
            return None, 0.0
        rows, columns, values = [], [], []
        for number, (where, what, _, _) in enumerate(self._rows):
            rows += [number] * len(where)
            columns += where
            values += what
        matrix = coo_array((values, (rows, columns)), shape=(len(self._rows), len(self._cost))).tocsr()
        constraints = LinearConstraint(matrix, [row[2] for row in self._rows], [row[3] for row in self._rows])
        result = milp(
            np.array(self._cost),
            integrality=np.array(self._whole),
            bounds=Bounds(np.array(self._lower), np.array(self._upper)),
            constraints=constraints,
            options={"mip_rel_gap": 1e-6, "time_limit": _TIME_LIMIT_S},
        )
        if result.status == _TIME_IS_UP and result.x is None:
            raise TimeoutError
        if result.x is None:
            return None, 0.0
        chosen = {
            unit: max(options, key=lambda name, options=options: result.x[options[name]])  # type: ignore[misc]
            for unit, options in self._options.items()
        }
        return chosen, float(result.mip_gap or 0.0)

    def _column(self, lower: float, upper: float, cost: float = 0.0, *, whole: bool = False) -> int:
        self._lower.append(lower)
        self._upper.append(upper)
        self._cost.append(cost)
        self._whole.append(int(whole))
        return len(self._cost) - 1

    def _row(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        self._rows.append(([column for column, _ in terms], [value for _, value in terms], lower, upper))

    def _choose(self) -> None:
        """Add one column per unit and choice, with its seconds as cost; exactly one of a unit's columns is 1."""
        for segment in self._table.segments:
            if segment.unit is None:
                continue
            if segment.unit not in self._options:
                # The profile may contain choices that a lock now forbids.
                locked = segment.unit in self._saved_only
                names = [name for name in segment.costs if not locked or name.endswith(f"/{Storage.SAVE}")]
                self._options[segment.unit] = {name: self._column(0, 1, whole=True) for name in names}
                self._row([(column, 1.0) for column in self._options[segment.unit].values()], 1.0, 1.0)
            for name, column in self._options[segment.unit].items():
                self._cost[column] += segment.costs[name].seconds * self._per_second

    def _kept(self) -> list[int]:
        """Add one column per boundary, which is at least 1 if a neighbour's choice keeps the boundary."""
        columns = []
        for boundary in self._table.boundaries:
            column = self._column(1.0 if boundary.held else 0.0, 1.0)
            for index, names in boundary.keepers.items():
                unit = self._table.segments[index].unit
                if unit is not None and not boundary.held:
                    options = self._options[unit]
                    self._row([(column, 1.0), *((options[n], -1.0) for n in names if n in options)], 0.0, math.inf)
            columns.append(column)
        return columns

    def _remember(self) -> None:
        """Add the running totals, and the rows by which the peak bounds every pass of every segment."""
        table, kept = self._table, self._kept()
        gradients = [segment.gradient_bytes for segment in table.segments]
        around = levels(gradients, [0] * len(gradients), (), ())
        self._row([(self._peak, 1.0)], table.update_peak_bytes / _MIB, math.inf)
        total = self._column(0.0, 0.0)
        for index in range(len(table.segments)):
            passing = [
                (kept[number], boundary.size_bytes)
                for number, boundary in enumerate(table.boundaries)
                if boundary.born < index <= boundary.last_use
            ]
            # A passing boundary counts in full during forward; the running total contains the share that is kept.
            extra = sum(size for _, size in passing) / _MIB
            less = [(column, size / _MIB) for column, size in passing]
            after = around.gradients_after[index]

            def forward(cost: Cost) -> float:
                return _forward_need(cost, around.gradients_before, later=table.accumulation_steps > 1)

            def backward(cost: Cost, after: int = after) -> float:
                return _backward_need(cost, after, around.gradients_before, later=table.accumulation_steps > 1)

            self._hold(total, less, extra, index, forward)
            self._hold(total, [], 0.0, index, backward)
            following = self._column(0.0, math.inf)
            born = [
                (kept[number], -boundary.size_bytes / _MIB)
                for number, boundary in enumerate(table.boundaries)
                if boundary.born == index
            ]
            terms, fixed = self._terms(index, lambda cost: cost.saved_bytes)
            saved = [(column, -value) for column, value in terms]
            self._row([(following, 1.0), (total, -1.0), *born, *saved], fixed, fixed)
            total = following

    def _hold(
        self,
        total: int,
        less: Sequence[tuple[int, float]],
        extra: float,
        index: int,
        need: Callable[[Cost], float],
    ) -> None:
        terms, fixed = self._terms(index, need)
        self._row(
            [
                (self._peak, 1.0),
                (total, -1.0),
                *less,
                *((column, -value) for column, value in terms),
            ],
            fixed + extra,
            math.inf,
        )

    def _terms(self, index: int, what: Callable[[Cost], float]) -> tuple[list[tuple[int, float]], float]:
        """Return a segment's need in MiB: per choice, or fixed for code between units."""
        segment = self._table.segments[index]
        if segment.unit is None:
            return [], what(segment.costs[FIXED]) / _MIB
        options = self._options[segment.unit]
        return [(column, what(segment.costs[name]) / _MIB) for name, column in options.items()], 0.0


def _forward_need(cost: Cost, gradients: int, *, later: bool) -> float:
    first, second = cost.forward_peak_bytes
    return max(first, gradients + second) if later else first


def _backward_need(cost: Cost, after: int, gradients: int, *, later: bool) -> float:
    first, second = cost.backward_peak_bytes
    return max(after + first, gradients + second) if later else after + first
