"""The exact solver: the best plan of a profile under a memory budget.

For each k a program chooses one precision and storage per unit; see :mod:`autotune.cost_model.choice_program`. Every
solution is checked with the memory model.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autotune.budget import format_bytes
from autotune.choices import STORAGES
from autotune.cost_model.choice_program import MIB, ChoiceProgram, useful_choices
from autotune.cost_model.goodput import efficiency
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.paper_equations import Weights
from autotune.cost_model.pipeline_ranks import RankPart, rank_parts
from autotune.cost_model.profile import Cost, Profile, StepTable, choice_name
from autotune.cost_model.time_model import seconds_per_step
from autotune.errors import BudgetError, ProfileError
from autotune.plan import Plan, Precision, Storage

# Share of a budget that is left free for memory outside the memory model.
SAFETY_MARGIN = 0.005
# Attempts to find a plan of a rank that fits at each point of a step.
_TIGHTENINGS = 8


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
    found = fitting(profile, budget_bytes, goal)
    if not found:
        require_feasible(profile, budget_bytes or 0)
    return found


def fitting(profile: Profile, budget_bytes: int | None = None, goal: Goal | None = None) -> list[Solution]:
    """Do as :func:`solve_each`, but return no plan where none fits, without the work of telling what would."""
    usable = math.inf if budget_bytes is None else budget_bytes * (1 - SAFETY_MARGIN)
    found = _best_of_each_k(profile, usable, goal or Goal())
    return sorted(found, key=lambda solution: solution.objective)


def fastest_uniform(
    profile: Profile,
    budget_bytes: int | None = None,
    goal: Goal | None = None,
    storages: Sequence[Storage] = STORAGES,
) -> Solution | None:
    """Return the best fitting plan with one precision and one storage for all units; ``None`` if none fits.

    A mixed plan is the best of very many, and so gains from errors of predicted times; a uniform one hardly does.

    Args:
        profile: the profile.
        budget_bytes: memory budget; ``None`` for none.
        goal: the objective; ``None`` for time alone.
        storages: the storages to choose from.
    """
    goal, space = goal or Goal(), profile.space
    usable = math.inf if budget_bytes is None else budget_bytes * (1 - SAFETY_MARGIN)
    plans = {
        space.plan(accumulation_steps=k, precision=precision, storage=storage)
        for k, precision, storage in itertools.product(profile.accumulation_choices, space.precisions, space.storages)
        if storage in storages
    }
    found = []
    for plan in plans:
        # Choices that another one dominates may have no cost.
        with contextlib.suppress(ProfileError):
            found.append(_solution(profile, plan, goal, 0.0))
    fitting = [solution for solution in found if solution.peak_bytes <= usable]
    return min(fitting, key=lambda solution: (solution.objective, str(solution.plan)), default=None)


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
    if profile.pipeline:
        found = (_best_of_ranks(profile, k, usable_bytes, goal) for k in profile.accumulation_choices)
        return [one for one in found if one is not None]
    best: dict[int, Solution] = {}
    for table in (*profile.tables, *(table for tables in profile.uniform_tables.values() for table in tables)):
        solution = _best_at(profile, table, usable_bytes, goal)
        if solution is None:
            continue
        k = solution.plan.accumulation_steps
        if k not in best or solution.objective < best[k].objective:
            best[k] = solution
    return list(best.values())


def _best_of_ranks(profile: Profile, accumulation_steps: int, usable_bytes: float, goal: Goal) -> Solution | None:
    """Return the best plan of a pipeline at one k, or ``None`` if none fits.

    The step is the shorter the less time each rank's units take, and memory binds each rank for itself: so the best
    plans of the ranks, each for its own units, make up the best one of all.
    """
    plan, gap = Plan(accumulation_steps=accumulation_steps), 0.0
    for parts in rank_parts(profile, accumulation_steps):
        found = _best_of_rank(parts, usable_bytes, goal)
        if found is None:
            return None
        own = found[0]
        plan = plan.changed(precision={**plan.precision, **own.precision}, storage={**plan.storage, **own.storage})
        gap = max(gap, found[1])
    return _solution(profile, plan, goal, gap)


def _best_of_rank(parts: Sequence[RankPart], usable_bytes: float, goal: Goal) -> tuple[Plan, float] | None:
    """Return the best plan of a rank's units, and its gap; ``None`` if none fits.

    Args:
        parts: the profiles of the points of the step at which memory may bind.
        usable_bytes: memory that may be used.
        goal: the objective.
    """
    room, bounds = usable_bytes, list[float]()
    for _ in range(_TIGHTENINGS):
        solved = [_best_of_each_k(part.profile, room, goal) for part in parts]
        if not all(solved):
            return None
        # What is best at one point of the step bounds what is best for all.
        bounds = bounds or [one.objective * (1 - one.gap) for (one,) in solved]
        plans = [one.plan for (one,) in solved]
        found = [
            [_solution(part.profile, part.plan(plan), goal, 0.0) for part in parts] for plan in _leaner(plans, parts)
        ]
        peaks = [max(one.peak_bytes for one in points) for points in found]
        fitting = [number for number, peak in enumerate(peaks) if peak <= usable_bytes * (1 + 1e-9)]
        if fitting:
            of_memory = goal.weights.memory / _reference(parts[0].profile, goal)[1]
            higher = [peak - points[0].peak_bytes for peak, points in zip(peaks, found, strict=True)]
            best = found[min(fitting, key=lambda number: found[number][0].objective + of_memory * higher[number])]
            gaps = [1 - bound / one.objective for bound, one in zip(bounds, best, strict=True)]
            return best[0].plan, max(min(gaps), 0.0)
        # What fits at each point for itself does not fit at another one.
        room *= usable_bytes / min(peaks)
    return None


def _leaner(plans: Sequence[Plan], parts: Sequence[RankPart]) -> list[Plan]:
    """Return the plans, and one that has for each unit the choice of them that saves least."""
    if len(plans) == 1:
        return list(plans)
    saved = dict[str, Mapping[str, Cost]]()
    for segment in itertools.chain.from_iterable(part.profile.tables[0].segments for part in parts):
        # A unit has bytes at the points at which its stage is under way.
        if segment.unit is not None and any(cost.saved_bytes for cost in segment.costs.values()):
            saved.setdefault(segment.unit, segment.costs)
    merged = plans[0]
    for unit, costs in saved.items():
        least = min(
            plans, key=lambda plan: costs[choice_name(plan.precision_of(unit), plan.storage_of(unit))].saved_bytes
        )
        merged = merged.changed(precision={**merged.precision, unit: least.precision_of(unit)})
        if unit in merged.storage:
            merged = merged.storing([unit], least.storage_of(unit))
    return [*plans, merged]


def _best_at(profile: Profile, table: StepTable, usable_bytes: float, goal: Goal) -> Solution | None:
    """Return the best plan at one k, or ``None`` if none fits."""
    base_s, base_bytes = _reference(profile, goal)
    options = _options(profile, table, goal, base_s)
    fastest = _fastest(profile, table, options)
    if goal.weights.memory == 0 and fastest is not None and peak_bytes(profile, fastest) <= usable_bytes:
        return _solution(profile, fastest, goal, 0.0)
    room = usable_bytes - profile.static_bytes - table.batch_bytes
    try:
        chosen, gap = ChoiceProgram(table, options, goal.weights.memory * MIB / base_bytes, room).solve()
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


def _fastest(profile: Profile, table: StepTable, options: Mapping[str, Mapping[str, float]]) -> Plan | None:
    """Return the plan with the fastest choice of each unit; ``None`` if it has costs of its own in another table."""
    if not all(options.values()):
        return None
    # Of choices that take as long, one that needs more memory is not useful.
    useful = useful_choices(table, options)
    plan = _plan(profile, table, {unit: min(own, key=own.__getitem__) for unit, own in useful.items()})
    return plan if profile.table_for(plan) is table else None


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


def _options(profile: Profile, table: StepTable, goal: Goal, base_s: float) -> dict[str, dict[str, float]]:
    """Return what the time of each choice of each unit adds to the objective at one k, relative to a reference's."""
    worth = samples_of_progress(profile, table.accumulation_steps, goal.noise_scale)
    per_second = goal.weights.time * profile.calibration.scale / worth / base_s
    # The profile may contain choices that a lock now forbids.
    saved_only = {unit.name for unit in profile.units if not unit.recomputable}
    options: dict[str, dict[str, float]] = {}
    for segment in table.segments:
        if segment.unit is None:
            continue
        own = {
            name: cost.seconds * per_second
            for name, cost in segment.costs.items()
            if segment.unit not in saved_only or name.endswith(f"/{Storage.SAVE}")
        }
        # A choice must have a cost in all calls of the unit.
        former = options.get(segment.unit, dict.fromkeys(own, 0.0))
        options[segment.unit] = {name: former[name] + cost for name, cost in own.items() if name in former}
    return options
