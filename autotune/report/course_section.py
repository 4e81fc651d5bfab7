"""The course of an arm that changes its plan while it trains: k, precision, pressure, noise scale, time and storage."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.cost_model.profile import Profile
from autotune.plan import Plan
from autotune.report.campaign_run import CampaignRun
from autotune.report.pareto import predicted, samples_per_step
from autotune.report.plot import Layer, Mark, Shape, run_plot
from autotune.report.rendering import Table
from autotune.report.strips import Course, course_strip
from autotune.report.svg import Figure, figure_of
from autotune.report.wording import count

_HEIGHT = 210
_ROWS = 100


def is_live(arm: Mapping[str, Any]) -> bool:
    """Return whether an arm of ``comparison.json`` makes decisions while it trains."""
    return arm.get("plan") is None


def course_view(run: CampaignRun, arm: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a page shows about an arm's course: its name, a note, figures, and the plans by seed and step."""
    changes = [len(one["plans"]) - 1 for one in arm["runs"]]
    low, high = min(changes), max(changes)
    times = count(low, "time") if low == high else f"{low:,} to {high:,} times"
    rows = [
        [f"{one['seed']}", f"{entry['step']:,}", str(Plan.from_json(entry["plan"]))]
        for one in arm["runs"]
        for entry in one["plans"]
    ]
    columns = ("seed", "from step", "plan")
    more = f", the first {_ROWS} of them here" if len(rows) > _ROWS else ""
    return {
        "arm": arm["name"],
        "note": f"Over {count(len(changes), 'seed')} the plan changed {times}; drawn is seed "
        f"{_liveliest(arm)['seed']}, where it changed most often.",
        "figures": course_figures(run, arm),
        "summary": f"{count(len(rows), 'plan')} by seed and step{more}",
        "decisions": Table(label=f"Decisions of {arm['name']}", columns=columns, rows=rows[:_ROWS], numbers=(1,)),
    }


def course_figures(run: CampaignRun, arm: Mapping[str, Any]) -> list[Figure]:
    """Return the figures of an arm's run with the most changes of plan, without those that were not recorded."""
    record = _liveliest(arm)
    windows = record.get("windows") or ()
    course = _Course(arm=arm["name"], plans=_plans(record), windows=windows, end=max(record["steps"], 1))
    found = [_accumulation(course), _choices(course)]
    if any(window["peak_bytes"] for window in windows) and run.budget_bytes is not None:
        found.append(_pressure(course, run.budget_bytes))
    if any(window["noise_scale"] is not None for window in windows):
        found.append(_noise(course))
    if run.profile is not None and windows:
        found.append(_time(course, run.profile))
    return [*found, _storage(course)]


def _liveliest(arm: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first of an arm's runs with the most changes of plan."""
    found: Mapping[str, Any] = max(arm["runs"], key=lambda run: len(run["plans"]))
    return found


def _plans(record: Mapping[str, Any]) -> list[tuple[int, Plan]]:
    return [(entry["step"], Plan.from_json(entry["plan"])) for entry in record.get("plans") or ()]


def time_ratios(run: CampaignRun, record: Mapping[str, Any]) -> list[float]:
    """Return measured divided by predicted seconds per step for each window of a run that can be compared."""
    plans = _plans(record)
    if run.profile is None or not plans:
        return []
    return _ratios(run.profile, plans, record.get("windows") or ())


def _ratios(profile: Profile, plans: Sequence[tuple[int, Plan]], windows: Sequence[Mapping[str, Any]]) -> list[float]:
    told = {plan: _seconds(profile, plan) for _, plan in plans}
    found = []
    for window in windows:
        # A plan applies from its step on; a window's step is the number of steps done at its end.
        plan = next((plan for step, plan in reversed(plans) if step < window["step"]), plans[0][1])
        expected, measured = told[plan], window["seconds_per_step"]
        if expected and measured:
            found.append(measured / expected)
    return found


def _seconds(profile: Profile, plan: Plan) -> float | None:
    """Return the predicted seconds of a step; ``None`` for a plan that the profile cannot predict."""
    cost = predicted(profile, plan)
    return None if cost is None else cost.seconds_per_sample * samples_per_step(profile, plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """One run of an arm: its plans by step, its windows, and its last step."""

    arm: str
    plans: Sequence[tuple[int, Plan]]
    windows: Sequence[Mapping[str, Any]]
    end: int

    def of_plans(self, name: str, look: str, value: Callable[[Plan], float | None]) -> Layer:
        """Return a layer with a value of each plan, as a step line up to the end of the run."""
        points = [(step, value(plan)) for step, plan in self.plans]
        return Layer(name=name, look=look, shape=Shape.STEPS, points=[*points, (self.end, points[-1][1])])

    def of_windows(self, name: str, look: str, value: Callable[[Mapping[str, Any]], float | None]) -> Layer:
        """Return a layer with a value of each window, as dots."""
        points = [(window["step"], value(window)) for window in self.windows]
        return Layer(name=name, look=look, shape=Shape.DOTS, points=points)

    def figure(self, title: str, described: str, unit: str, *layers: Layer) -> Figure:
        """Return a figure over the steps of the run, with marks at changes of plan."""
        marks = [Mark(x=step, kind="switch", text=f"step {step:,}: {plan}") for step, plan in self.plans[1:]]
        title = f"{self.arm}: {title}"
        return figure_of(run_plot(title, described, layers, marks, unit=unit, end=self.end, height=_HEIGHT))


def _accumulation(course: _Course) -> Figure:
    found = [plan.accumulation_steps for _, plan in course.plans]
    low, high = min(found), max(found)
    described = f"k stayed {low}." if low == high else f"k from {low} to {high}, {found[-1]} at the end."
    layer = course.of_plans("micro-batches per step (k)", "one", lambda plan: float(plan.accumulation_steps))
    return course.figure("accumulation", described, "k", layer)


def _choices(course: _Course) -> Figure:
    def in_16_bits(plan: Plan) -> float:
        return 100 * sum(choice.is_reduced for choice in plan.precision.values()) / max(len(plan.precision), 1)

    def again(plan: Plan) -> float:
        return 100 * len(plan.recomputed) / max(len(plan.storage), 1)

    last = course.plans[-1][1]
    return course.figure(
        "precision and storage",
        f"At the end {in_16_bits(last):.0f} % of the units compute in 16 bits and {again(last):.0f} % are recomputed.",
        "%",
        course.of_plans("units that compute in 16 bits", "one", in_16_bits),
        course.of_plans("recomputed, of those that can be", "two", again),
    )


def _pressure(course: _Course, budget_bytes: int) -> Figure:
    def share(window: Mapping[str, Any]) -> float | None:
        peak = window["peak_bytes"]
        return 100 * peak / (window["memory_budget_bytes"] or budget_bytes) if peak else None

    measured = course.of_windows("measured peak", "two", share)
    highest = max(y for _, y in measured.known)
    return course.figure(
        "memory pressure",
        f"The measured peak of each window in percent of its budget: at most {highest:.0f} %.",
        "% of budget",
        measured,
        Layer(name="budget", look="limit", shape=Shape.STEPS, points=[(0, 100.0), (course.end, 100.0)]),
    )


def _noise(course: _Course) -> Figure:
    layer = course.of_windows("noise scale", "one", lambda window: window["noise_scale"])
    first, last = layer.known[0][1], layer.known[-1][1]
    described = f"The gradient's noise scale at the end of each window: {first:,.0f} at first, {last:,.0f} at the end."
    return course.figure("gradient noise scale", described, "samples", layer)


def _time(course: _Course, profile: Profile) -> Figure:
    def in_ms(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * 1e3

    ratios = _ratios(profile, course.plans, course.windows)
    median = f"Steps took {statistics.median(ratios):.2f} of the predicted time, median of windows. " if ratios else ""
    return course.figure(
        "time per step",
        f"{median}The prediction is the profile's time for the current plan.",
        "ms",
        course.of_plans("predicted", "one", lambda plan: in_ms(_seconds(profile, plan))),
        course.of_windows("measured, median of a window", "two", lambda window: in_ms(window["seconds_per_step"])),
    )


def _storage(course: _Course) -> Figure:
    units = list(dict.fromkeys(unit for _, plan in course.plans for unit in (*plan.precision, *plan.storage)))
    strip = Course(
        units=units,
        fixed=frozenset(units) - frozenset(unit for _, plan in course.plans for unit in plan.storage),
        plans=course.plans,
        end=course.end,
    )
    return course_strip(f"{course.arm}: units over the run", "Which units were recomputed, over the run.", strip)
