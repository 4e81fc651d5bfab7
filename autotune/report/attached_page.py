"""Make the page of an attached run: what it came to, how it went, and how to repeat it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.budget import format_bytes
from autotune.report.attached_run import AttachedRun, Decision, count, recomputed, verdict
from autotune.report.charts import Mark, Point, Series, chart
from autotune.report.html import Html, cards, element, join, page, section, table
from autotune.report.standing import told_steps
from autotune.report.strips import Course, strip
from autotune.report.svg import Figure

# Share of the run's time from which the tuner counts as expensive.
_EXPENSIVE = 0.01
# Rows of the table of decisions; those that changed or refused something come first.
_ROWS = 200
_SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_RULES = {
    "plan": "the proposal was not a plan",
    "space": "the plan lies outside of what the mode allows",
    "predictable": "its peak cannot be predicted",
    "budget": "nothing like it fits the budget",
    "interval": "too soon after the last switch",
    "gain": "not worth a switch",
}


def page_of(run: AttachedRun) -> str:
    """Return a run's page."""
    return page(
        f"autotune: {run.name}",
        _head(run),
        _figures(run),
        section("The plan, unit by unit", _plan(run)),
        section("Decisions", _decisions(run)),
        section("Trips and other events", _events(run)),
        section("What the predictions rest on", _profiles(run)),
        section("Predicted against measured", _windows(run)),
        section("Environment", _environment(run)),
        section("Repeat it", _repeat(run)),
    )


def _head(run: AttachedRun) -> Html:
    options = ", ".join(f"{key} {value}" for key, value in run.options.items())
    ended = "the log breaks off" if run.ended is None else run.ended
    expensive = (run.overhead_frac or 0.0) > _EXPENSIVE
    late = run.trips or run.summary.get("over_budget_steps") or run.ended is None or expensive
    figures = [
        ("steps", told_steps(run.steps, run.total_steps).removeprefix("step ")),
        ("switches", f"{len(run.schedule):,}"),
        ("trips", f"{len(run.trips):,}"),
        ("highest pressure", f"{max(run.pressures):.0%}" if run.pressures else "no budget"),
        ("tuner's own time", "unknown" if run.overhead_frac is None else f"{run.overhead_frac:.1%}"),
        ("units", f"{len(run.units):,}"),
    ]
    return join(
        [
            element("h1", f"{run.name}, attached"),
            element("p", f"{options}. Ended: {ended}. {run.folder.name}", class_="meta"),
            element("p", verdict(run), class_="verdict warn" if late else "verdict"),
            cards(figures),
        ]
    )


def _figures(run: AttachedRun) -> Html:
    if not run.decisions:
        return element("p", "The run ended before its first decision: there is nothing to draw.", class_="note")
    drawn = [figure.html for figure in (_memory(run), _time(run))]
    return section("Over the run", element("div", *drawn, class_="figures"))


def figures_of(run: AttachedRun) -> list[Figure]:
    """Return a run's figures."""
    drawn = [_memory(run), _time(run)] if run.decisions else []
    return [*drawn, _course(run)] if run.units else drawn


def _marks(run: AttachedRun) -> list[Mark]:
    switched = [Mark(x=step, kind="switch", text=f"step {step:,}: {plan}") for step, plan in run.schedule]
    refused = [
        Mark(x=one.step, kind="refused", text=f"step {one.step:,}: {one.refused[0]}: {one.refused[1]}")
        for one in run.decisions
        if one.refused is not None
    ]
    return [*refused, *switched, *(Mark(x=s, kind="trip", text=f"step {s:,}: {why}") for s, why in run.trips)]


def _memory(run: AttachedRun) -> Figure:
    known = [one.predicted_bytes for one in run.decisions if one.predicted_bytes]
    unit, size = next(((n, s) for n, s in _SIZES if max(known, default=1.0) >= s), _SIZES[-1])

    def points(values: Sequence[tuple[int, float | None]]) -> list[Point]:
        return [(step, None if value is None else value / size) for step, value in values]

    budgets = points([(one.step, one.budget_bytes) for one in run.decisions])
    predicted = points([(one.step, one.predicted_bytes) for one in run.decisions])
    measured = points([(one.step, one.measured_bytes) for one in run.decisions])
    series = [
        Series(name="predicted peak", style="one", points=predicted),
        Series(name="measured peak", style="two", points=measured, dots=True),
    ]
    if any(y is not None for _, y in budgets):
        series.append(Series(name="budget", style="limit", points=budgets))
    highest = f"At most {max(run.pressures):.0%} of the budget was predicted. " if run.pressures else ""
    said = (
        f"{highest}Predicted for the decided plan and the largest batch since the decision before; between decisions "
        "each batch may get another storage. On a CPU, peaks are measured on the few steps that are traced."
    )
    return chart("Memory at decisions", said, series, _marks(run), unit=unit, end=run.steps)


def _time(run: AttachedRun) -> Figure:
    ran = [(row["step"], row) for row in run.windows]
    predicted: list[Point] = [(step, _to_ms(row["predicted_s"])) for step, row in ran]
    measured: list[Point] = [(step, _to_ms(row["measured_s"])) for step, row in ran]
    series = [
        Series(name="predicted", style="one", points=predicted),
        Series(name="measured, median of a window", style="two", points=measured, dots=True),
    ]
    said = (
        "Milliseconds per step of each window, as if each batch had the profiled size, against what was predicted of "
        "the plans that it ran under. A window without a dot had only steps that were traced."
    )
    return chart("Time per step", said, series, _marks(run), unit="ms", end=run.steps)


def _plan(run: AttachedRun) -> Html:
    if not run.units:
        return element("p", "The model has no units.")
    plan = run.plan
    names = frozenset() if plan is None else recomputed(plan)
    rows = [
        [
            unit,
            "recomputed" if unit in names else "kept",
            "inherit" if plan is None else str(plan.precision_of(unit)),
            run.locks.get(unit, "" if unit in run.recomputable else "only runs of like blocks can be recomputed"),
        ]
        for unit in run.units
    ]
    columns = ("unit", "storage at the end", "precision", "locked because")
    units = table("The units at the end of the run", columns, rows)
    others = [f"{name}: {reason}" for name, reason in run.locks.items() if name not in run.units]
    listed = element("ul", *(element("li", text) for text in others)) if others else Html("")
    summary = element("summary", f"All {len(run.units)} units at the end, and why some are locked")
    return join([_course(run).html, listed, element("details", summary, units)])


def _course(run: AttachedRun) -> Figure:
    end = "your own plan: none was ever put in its place" if run.plan is None else str(run.plan)
    course = Course(
        units=run.units,
        fixed=frozenset(run.units) - frozenset(run.recomputable),
        recomputed=[(step, recomputed(one)) for step, one in run.schedule],
        end=run.steps,
    )
    said = f"Which units the decided plan recomputed, over the run. At its end: {end}."
    return strip("The plan over the run", said, course)


def _decisions(run: AttachedRun) -> Html:
    if not run.decisions:
        return Html("")
    kept = [one for one in run.decisions if one.switched or one.refused is not None]
    told = f"{count(len(run.decisions), 'decision')}: {len(kept):,} switched or were refused, the others kept the plan."
    refusals = [f"{number:,} by {name} ({_RULES.get(name, 'a rule')})" for name, number in run.refusals.most_common()]
    if refusals:
        told += f" Refused: {', '.join(refusals)}."
    shown = (kept or list(run.decisions))[:_ROWS]
    if len(kept) > _ROWS:
        told += f" The first {_ROWS} of them are shown; all stand in decisions.jsonl."
    columns = (
        "step",
        "outcome",
        "predicted",
        "measured before",
        "peak",
        "pressure",
        "gain",
        "proposal",
        "what was said",
    )
    rows = [_decision_row(one) for one in shown]
    return join([element("p", told), table("Decisions", columns, rows, numbers=(0, 2, 3, 4, 5, 6)) if rows else ""])


def _decision_row(one: Decision) -> list[object]:
    said = [] if one.refused is None else [f"{one.refused[0]}: {one.refused[1]}"]
    if one.repaired:
        said.append(f"repaired by {', '.join(one.repaired)}")
    return [
        f"{one.step:,}",
        "switched" if one.switched else "refused" if one.refused is not None else "kept",
        _ms(one.predicted_s),
        _ms(one.measured_s),
        "" if one.predicted_bytes is None else format_bytes(one.predicted_bytes),
        "" if one.pressure is None else f"{one.pressure:.0%}",
        "" if one.gain is None else f"{one.gain:+.1%}",
        one.plan,
        "; ".join(said),
    ]


def _events(run: AttachedRun) -> Html:
    found = sorted([*((step, "tripped", why) for step, why in run.trips), *run.others])
    if not found:
        return element("p", "None: no trip, no late answer, no budget that was refused.")
    rows = [[f"{step:,}", kind, why] for step, kind, why in found[:_ROWS]]
    return table("Trips and other events", ("step", "event", "why"), rows, numbers=(0,))


def _worst_score(scores: Sequence[Mapping[str, int]]) -> str:
    """Return the highest of measured peaks over what was predicted of them beforehand."""
    return f"{max(one['measured_bytes'] / one['predicted_bytes'] for one in scores):.3f} at most" if scores else ""


def _profiles(run: AttachedRun) -> Html:
    if not run.profiles:
        reason = run.locks.get("profile", "the run ended before it was profiled")
        return element("p", f"There is no profile: {reason}.")
    rows = []
    for event in run.profiles[-_ROWS:]:
        baseline, share = event.get("baseline") or {}, event.get("square_share")
        rows.append(
            [
                f"{event['step']:,}",
                _size(event.get("static_bytes")),
                _size(event.get("batch_bytes")),
                "" if share is None else f"{share:.2f}",
                _ms(baseline.get("seconds")),
                _size(baseline.get("peak_bytes")),
                _worst_score(event.get("scores") or ()),
            ]
        )
    columns = (
        "step",
        "weights and states",
        "batch",
        "share that may grow",
        "your baseline's step",
        "your baseline's peak",
        "peaks measured, over predicted",
    )
    said = (
        "The run's own steps were traced and timed, and the profile made anew as more of them were. Beyond the largest "
        "batch that was traced, up to that share of the memory is taken to grow with the square of a batch's size. The "
        "baseline is your own plan, as predicted."
    )
    return join([element("p", said), table("Profiles", columns, rows, numbers=tuple(range(6)))])


def _windows(run: AttachedRun) -> Html:
    rows = [
        [
            f"{row['step']:,}",
            _ms(row["predicted_s"]),
            _ms(row["measured_s"]),
            f"{row['time_error_frac']:+.1%}",
            _size(row["predicted_bytes"]),
            _size(row["measured_bytes"]),
        ]
        for row in run.windows
        if row["time_error_frac"] is not None
    ]
    if not rows:
        return Html("")
    columns = ("decided at step", "predicted", "measured", "off by", "predicted peak", "measured peak")
    inner = table("Predicted against measured", columns, rows[:_ROWS], numbers=tuple(range(6)))
    more = f", the first {_ROWS} of them here" if len(rows) > _ROWS else ""
    return element("details", element("summary", f"{count(len(rows), 'window')} that can be compared{more}"), inner)


def _environment(run: AttachedRun) -> Html:
    if not run.environment:
        return Html("")
    rows = [[str(key).replace("_", " "), str(value)] for key, value in run.environment.items()]
    return table("Environment", ("what", "value"), rows)


def _repeat(run: AttachedRun) -> Html:
    folder = str(run.folder)
    commands = f"autotune replay {folder}\nautotune replay {folder} --job JOB"
    code = f'tuner = autotune.attach(model, optimizer, policy="{folder}/decisions.jsonl", memory_budget_bytes=...)'
    return join(
        [
            element("p", "Without --job, predictions and measurements are listed; with it, the schedule is run again:"),
            element("pre", commands),
            element("p", "In a loop of your own, the same switches at the same steps, without the policy:"),
            element("pre", code),
        ]
    )


def _to_ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def _size(size: float | None) -> str:
    return "" if size is None else format_bytes(size)
