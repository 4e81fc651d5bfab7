"""A plan unit by unit: the choice for each, its reason, and what every other choice would change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.errors import ProfileError
from autotune.plan import Plan
from autotune.report.alternatives import other_steps, other_units
from autotune.report.campaign_run import CampaignRun
from autotune.report.explanation import explain_arm, space_of
from autotune.report.strips import plan_strip, storage_kind
from autotune.report.svg import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitView:
    """A unit of a plan, or accumulation, as a page shows it.

    Attributes:
        name: its name.
        kind: ``kept``, ``again``, ``fixed`` or ``steps``.
        chips: what was chosen, in a word each.
        reason: why; empty where all have the same reason.
        others: what every other choice would change; empty if that is not known.
    """

    name: str
    kind: str
    chips: Sequence[str]
    reason: str
    others: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan as a page shows it.

    Attributes:
        arm: name of the arm that it belongs to.
        plan: the plan.
        reason: why all units are as they are; empty where reasons differ.
        note: what is said of other choices.
        figure: the plan as a strip.
        units: accumulation and the units.
    """

    arm: str
    plan: Plan
    reason: str
    note: str
    figure: Figure
    units: Sequence[UnitView]


def plan_view(run: CampaignRun, arm: str, plan: Plan) -> PlanView:
    """Return a plan as a page shows it.

    Args:
        run: the run.
        arm: name of the arm that the plan belongs to.
        plan: the plan.
    """
    space = space_of([plan]) if run.profile is None else run.profile.space
    rows, others = explain_arm(arm, plan, space, run.trials), _others(run, plan)
    reasons = {row.reason for row in rows[1:]}
    shared = reasons.pop() if len(reasons) == 1 else ""
    note = ""
    if others:
        note = (
            "Beside each unit: what another choice for it alone would change, in time per step and peak, as the "
            "profile predicts."
        )
    elif run.profile is None:
        note = f"The job had no profile: after autotune profile {run.job}, the next run says what each choice costs."
    units = [
        UnitView(
            name="accumulation" if row.unit == "accumulation_steps" else row.unit,
            kind="steps" if row.unit == "accumulation_steps" else storage_kind(plan, row.unit),
            chips=[row.choice] if row.unit == "accumulation_steps" else _chips(plan, row.unit),
            reason="" if row.reason == shared else row.reason,
            others=others.get(row.unit, ""),
        )
        for row in rows
    ]
    return PlanView(arm=arm, plan=plan, reason=shared, note=note, figure=plan_figure(arm, plan), units=units)


def plan_figure(arm: str, plan: Plan) -> Figure:
    """Return the plan of an arm as a strip."""
    return plan_strip(f"The plan of {arm}", plan)


def _chips(plan: Plan, unit: str) -> list[str]:
    storage = {"kept": ["kept"], "again": ["recomputed"], "fixed": []}[storage_kind(plan, unit)]
    return [str(plan.precision_of(unit)), *storage]


def _others(run: CampaignRun, plan: Plan) -> Mapping[str, str]:
    if run.profile is None:
        return {}
    try:
        units = other_units(run.profile, plan, run.budget_bytes)
    except ProfileError:
        return {}
    return {"accumulation_steps": other_steps(run.profile, plan, run.budget_bytes), **units}
