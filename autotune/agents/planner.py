"""Plan from a profile, without a single step of the job: the exact optimum, and a greedy rule beside it."""

from __future__ import annotations

from autotune.budget import format_bytes
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import SAFETY_MARGIN, Goal, samples_of_progress, smallest, solve_each
from autotune.cost_model.time_model import seconds_per_step
from autotune.errors import BudgetError
from autotune.plan import Plan, Storage

PLANNERS = ("greedy", "exact", "planner", "ppo")
# How far predictions of different k were seen to be apart from what was then measured: each k is profiled by itself, at
# another time. To measure one more plan costs eight steps, to miss the best one a share of the whole run.
_CLOSE_FRAC = 0.1


def planned(method: str, profile: Profile, budget_bytes: int | None, goal: Goal) -> list[Plan]:
    """Return the plans that a planner proposes, the best first: those that the predictions cannot tell apart.

    Args:
        method: one of ``PLANNERS``.
        profile: the profile.
        budget_bytes: the memory budget; ``None`` for none.
        goal: what is minimised.

    Raises:
        BudgetError: if no plan fits; the message names the smallest budget that can be met.
    """
    if method == "greedy":
        return [greedy_plan(profile, budget_bytes, goal)]
    solutions = solve_each(profile, budget_bytes, goal)
    limit = solutions[0].objective * (1 + max(_CLOSE_FRAC, profile.noise_frac))
    close = [solution.plan for solution in solutions if solution.objective <= limit]
    if method == "exact":
        return close
    from autotune.agents.planner_policy import PlannerPolicy
    from autotune.agents.policy_folder import shipped_policy

    shipped = shipped_policy()
    policy = shipped if method == "ppo" else PlannerPolicy("planner", shipped.settings)
    # What the policy would launch with; the solver's plans that the predictions cannot tell from the best follow.
    first = policy.begin(profile, budget_bytes)
    return [first, *(plan for plan in close if plan != first)]


def greedy_plan(profile: Profile, budget_bytes: int | None, goal: Goal) -> Plan:
    """Return the k with the best goodput, and placements by bytes saved per second paid.

    For each k all units compute in the lowest precision; as long as the plan does not fit, the unit whose recomputation
    lowers the peak most per second is recomputed.

    Raises:
        BudgetError: if no k can be made to fit.
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


def _greedy_at(profile: Profile, accumulation_steps: int, usable_bytes: float) -> Plan | None:
    space = profile.space
    plan = space.plan(accumulation_steps=accumulation_steps, precision=space.lowest_precision)
    while (peak := peak_bytes(profile, plan)) > usable_bytes:
        seconds = seconds_per_step(profile, plan)
        candidates = []
        for name in space.recomputable:
            if plan.storage_of(name) is Storage.SAVE:
                other = plan.changed(storage={**plan.storage, name: Storage.RECOMPUTE})
                paid = max(seconds_per_step(profile, other) - seconds, 1e-9)
                candidates.append(((peak - peak_bytes(profile, other)) / paid, other))
        if not candidates:
            return None
        plan = max(candidates, key=lambda candidate: candidate[0])[1]
    return plan
