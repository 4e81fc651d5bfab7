"""Show a plan unit by unit: what was chosen for each, why, and what each other choice would change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.errors import ProfileError
from autotune.plan import Plan
from autotune.report.alternatives import other_steps, otherwise
from autotune.report.campaign_run import CampaignRun
from autotune.report.explanation import Row, explain_arm, space_of
from autotune.report.html import Html, element, join
from autotune.report.strips import Cell, plan_strip
from autotune.report.svg import Figure

_KINDS = {"kept": "kept for backward", "again": "recomputed", "fixed": "no choice of storage"}


def plan_section(run: CampaignRun, arm: str, plan: Plan) -> Html:
    """Return a plan as a strip and a list of its units with the reason of each choice.

    Args:
        run: the run.
        arm: whose plan it is.
        plan: the plan.
    """
    rows = _rows(run, arm, plan)
    others = _otherwise(run, plan)
    reasons = dict.fromkeys(row.reason for row in rows[1:])
    shared = next(iter(reasons)) if len(reasons) == 1 else None
    said = [element("p", element("strong", f"{arm}: {plan}."), f" {_sentence(shared)}" if shared else "")]
    if others:
        said.append(
            element(
                "p",
                "Beside each unit: what another choice for it alone would change, in time per step and peak, as the "
                "profile predicts.",
                class_="note",
            )
        )
    elif run.profile is None:
        asked = f"The job had no profile: after autotune profile {run.job}, the next run says what each choice costs."
        said.append(element("p", asked, class_="note"))
    items = [_item(row, plan, shared, others.get(row.unit, "")) for row in rows]
    region = element(
        "div",
        element("ul", *items, class_="units"),
        class_="scroll tall",
        tabindex="0",
        role="region",
        aria_label=f"The units of the plan of {arm}",
    )
    return join([*said, plan_figure(arm, plan).html, region])


def plan_figure(arm: str, plan: Plan) -> Figure:
    """Return a plan as a strip."""
    units = list(dict.fromkeys([*plan.precision, *plan.storage]))
    cells = [Cell(unit=name, precision=str(plan.precision_of(name)), storage=_kind(plan, name)) for name in units]
    recomputed = sum(cell.storage == "again" for cell in cells)
    said = (
        f"{len(cells)} units in the order of the forward pass; {recomputed} recomputed; k = {plan.accumulation_steps}."
    )
    return plan_strip(f"The plan of {arm}", said, cells)


def _rows(run: CampaignRun, arm: str, plan: Plan) -> Sequence[Row]:
    space = space_of([plan]) if run.profile is None else run.profile.space
    return explain_arm(arm, plan, space, run.trials)


def _otherwise(run: CampaignRun, plan: Plan) -> Mapping[str, str]:
    if run.profile is None:
        return {}
    try:
        units = otherwise(run.profile, plan, run.budget_bytes)
    except ProfileError:
        return {}
    return {"accumulation_steps": other_steps(run.profile, plan, run.budget_bytes), **units}


def _item(row: Row, plan: Plan, shared: str | None, other: str) -> Html:
    if row.unit == "accumulation_steps":
        kind, chips, name = "steps", [row.choice], "accumulation"
    else:
        kind, name = _kind(plan, row.unit), row.unit
        storage = {"kept": ["kept"], "again": ["recomputed"], "fixed": []}[kind]
        chips = [str(plan.precision_of(row.unit)), *storage]
    parts = [
        element("span", name, class_="unit"),
        element("span", *(element("span", chip, class_="chip") for chip in chips), class_="chips"),
    ]
    if row.reason != shared:
        parts.append(element("span", row.reason, class_="why"))
    if other:
        parts.append(element("span", "otherwise ", other, class_="other"))
    return element("li", *parts, class_=kind)


def _kind(plan: Plan, unit: str) -> str:
    if unit not in plan.storage:
        return "fixed"
    return "again" if plan.storage_of(unit).recomputes else "kept"


def _sentence(text: str) -> str:
    return f"Why: {text}."
