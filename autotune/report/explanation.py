"""Explanations of plans by the rule or method that made them, or by the windows of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.agents.policies import POLICIES
from autotune.agents.rules import RULES, Rule
from autotune.agents.search_methods import METHODS, PlanningMethod
from autotune.budget import format_bytes
from autotune.choices import STORAGES
from autotune.cost_model.profile import Profile, StepTable, choice_name
from autotune.plan import Plan, PlanSpace, Precision, Storage
from autotune.units import Unit

# Ridge weight: with few measured plans, choices are collinear, and effects would explode without it.
_RIDGE = 1.0
_AS_GIVEN = "as given in the plan file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of an explanation.

    Attributes:
        unit: name of the unit, or ``accumulation_steps``.
        kind: class of the unit.
        choice: the plan's choice.
        reason: reason for the choice.
    """

    unit: str
    kind: str
    choice: str
    reason: str


@dataclass(frozen=True, slots=True)
class Effect:
    """The average effect of a choice, as factors against the baseline's choice.

    Attributes:
        time: factor on seconds per step.
        peak: factor on peak bytes.
        windows: number of measured windows that had the choice.
    """

    time: float
    peak: float
    windows: int

    def __str__(self) -> str:
        return f"time {self.time - 1:+z.1%}, peak {self.peak - 1:+z.1%} ({self.windows} windows)"


def _rows(plan: Plan, space: PlanSpace, k_reason: str, unit_reason: Callable[[Unit], str]) -> list[Row]:
    """Return a row for k and one for each unit."""
    rows = [Row(unit="accumulation_steps", kind="", choice=f"k = {plan.accumulation_steps}", reason=k_reason)]
    for unit in space.units:
        storage = f", {plan.storage_of(unit.name)}" if unit.recomputable else ""
        choice = f"{plan.precision_of(unit.name)}{storage}"
        rows.append(Row(unit=unit.name, kind=unit.kind, choice=choice, reason=unit_reason(unit)))
    return rows


def explain_rule(plan: Plan, space: PlanSpace, rule: Rule) -> list[Row]:
    """Return the explanation of a rule's plan."""

    def reason(unit: Unit) -> str:
        precision, found = plan.precision_of(unit.name), rule.precision_reason
        if precision is Precision.INHERIT:
            found = "the precision of the job's own code"
        elif not precision.is_reduced:
            found = rule.unreduced_reason or found
        return found + (f"; {rule.storage_reason}" if unit.recomputable else "")

    return _rows(plan, space, rule.accumulation_reason, reason)


def explain_file(plan: Plan, space: PlanSpace, reason: str = _AS_GIVEN) -> list[Row]:
    """Return the choices of a plan with one reason for all of them."""
    return _rows(plan, space, reason, lambda _: reason)


def explain_trials(plan: Plan, space: PlanSpace, trials: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the explanation of a plan by the planning method that measured it, otherwise by the search's windows."""
    owners = {trial["method"] for trial in trials if Plan.from_json(trial["plan"]) == plan.bare}
    planned = [reason for name, reason in _planning_reasons().items() if name in owners]
    if planned:
        return explain_file(plan, space, planned[-1])
    return explain_search(plan, space, trials)


def explain_arm(name: str, plan: Plan, space: PlanSpace, trials: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the explanation of the plan that an arm is launched with.

    Args:
        name: name of the arm: a rule, a method, a plan file or a policy.
        plan: its plan.
        space: a space that contains the plan.
        trials: records of ``trials.jsonl``, of all methods.
    """
    if name in RULES:
        own_rule = RULES.registered.get(name)
        # Another package's rule is not loaded only to be explained.
        return (
            explain_file(plan, space, "chosen by the rule") if own_rule is None else explain_rule(plan, space, own_rule)
        )
    if name in (reasons := _planning_reasons()):
        return explain_file(plan, space, reasons[name])
    own = [trial for trial in trials if trial["method"] == name]
    if own:
        return explain_search(plan, space, own)
    return explain_file(plan, space, "chosen by the policy" if name in POLICIES else _AS_GIVEN)


def _planning_reasons() -> dict[str, str]:
    """Return the explanation of each method that plans from a profile, by name; load no other package."""
    methods = METHODS.registered.items()
    return {name: method.explanation for name, method in methods if isinstance(method, PlanningMethod)}


def space_of(plans: Sequence[Plan]) -> PlanSpace:
    """Return the smallest space that contains some plans, for jobs without a profile."""
    storage = dict.fromkeys(name for plan in plans for name in plan.storage)
    precision = dict.fromkeys([Precision.FP32, *(choice for plan in plans for choice in plan.precision.values())])
    units = dict.fromkeys([*(name for plan in plans for name in plan.precision), *storage])
    return PlanSpace(
        units=tuple(
            Unit(name=name, kind="", recomputable=name in storage, parameter_names=(), num_parameters=0)
            for name in units
        ),
        accumulation_choices=tuple(sorted({1, *(plan.accumulation_steps for plan in plans)})),
        precisions=tuple(precision),
        storages=STORAGES,
    )


def explain_search(plan: Plan, space: PlanSpace, trials: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the explanation of a plan from a search: each choice with its average effect over the windows."""
    effects, baseline = estimate_effects(space, trials), space.baseline()

    def told(*keys: tuple[str, str]) -> str:
        found = [f"{choice}: {effects[key, choice]}" for key, choice in keys if (key, choice) in effects]
        return "; ".join(found) or "as in the baseline; no window had another choice that was better"

    def reason(unit: Unit) -> str:
        precision, keys = plan.precision_of(unit.name), []
        if precision != baseline.precision_of(unit.name):
            keys.append((f"precision {unit.name}", str(precision)))
        if unit.recomputable:
            keys.append((f"storage {unit.name}", str(plan.storage_of(unit.name))))
        return told(*keys)

    return _rows(plan, space, told(("k", f"k = {plan.accumulation_steps}")), reason)


def estimate_effects(space: PlanSpace, trials: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Effect]:
    """Return the average effect of each choice, by a ridge regression of log time and log peak on all choices.

    Args:
        space: the space; effects are relative to its baseline's choices.
        trials: records of ``trials.jsonl``; windows that failed are left out.
    """
    good = [
        trial["measurement"] | {"choices": _choices(space, Plan.from_json(trial["plan"]))}
        for trial in trials
        if trial["measurement"]["failure"] is None and trial["measurement"]["seconds_per_step"]
    ]
    columns = sorted({key for row in good for key in row["choices"]})
    if not columns:
        return {}
    matrix = np.array([[key in row["choices"] for key in columns] for row in good], dtype=float)
    centred = matrix - matrix.mean(axis=0)
    penalty = centred.T @ centred + _RIDGE * np.eye(len(columns))
    factors = []
    for name in ("seconds_per_step", "peak_bytes"):
        target = np.log([row[name] or math.nan for row in good])
        factors.append(np.exp(np.linalg.solve(penalty, centred.T @ (target - target.mean()))))
    counts = matrix.sum(axis=0).astype(int)
    return {
        key: Effect(float(time), float(peak), int(count))
        for key, time, peak, count in zip(columns, *factors, counts, strict=True)
    }


def _choices(space: PlanSpace, plan: Plan) -> set[tuple[str, str]]:
    """Return the choices in which a plan differs from the baseline."""
    baseline = space.baseline()
    found = set()
    if plan.accumulation_steps != baseline.accumulation_steps:
        found.add(("k", f"k = {plan.accumulation_steps}"))
    for unit in space.units:
        if plan.precision_of(unit.name) != baseline.precision_of(unit.name):
            found.add((f"precision {unit.name}", str(plan.precision_of(unit.name))))
        if plan.storage_of(unit.name) is not baseline.storage_of(unit.name):
            found.add((f"storage {unit.name}", str(plan.storage_of(unit.name))))
    return found


def unit_costs(profile: Profile, plan: Plan) -> dict[str, str]:
    """Return the profiled cost of the plan's choice for each unit, and what each other storage saves and costs."""
    table, texts = profile.table_for(plan), {}
    for unit in profile.units:
        totals = _totals(table, unit, plan.precision_of(unit.name))
        chosen, saving = totals.get(plan.storage_of(unit.name)), totals.pop(Storage.SAVE, None)
        if chosen is None:
            continue
        text = f"{chosen[0] * 1e3:.1f} ms, keeps {format_bytes(chosen[1])}"
        if saving is not None:
            for storage, (seconds, kept_bytes) in totals.items():
                saved, paid = format_bytes(max(saving[1] - kept_bytes, 0)), (seconds - saving[0]) * 1e3
                text += f"; {storage.act} saves {saved} " + (
                    f"for {paid:.1f} ms" if paid >= 0 else f"and {-paid:.1f} ms"
                )
        texts[unit.name] = text
    return texts


def _totals(table: StepTable, unit: Unit, precision: Precision) -> dict[Storage, tuple[float, int]]:
    """Return the seconds and the kept bytes of all calls of a unit, by storage, as far as they were profiled."""
    segments, totals = [segment for segment in table.segments if segment.unit == unit.name], {}
    for storage in STORAGES if unit.recomputable else STORAGES[:1]:
        name = choice_name(precision, storage)
        costs = [segment.costs[name] for segment in segments if name in segment.costs]
        if costs and len(costs) == len(segments):
            totals[storage] = sum(cost.seconds for cost in costs), sum(cost.saved_bytes for cost in costs)
    return totals
