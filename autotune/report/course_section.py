"""Show how an arm that decides while it trains went: k, noise scale, pressure, precision, and its decisions marked."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.cost_model.profile import Profile
from autotune.plan import Plan
from autotune.report.attached_run import count, recomputed
from autotune.report.campaign_run import CampaignRun
from autotune.report.charts import Mark, Point, Series, chart
from autotune.report.html import Html, element, join, table
from autotune.report.pareto import predicted, samples_per_step
from autotune.report.strips import Course, strip
from autotune.report.svg import Figure

_HEIGHT = 210
_ROWS = 100


def is_live(arm: Mapping[str, Any]) -> bool:
    """Tell whether an arm of ``comparison.json`` changed its plan in any run."""
    return arm.get("plan") is None


def course_section(run: CampaignRun, arm: Mapping[str, Any]) -> Html:
    """Return the figures of the run of an arm that changed its plan most often, and a table of the decisions of all."""
    changes = [len(one["plans"]) - 1 for one in arm["runs"]]
    said = (
        f"Over {count(len(changes), 'seed')} the plan changed {_times(changes)}; drawn is seed "
        f"{_liveliest(arm)['seed']}, where it changed most often."
    )
    drawn = element("div", *(figure.html for figure in course_figures(run, arm)), class_="figures")
    rows = [
        [f"{one['seed']}", f"{entry['step']:,}", str(Plan.from_json(entry["plan"]))]
        for one in arm["runs"]
        for entry in one["plans"]
    ]
    more = f", the first {_ROWS} of them here" if len(rows) > _ROWS else ""
    listed = table(f"Decisions of {arm['name']}", ("seed", "from step", "plan"), rows[:_ROWS], numbers=(1,))
    summary = element("summary", f"{count(len(rows), 'plan')} by seed and step{more}")
    return join([element("p", said), drawn, element("details", summary, listed)])


def course_figures(run: CampaignRun, arm: Mapping[str, Any]) -> list[Figure]:
    """Return the figures of an arm's liveliest run; those of which nothing was recorded are left out."""
    first, name = _liveliest(arm), arm["name"]
    plans = [(entry["step"], Plan.from_json(entry["plan"])) for entry in first["plans"]]
    marks = [Mark(x=step, kind="switch", text=f"step {step:,}: {plan}") for step, plan in plans[1:]]
    end = max(first["steps"], 1)
    windows: Sequence[Mapping[str, Any]] = first.get("windows") or ()
    figures = [_steps(name, plans, marks, end), _choices(name, plans, marks, end)]
    if any(window["peak_bytes"] for window in windows) and run.budget_bytes is not None:
        figures.append(_pressure(name, windows, marks, end, run.budget_bytes))
    if any(window["noise_scale"] is not None for window in windows):
        figures.append(_noise(name, windows, marks, end))
    if run.profile is not None and windows:
        figures.append(_time(run, name, plans, windows, marks, end))
    return [*figures, _storage(name, plans, end)]


def _liveliest(arm: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the run of an arm that changed its plan most often; of several the first."""
    found: Mapping[str, Any] = max(arm["runs"], key=lambda run: len(run["plans"]))
    return found


def time_ratios(run: CampaignRun, record: Mapping[str, Any]) -> list[float]:
    """Return measured over predicted seconds per step of a run's windows that can be compared."""
    plans = [(entry["step"], Plan.from_json(entry["plan"])) for entry in record.get("plans") or ()]
    pairs = _pairs(run, plans, record.get("windows") or ())
    return [measured / told for _, told, measured in pairs if told and measured]


def _pairs(
    run: CampaignRun, plans: Sequence[tuple[int, Plan]], windows: Sequence[Mapping[str, Any]]
) -> list[tuple[int, float | None, float | None]]:
    """Return step, predicted and measured seconds per step of each window."""
    if run.profile is None or not plans:
        return []
    told = {plan: _told_s(run.profile, plan) for _, plan in plans}
    found = []
    for window in windows:
        # A plan holds from its step on; a window's step is the one after it.
        plan = next((plan for step, plan in reversed(plans) if step < window["step"]), plans[0][1])
        found.append((window["step"], told[plan], window["seconds_per_step"]))
    return found


def _steps(name: str, plans: Sequence[tuple[int, Plan]], marks: Sequence[Mark], end: int) -> Figure:
    points: list[Point] = [(step, float(plan.accumulation_steps)) for step, plan in plans]
    series = [Series(name="micro-batches per step (k)", style="one", points=_to_end(points, end))]
    low, high = min(y or 0 for _, y in points), max(y or 0 for _, y in points)
    said = f"k stayed {low:.0f}." if low == high else f"k from {low:.0f} to {high:.0f}, {points[-1][1]:.0f} at the end."
    return chart(f"{name}: accumulation", said, series, marks, unit="k", end=end, height=_HEIGHT)


def _choices(name: str, plans: Sequence[tuple[int, Plan]], marks: Sequence[Mark], end: int) -> Figure:
    low: list[Point] = []
    again: list[Point] = []
    for step, plan in plans:
        units = max(len(plan.precision), 1)
        low.append((step, 100 * sum(choice.is_reduced for choice in plan.precision.values()) / units))
        again.append((step, 100 * len(recomputed(plan)) / max(len(plan.storage), 1)))
    series = [
        Series(name="units that compute in 16 bits", style="one", points=_to_end(low, end)),
        Series(name="recomputed, of those that can be", style="two", points=_to_end(again, end)),
    ]
    said = f"At the end {low[-1][1]:.0f} % of the units compute in 16 bits and {again[-1][1]:.0f} % are recomputed."
    return chart(f"{name}: precision and storage", said, series, marks, unit="%", end=end, height=_HEIGHT)


def _pressure(
    name: str, windows: Sequence[Mapping[str, Any]], marks: Sequence[Mark], end: int, budget_bytes: int
) -> Figure:
    points: list[Point] = [
        (window["step"], 100 * window["peak_bytes"] / (window["memory_budget_bytes"] or budget_bytes))
        if window["peak_bytes"]
        else (window["step"], None)
        for window in windows
    ]
    series = [
        Series(name="measured peak", style="two", points=points, dots=True),
        Series(name="budget", style="limit", points=[(0, 100.0), (end, 100.0)]),
    ]
    highest = max(y for _, y in points if y is not None)
    said = f"The measured peak of each window in percent of its budget: at most {highest:.0f} %."
    return chart(f"{name}: memory pressure", said, series, marks, unit="% of budget", end=end, height=_HEIGHT)


def _noise(name: str, windows: Sequence[Mapping[str, Any]], marks: Sequence[Mark], end: int) -> Figure:
    points: list[Point] = [(window["step"], window["noise_scale"]) for window in windows]
    known = [y for _, y in points if y is not None]
    said = f"The gradient's noise scale at the end of each window: {known[0]:,.0f} at first, {known[-1]:,.0f} at last."
    series = [Series(name="noise scale", style="one", points=points, dots=True)]
    return chart(f"{name}: gradient noise scale", said, series, marks, unit="samples", end=end, height=_HEIGHT)


def _time(
    run: CampaignRun,
    name: str,
    plans: Sequence[tuple[int, Plan]],
    windows: Sequence[Mapping[str, Any]],
    marks: Sequence[Mark],
    end: int,
) -> Figure:
    pairs = _pairs(run, plans, windows)
    told: list[Point] = []
    for step, plan in plans:
        seconds = None if run.profile is None else _told_s(run.profile, plan)
        told.append((step, None if seconds is None else seconds * 1e3))
    seen: list[Point] = [(step, None if value is None else value * 1e3) for step, _, value in pairs]
    series = [
        Series(name="predicted", style="one", points=_to_end(told, end)),
        Series(name="measured, median of a window", style="two", points=seen, dots=True),
    ]
    ratios = [measured / value for _, value, measured in pairs if value and measured]
    middle = f"Steps took {statistics.median(ratios):.2f} of what was predicted, median of windows. " if ratios else ""
    said = f"{middle}The prediction is that of the profile, for the plan of the moment."
    return chart(f"{name}: time per step", said, series, marks, unit="ms", end=end, height=_HEIGHT)


def _told_s(profile: Profile, plan: Plan) -> float | None:
    """Return the predicted seconds of a step; ``None`` for a plan that the profile cannot predict."""
    cost = predicted(profile, plan)
    return None if cost is None else cost.seconds_per_sample * samples_per_step(profile, plan)


def _storage(name: str, plans: Sequence[tuple[int, Plan]], end: int) -> Figure:
    units = list(dict.fromkeys(unit for _, plan in plans for unit in (*plan.precision, *plan.storage)))
    course = Course(
        units=units,
        fixed=frozenset(units) - frozenset(unit for _, plan in plans for unit in plan.storage),
        recomputed=[(step, recomputed(plan)) for step, plan in plans],
        end=end,
    )
    return strip(f"{name}: units over the run", "Which units were recomputed, over the run.", course)


def _to_end(points: list[Point], end: int) -> list[Point]:
    return [*points, (end, points[-1][1])]


def _times(changes: Sequence[int]) -> str:
    low, high = min(changes), max(changes)
    return f"{count(low, 'time')}" if low == high else f"{low:,} to {high:,} times"
