"""A plan unit by unit: the choice for each unit, its reason, and the effects of all other choices."""

from __future__ import annotations

from typing import Any

from autotune.plan import Plan
from autotune.report.alternatives import other_choices
from autotune.report.campaign_run import CampaignRun
from autotune.report.explanation import explain_arm, space_of
from autotune.report.strips import plan_strip, storage_look
from autotune.report.svg import Figure


def plan_view(run: CampaignRun, arm: str, plan: Plan) -> dict[str, Any]:
    """Return what a page shows about a plan.

    Args:
        run: the run.
        arm: name of the arm that the plan belongs to.
        plan: the plan.

    Returns:
        ``arm``, ``plan``, the ``reason`` that all units share (empty if reasons differ), a ``note`` on other choices,
        the ``figure``, and ``units``: kind, name, choices in one word each, own reason, and effects of other choices.
    """
    space = space_of([plan]) if run.profile is None else run.profile.space
    steps, *rows = explain_arm(arm, plan, space, run.trials)
    others = {} if run.profile is None else other_choices(run.profile, plan, run.budget_bytes)
    reasons = {row.reason for row in rows}
    shared = reasons.pop() if len(reasons) == 1 else ""
    note = ""
    if others:
        note = (
            "For each unit: the predicted change in time per step and in peak memory if only this unit had another "
            "choice."
        )
    elif run.profile is None:
        note = f"The job had no profile: after {run.to_profile}, the next run says what each choice costs."
    shown = [("steps", "accumulation", [steps.choice], steps), *((*_choice(plan, row.unit), row) for row in rows)]
    return {
        "arm": arm,
        "plan": plan,
        "reason": shared,
        "note": note,
        "figure": plan_figure(arm, plan),
        "units": [
            (kind, name, chips, "" if row.reason == shared else row.reason, others.get(row.unit, ""))
            for kind, name, chips, row in shown
        ],
    }


def plan_figure(arm: str, plan: Plan) -> Figure:
    """Return the plan of an arm as a strip."""
    return plan_strip(f"The plan of {arm}", plan)


def _choice(plan: Plan, unit: str) -> tuple[str, str, list[str]]:
    storage = [plan.storage_of(unit).label] if unit in plan.storage else []
    return storage_look(plan, unit), unit, [str(plan.precision_of(unit)), *storage]
