"""The page of an attached run: its result, its progress, and how to repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.plan import Plan
from autotune.report.attached_run import AttachedRun, Decision, verdict
from autotune.report.campaign_plots import size_unit
from autotune.report.plot import Layer, Mark, Plot, Point, Shape, run_plot
from autotune.report.rendering import Table, render
from autotune.report.strips import Course, course_strip
from autotune.report.svg import Figure, figure_of
from autotune.report.time_section import time_table
from autotune.report.wording import count, facts, milliseconds, progress, size

# Share of the run's time above which the tuner counts as expensive.
_EXPENSIVE = 0.01
# Largest number of rows in a table.
_ROWS = 200
_HEIGHT = 300
_RULES = {
    "plan": "the proposal was not a plan",
    "space": "the plan lies outside of what the mode allows",
    "predictable": "its peak cannot be predicted",
    "budget": "no plan like it fits the budget",
    "interval": "too soon after the last switch",
    "gain": "not worth a switch",
}


def page_of(run: AttachedRun) -> str:
    """Return the page of a run."""
    ended = "the log breaks off" if run.ended is None else run.ended
    options = ", ".join(f"{key} {value}" for key, value in run.options.items())
    late = run.trips or run.summary.get("over_budget_steps") or run.ended is None
    return render(
        "attached.html.j2",
        title=f"autotune: {run.name}",
        run=run,
        meta=f"{options}. Ended: {ended}. {run.folder.name}",
        verdict=verdict(run),
        good=not late and (run.overhead_frac or 0.0) <= _EXPENSIVE,
        cards=_cards(run),
        figures=_figures(run),
        times=None if run.parts is None else time_table([("the last window", run.parts)]),
        course=_course(run),
        locked=[(name, reason) for name, reason in run.locks.items() if name not in run.units],
        units=_units(run),
        decisions=_decisions(run),
        events=_events(run),
        profiles=_profiles(run),
        **_windows(run),
        environment=Table(
            label="Environment",
            columns=("what", "value"),
            rows=facts(run.environment),
        ),
    )


def figures_of(run: AttachedRun) -> list[Figure]:
    """Return all figures of a run."""
    return [*_figures(run), _course(run)] if run.units else _figures(run)


def _cards(run: AttachedRun) -> list[tuple[str, str]]:
    return [
        ("steps", progress(run.steps, run.total_steps).removeprefix("step ")),
        ("switches", f"{len(run.schedule):,}"),
        ("trips", f"{len(run.trips):,}"),
        ("highest pressure", f"{max(run.pressures):.0%}" if run.pressures else "no budget"),
        ("tuner's own time", "unknown" if run.overhead_frac is None else f"{run.overhead_frac:.1%}"),
        ("units", f"{len(run.units):,}"),
    ]


def _figures(run: AttachedRun) -> list[Figure]:
    return [figure_of(_memory(run)), figure_of(_time(run))] if run.decisions else []


def _marks(run: AttachedRun) -> list[Mark]:
    refused = [
        Mark(x=one.step, kind="refused", text=f"step {one.step:,}: {one.refused[0]}: {one.refused[1]}")
        for one in run.decisions
        if one.refused is not None
    ]
    switched = [Mark(x=step, kind="switch", text=f"step {step:,}: {plan}") for step, plan in run.schedule]
    return [*refused, *switched, *(Mark(x=s, kind="trip", text=f"step {s:,}: {why}") for s, why in run.trips)]


def _memory(run: AttachedRun) -> Plot:
    predicted = [(one.step, one.predicted_bytes) for one in run.decisions]
    measured = [(one.step, one.measured_bytes) for one in run.decisions]
    budgets = [(one.step, one.budget_bytes) for one in run.decisions]
    unit, bytes_each = size_unit(max((y for _, y in predicted if y), default=1.0))

    def points(values: Sequence[tuple[int, float | None]]) -> list[Point]:
        return [(step, None if value is None else value / bytes_each) for step, value in values]

    layers = [
        Layer(name="predicted peak", look="one", shape=Shape.STEPS, points=points(predicted)),
        Layer(name="measured peak", look="two", shape=Shape.DOTS, points=points(measured)),
    ]
    if any(budget is not None for _, budget in budgets):
        layers.append(Layer(name="budget", look="limit", shape=Shape.STEPS, points=points(budgets)))
    highest = f"At most {max(run.pressures):.0%} of the budget was predicted. " if run.pressures else ""
    described = (
        f"{highest}Predicted for the decided plan and the largest batch since the previous decision; between decisions "
        "each batch may get another storage. On a CPU, peaks are measured on the few steps that are traced."
    )
    return run_plot("Memory at decisions", described, layers, _marks(run), unit=unit, end=run.steps, height=_HEIGHT)


def _time(run: AttachedRun) -> Plot:
    def points(key: str) -> list[Point]:
        return [(row["step"], None if row[key] is None else row[key] * 1e3) for row in run.windows]

    layers = [
        Layer(name="predicted", look="one", shape=Shape.STEPS, points=points("predicted_s")),
        Layer(name="measured, median of a window", look="two", shape=Shape.DOTS, points=points("measured_s")),
    ]
    described = (
        "Milliseconds per step of each window, as if each batch had the profiled size, against the prediction for the "
        "plans of that window. A window without a dot had only steps that were traced."
    )
    return run_plot("Time per step", described, layers, _marks(run), unit="ms", end=run.steps, height=_HEIGHT)


def _course(run: AttachedRun) -> Figure:
    end = "your own plan, which no decision replaced" if run.plan is None else str(run.plan)
    placed = run.summary.get("placed")
    if placed:
        end += (
            f". Not drawn: {count(placed, 'placement')}, each of which recomputed other units for a batch or a budget"
        )
    course = Course(
        units=run.units,
        fixed=frozenset(run.units) - frozenset(run.recomputable),
        plans=run.schedule,
        end=run.steps,
    )
    described = f"Which units the decided plan recomputed, over the run. At its end: {end}."
    return course_strip("The plan over the run", described, course)


def _units(run: AttachedRun) -> Table:
    plan = run.plan or Plan()
    rows = [
        (
            unit,
            plan.storage_of(unit).label,
            str(plan.precision_of(unit)),
            run.locks.get(unit, "" if unit in run.recomputable else "only runs of like blocks can be recomputed"),
        )
        for unit in run.units
    ]
    columns = ("unit", "storage at the end", "precision", "locked because")
    return Table(label="The units at the end of the run", columns=columns, rows=rows)


def _decisions(run: AttachedRun) -> Table:
    """Return the decisions that switched or were refused (all, if there are none) with a summary of all decisions."""
    kept = [one for one in run.decisions if one.switched or one.refused is not None]
    told = f"{count(len(run.decisions), 'decision')}: {len(kept):,} switched or were refused, the others kept the plan."
    refusals = [f"{number:,} by {name} ({_RULES.get(name, 'a rule')})" for name, number in run.refusals.most_common()]
    if refusals:
        told += f" Refused: {', '.join(refusals)}."
    if len(kept) > _ROWS:
        told += f" The first {_ROWS} of them are shown; decisions.jsonl has all."
    columns = ("step", "outcome", "predicted", "measured before", "peak", "pressure", "gain", "proposal", "reason")
    rows = [_decision_row(one) for one in (kept or run.decisions)[:_ROWS]]
    return Table(label="Decisions", columns=columns, rows=rows, numbers=(0, 2, 3, 4, 5, 6), note=told)


def _decision_row(one: Decision) -> list[str]:
    said = [] if one.refused is None else [f"{one.refused[0]}: {one.refused[1]}"]
    if one.repaired:
        said.append(f"repaired by {', '.join(one.repaired)}")
    return [
        f"{one.step:,}",
        "switched" if one.switched else "refused" if one.refused is not None else "kept",
        milliseconds(one.predicted_s),
        milliseconds(one.measured_s),
        size(one.predicted_bytes),
        "" if one.pressure is None else f"{one.pressure:.0%}",
        "" if one.gain is None else f"{one.gain:+z.1%}",
        one.plan,
        "; ".join(said),
    ]


def _events(run: AttachedRun) -> Table:
    found = sorted([*((step, "tripped", why) for step, why in run.trips), *run.others])
    rows = [(f"{step:,}", kind, why) for step, kind, why in found[:_ROWS]]
    return Table(label="Trips and other events", columns=("step", "event", "why"), rows=rows, numbers=(0,))


def _profiles(run: AttachedRun) -> Table:
    rows = []
    for event in run.profiles[-_ROWS:]:
        baseline, share, scores = event.get("baseline") or {}, event.get("square_share"), event.get("scores")
        worst = max((one["measured_bytes"] / one["predicted_bytes"] for one in scores or ()), default=None)
        rows.append(
            [
                f"{event['step']:,}",
                size(event.get("static_bytes")),
                size(event.get("batch_bytes")),
                "" if share is None else f"{share:.2f}",
                milliseconds(baseline.get("seconds")),
                size(baseline.get("peak_bytes")),
                "" if worst is None else f"{worst:.3f} at most",
            ]
        )
    columns = (
        *("step", "weights and states", "batch", "share that may grow", "your baseline's step", "your baseline's peak"),
        "peaks measured, over predicted",
    )
    return Table(label="Profiles", columns=columns, rows=rows, numbers=range(6))


def _windows(run: AttachedRun) -> dict[str, Any]:
    rows = [
        [
            f"{row['step']:,}",
            milliseconds(row["predicted_s"]),
            milliseconds(row["measured_s"]),
            f"{row['time_error_frac']:+z.1%}",
            size(row["predicted_bytes"]),
            size(row["measured_bytes"]),
        ]
        for row in run.windows
        if row["time_error_frac"] is not None
    ]
    columns = ("decided at step", "predicted", "measured", "off by", "predicted peak", "measured peak")
    more = f", the first {_ROWS} of them here" if len(rows) > _ROWS else ""
    table = Table(label="Predicted against measured", columns=columns, rows=rows[:_ROWS], numbers=range(6))
    return {"windows": table, "compared": f"{count(len(rows), 'window')} that can be compared{more}"}
