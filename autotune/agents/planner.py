"""Plans from a profile, without training steps: the exact optimum, simpler plans, and a policy's initial plan."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from autotune.agents.policies import POLICIES, planning_policy
from autotune.budget import format_bytes
from autotune.choices import DEFAULT_STORAGES, HASTENING_STORAGES, Precision, Storage
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.paper_equations import optimal_accumulation
from autotune.cost_model.profile import Profile, choice_name
from autotune.cost_model.solver import SAFETY_MARGIN, Goal, fastest_uniform, samples_of_progress, smallest, solve_each
from autotune.cost_model.time_model import seconds_per_step
from autotune.errors import BudgetError
from autotune.plan import Plan

# Relative differences up to this size between predictions for different k are unreliable, because each k is profiled
# separately. Measuring one more plan costs eight steps; missing the best plan slows the whole run.
_CLOSE_FRAC = 0.1
# The same for a uniform plan of compiled units, whose times rest on few steps, against a mixed plan, which is the best
# of very many by predicted times.
_HASTENING_FRAC = 0.25


def close_plans(profile: Profile, budget_bytes: int | None, goal: Goal) -> list[Plan]:
    """Return the exact optimum and the plans that predictions cannot distinguish from it.

    The optimum with ``save`` and ``recompute`` alone comes second, if it is among them: measuring it, too, makes sure
    that further storages never slow a run down. The fastest uniform plan comes next, and the fastest one of compiled
    units, since errors of predicted times flatter mixed plans.

    Args:
        profile: the profile of the job.
        budget_bytes: the memory budget; ``None`` for none.
        goal: the objective.

    Raises:
        BudgetError: if no plan fits; the message gives the smallest feasible budget.
    """
    best, *others = solve_each(profile, budget_bytes, goal)
    frac = max(_CLOSE_FRAC, profile.noise_frac)
    beside = [(fastest_uniform(profile, budget_bytes, goal), frac)]
    if len(profile.space.storages) > len(DEFAULT_STORAGES):
        with contextlib.suppress(BudgetError):
            beside.insert(0, (solve_each(offering(profile, DEFAULT_STORAGES), budget_bytes, goal)[0], frac))
        hastening = fastest_uniform(profile, budget_bytes, goal, HASTENING_STORAGES)
        beside.append((hastening, max(_HASTENING_FRAC, frac)))
    beside += [(one, frac) for one in others]
    close = [one.plan for one, apart in beside if one is not None and one.objective <= best.objective * (1 + apart)]
    return list(dict.fromkeys([best.plan, *close]))


def offering(profile: Profile, storages: Sequence[Storage]) -> Profile:
    """Return a profile without the choices of other storages."""
    return profile.offering(lambda _unit, choice: choice.partition("/")[2] in storages)


def policy_plans(name: str, profile: Profile, budget_bytes: int | None, goal: Goal) -> list[Plan]:
    """Return the initial plan of a policy, followed by the plans of :func:`close_plans`.

    Args:
        name: the policy's name in ``POLICIES``.
        profile: the profile of the job.
        budget_bytes: the memory budget; ``None`` for none.
        goal: the objective.

    Raises:
        BudgetError: if no plan fits.
        InputError: if the policy does not plan from a profile.
    """
    close = close_plans(profile, budget_bytes, goal)
    policy = planning_policy(name)
    with POLICIES.errors_named(name):
        first = profile.space.check(policy.begin(profile, budget_bytes), where=f"policy {name}")
    return [first, *(plan for plan in close if plan != first)]


def greedy_plan(profile: Profile, budget_bytes: int | None, goal: Goal) -> Plan:
    """Return the greedy plan of the k with the best goodput.

    For each k, all units compute in the lowest precision. Until the plan fits, one unit is changed to a leaner storage
    at a time: the change that lowers the peak most per added second.

    Raises:
        BudgetError: if no greedy plan fits.
    """
    usable = float("inf") if budget_bytes is None else budget_bytes * (1 - SAFETY_MARGIN)
    fitting = [
        plan for table in profile.tables if (plan := _greedy_at(profile, table.accumulation_steps, usable)) is not None
    ]
    if not fitting:
        least = smallest(profile)
        raise BudgetError(
            f"memory budget is {format_bytes(budget_bytes or 0)}, and no greedy plan fits",
            where="--memory-budget",
            allowed=f"--method exact, and at least {format_bytes(least.peak_bytes)}",
        )

    def seconds_per_sample(plan: Plan) -> float:
        worth = samples_of_progress(profile, plan.accumulation_steps, goal.noise_scale)
        return seconds_per_step(profile, plan) / worth

    return min(fitting, key=seconds_per_sample)


def densest_plan(profile: Profile, budget_bytes: int | None) -> Plan:
    """Return the baseline's plan at the k with the largest throughput per byte of peak memory, of those that fit.

    Precision and storage stay the baseline's. Throughput is in samples per second, whatever they are worth.

    Raises:
        BudgetError: if the baseline's plan fits at no k.

    Source: eq. 9 of the paper.
    """
    baseline = profile.space.baseline()
    plans = {k: baseline.changed(accumulation_steps=k) for k in profile.accumulation_choices}
    peaks = {k: peak_bytes(profile, plan) for k, plan in plans.items()}
    usable = float("inf") if budget_bytes is None else budget_bytes * (1 - SAFETY_MARGIN)
    fitting = {k: peak for k, peak in peaks.items() if peak <= usable}
    if not fitting:
        raise BudgetError(
            f"memory budget is {format_bytes(budget_bytes or 0)}, and the baseline's precision and storage fit at no k",
            where="--memory-budget",
            allowed=f"at least {format_bytes(math.ceil(min(peaks.values()) / (1 - SAFETY_MARGIN)))}, or --method exact",
        )
    throughput = {k: (1 if profile.batching == "fixed" else k) / seconds_per_step(profile, plans[k]) for k in fitting}
    return plans[optimal_accumulation(throughput, fitting)]


def _greedy_at(profile: Profile, accumulation_steps: int, usable_bytes: float) -> Plan | None:
    table, space = profile.table(accumulation_steps), profile.space
    known = {part.unit: part.costs for part in table.segments if part.unit is not None}

    def offered(name: str, precision: Precision, storage: Storage) -> bool:
        return choice_name(precision, storage) in known[name]

    def lowest(name: str) -> tuple[Precision, Storage]:
        """Return the lowest precision of a unit that could be profiled, with its fastest storage."""
        precisions = [space.lowest_precision, *space.precisions]
        return next((p, s) for p in precisions for s in space.storages_of(name) if offered(name, p, s))

    first = {name: lowest(name) for name in known}
    plan = space.plan(accumulation_steps=accumulation_steps, precision=space.lowest_precision)
    plan = plan.changed(
        precision={**plan.precision, **{name: precision for name, (precision, _) in first.items()}},
        storage={**plan.storage, **{name: storage for name, (_, storage) in first.items() if name in plan.storage}},
    )
    while (peak := peak_bytes(profile, plan)) > usable_bytes:
        seconds = seconds_per_step(profile, plan)
        candidates = []
        for name in space.recomputable:
            allowed = space.storages_of(name)
            for storage in allowed[allowed.index(plan.storage_of(name)) + 1 :]:
                if not offered(name, plan.precision_of(name), storage):
                    continue
                other = plan.storing([name], storage)
                paid = max(seconds_per_step(profile, other) - seconds, 1e-9)
                candidates.append(((peak - peak_bytes(profile, other)) / paid, other))
        if not candidates:
            return None
        plan = max(candidates, key=lambda candidate: candidate[0])[1]
    return plan
