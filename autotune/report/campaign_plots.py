"""Plots of campaigns: costs, progress, speed against the baseline, and the progress of a search."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.budget import format_bytes
from autotune.measurement import Measurement
from autotune.report.campaign_run import CampaignRun
from autotune.report.costs import has_target, peak_of, reached_times
from autotune.report.palette import arm_look
from autotune.report.pareto import Cost, Front
from autotune.report.plot import Axis, Layer, Plot, Point, Shape, axis_around
from autotune.report.terminal_tables import judged_arms
from autotune.report.wording import beside_one, count

_SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_ROW = 30
# Labelled ratios, and the largest ratio that is drawn.
_RATIOS = (1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0)
_WIDEST = 6.0
_ADAPTIVE = (
    " With adaptive batching, a larger k takes less time per sample but each sample is worth less; the optimum weighs "
    "both."
)


def size_unit(largest: float) -> tuple[str, int]:
    """Return the unit in which to show sizes up to ``largest`` bytes, and its size in bytes."""
    return next(((name, size) for name, size in _SIZES if largest >= size), _SIZES[-1])


def cost_plot(run: CampaignRun, named: Sequence[tuple[str, Cost]], trials: Sequence[Cost], front: Front | None) -> Plot:
    """Return a plot of time against memory: measured costs, and the best plans that the profile predicts.

    Args:
        run: the run.
        named: names and costs of measured arms, the baseline first; at least one.
        trials: costs that were measured to find plans.
        front: the predicted best plans; ``None`` without a profile.
    """
    unit, size = size_unit(max(cost.peak_bytes for _, cost in named))

    def point(cost: Cost) -> tuple[float, float]:
        return cost.peak_bytes / size, cost.seconds_per_sample * 1e3

    arms = [
        Layer(
            name=name,
            look=arm_look(number),
            shape=Shape.ARM,
            points=[point(cost)],
            number=number,
            spread=[(cost.spread[0] * 1e3, cost.spread[1] * 1e3)],
            told=[f"{name}: {point(cost)[1]:.3g} ms per sample, peak {format_bytes(cost.peak_bytes)}"],
            label=name,
        )
        for number, (name, cost) in enumerate(named)
    ]
    budget = run.budget_bytes
    tried = [point(cost) for cost in trials]
    fronts = [] if front is None else [point(cost) for _, cost in front.points]
    optimum = [] if front is None or front.best is None else [point(front.best[1])]
    limit = [] if budget is None else [(budget / size, 0.0)]
    points = [*(one for arm in arms for one in arm.known), *tried, *fronts, *optimum]
    spreads = [end for arm in arms for pair in arm.spread for end in pair]
    x = axis_around(f"peak memory, {unit}", [x for x, _ in (*points, *limit)], least=0.0)
    y = axis_around("training time per sample, ms", [*(y for _, y in points), *spreads], least=0.0)
    if fronts:
        # Left of the first point, no plan fits; right of the last point, the best plan stays the same.
        fronts = [(fronts[0][0], y.high), *fronts, (x.high, fronts[-1][1])]
    others = [
        Layer(name="measured while tuning", look="trial", shape=Shape.DOTS, points=tried),
        Layer(name="predicted: best of every budget", look="front", shape=Shape.STEPS, points=fronts),
        Layer(name="predicted: exact optimum within the budget", look="star", shape=Shape.DOTS, points=optimum),
        Layer(name=_budget_name(budget), look="limit", shape=Shape.UPRIGHT, points=limit),
    ]
    return Plot(
        title="Time against memory",
        described=_costs_described(run, named, front),
        x=x,
        y=y,
        layers=[*arms, *(layer for layer in others if layer.points)],
    )


def _budget_name(budget_bytes: int | None) -> str:
    return "" if budget_bytes is None else f"budget {format_bytes(budget_bytes)}"


def _costs_described(run: CampaignRun, named: Sequence[tuple[str, Cost]], front: Front | None) -> str:
    arms = "; ".join(
        f"{name} {cost.seconds_per_sample * 1e3:.3g} ms at {format_bytes(cost.peak_bytes)}" for name, cost in named
    )
    measured = f"Measured: {arms}. Bars span the lowest and the highest."
    if front is None or run.profile is None:
        return f"{measured} Without a profile nothing is predicted; {run.to_profile} makes one for the next run."
    adaptive = _ADAPTIVE if run.profile.batching == "adaptive" else ""
    if front.best is None:
        return f"{measured} No plan is predicted to fit the budget.{adaptive}"
    plan, cost = front.best
    within = "" if run.budget_bytes is None else " within the budget"
    each = f"{cost.seconds_per_sample * 1e3:.3g} ms at {format_bytes(cost.peak_bytes)}"
    return f"{measured} The exact optimum{within}, as predicted: {plan}, {each}.{adaptive}"


def arrival_plot(comparison: Mapping[str, Any]) -> Plot:
    """Return a plot of time to the target, or per sample, against peak memory: mean and range over seeds of each arm.

    Args:
        comparison: a ``comparison.json`` document.
    """
    aimed = has_target(comparison)
    what = "to target" if aimed else "per sample"
    layers = []
    for number, arm in enumerate(comparison["arms"]):
        times, peak = _times(arm, aimed=aimed), peak_of(arm)
        arrived = len(times) == len(arm["runs"])
        if peak is not None:
            layers.append(
                Layer(
                    name=arm["name"] if arrived else f"{arm['name']} ({'target not reached' if aimed else 'failed'})",
                    look=arm_look(number),
                    shape=Shape.ARM,
                    points=[(peak / 2**20, statistics.fmean(times))] if arrived else [],
                    number=number,
                    spread=[(min(times), max(times))] if arrived else [],
                )
            )
    budget = comparison["memory_budget_bytes"]
    if budget is not None:
        points: list[Point] = [(budget / 2**20, 0.0)]
        layers.append(Layer(name=_budget_name(budget), look="limit", shape=Shape.UPRIGHT, points=points))
    xs = [x for layer in layers for x, _ in layer.points]
    ys = [high for layer in layers for _, high in layer.spread]
    return Plot(
        title="Time against memory (mean, range)",
        described=f"Training time {what} against peak memory of each arm.",
        x=Axis(name="peak memory, MiB", low=0.0, high=1.06 * (max(xs, default=0.0) or 1.0)),
        y=Axis(
            name=f"training time {what}, {'s' if aimed else 'ms'}", low=0.0, high=1.06 * (max(ys, default=0.0) or 1.0)
        ),
        layers=layers,
    )


def _times(arm: Mapping[str, Any], *, aimed: bool) -> list[float]:
    """Return the runs' seconds to the target; without one, their milliseconds per sample."""
    if aimed:
        return reached_times(arm)
    return [1e3 * run["time_to_target_s"] / run["samples"] for run in arm["runs"] if run["reached"]]


def progress_plot(comparison: Mapping[str, Any]) -> Plot | None:
    """Return a plot of the metric (mean over seeds) against training time; ``None`` if nothing was evaluated.

    Args:
        comparison: a ``comparison.json`` document.
    """
    courses = {arm["name"]: _mean_course(arm["runs"]) for arm in comparison["arms"]}
    target = comparison["metric"]["target"]
    if not any(courses.values()):
        return None
    edge = _edge(next(course for course in courses.values() if course), target)
    falls = edge is not None and target > edge
    layers = []
    for number, (name, course) in enumerate(courses.items()):
        if not course:
            continue
        kept = [(x, y) for x, y in course if edge is None or (y >= edge if falls else y <= edge)]
        points = kept or course[-1:]
        x, y = points[-1]
        layers.append(_course(name, number, points, f"{name}: {y:.4g} after {x:.4g} s"))
    return _courses_plot(
        "Progress against time",
        f"Validation metric over training time, mean of {count(len(comparison['seeds']), 'seed')}; the first sixth of "
        "the baseline's run is left out.",
        layers,
        target=target,
        x_name="training time, s",
        y_name="validation metric",
    )


def _mean_course(runs: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return seconds and metric at each evaluation, as means over seeds."""
    evaluations = zip(*(run["curve"] for run in runs), strict=False)
    return [
        (statistics.fmean(point[0] for point in points), statistics.fmean(point[2] for point in points))
        for points in evaluations
    ]


def _edge(baseline: Sequence[tuple[float, float]], target: float | None) -> float | None:
    """Return the metric after the first sixth of the baseline's run, if it lies between the first value and the target.

    The plot begins there, because the steep part before it would flatten the rest.
    """
    start, edge = baseline[0][1], baseline[len(baseline) // 6][1]
    if target is None:
        return None
    return edge if start < edge < target or target < edge < start else None


def search_plot(trials: Sequence[Mapping[str, Any]]) -> Plot | None:
    """Return a plot of the best cost so far against real steps; ``None`` if the search is too short or no plan fits.

    Args:
        trials: records of ``trials.jsonl``.
    """
    points: list[tuple[float, float]] = []
    for trial in trials:
        window = Measurement.from_json(trial["measurement"])
        fits = window.failure is None and window.within_budget and window.throughput is not None
        if not trial["final"] and fits and (not points or trial["cost"] < points[-1][1]):
            points += [(trial["tuning_steps"], points[-1][1])] if points else []
            points.append((trial["tuning_steps"], trial["cost"]))
    spent = [trial["tuning_steps"] for trial in trials if not trial["final"]]
    if len(spent) < 2 or not points:
        return None
    points.append((max(spent), points[-1][1]))
    steps, cost = points[-1]
    return _courses_plot(
        "The search",
        f"Cost of the best plan so far against real steps: {cost:.2f} of the baseline's at the end. The finals, which "
        "decide, are not included.",
        [_course("best plan so far", 2, points, f"{cost:.4g} of the baseline's after {steps:,} steps")],
        target=None,
        x_name="real steps",
        y_name="cost, of the baseline's",
    )


def _course(name: str, number: int, points: Sequence[tuple[float, float]], told: str) -> Layer:
    ends = [*[""] * (len(points) - 1), told]
    return Layer(name=name, look=arm_look(number), shape=Shape.LINE, points=points, number=number, told=ends)


def _courses_plot(
    title: str, described: str, layers: Sequence[Layer], *, target: float | None, x_name: str, y_name: str
) -> Plot:
    limit: list[Layer] = []
    if target is not None:
        limit = [Layer(name=f"target {target:g}", look="limit", shape=Shape.ACROSS, points=[(0.0, target)])]
    values = [y for layer in (*layers, *limit) for _, y in layer.known]
    end = max(x for layer in layers for x, _ in layer.points) or 1.0
    return Plot(
        title=title,
        described=described,
        x=Axis(name=x_name, low=0.0, high=end * 1.03),
        y=axis_around(y_name, values, 0.06),
        layers=[*layers, *limit],
    )


def speed_plot(comparison: Mapping[str, Any]) -> Plot:
    """Return a plot of each arm's speed against the baseline with its interval, one row per arm, on a log axis.

    Args:
        comparison: a ``comparison.json`` document.
    """
    rows: list[tuple[int, str, tuple[float, float, float] | None]] = []
    said = []
    for number, entry in enumerate(judged_arms(comparison).values(), 1):
        if entry["time_ratio"] is None:
            rows.append((number, f"{entry['arm']}: no ratio", None))
            said.append(f"{entry['arm']}: {entry['reason']}")
            continue
        middle, high, low = (1 / ratio for ratio in (entry["time_ratio"], *entry["time_ratio_ci95"]))
        rows.append((number, entry["arm"], (low, middle, high)))
        said.append(f"{entry['arm']} {middle:.2f}x ({beside_one(low)} to {beside_one(high)})")
    logs = [abs(math.log(end)) for _, _, ratios in rows for end in ratios or ()]
    reach = min(max([*logs, math.log(1.25)]) * 1.05, math.log(_WIDEST))
    layers = [
        Layer(
            look=arm_look(number),
            shape=Shape.ARM,
            points=[(ratios[1], len(rows) - row - 0.5)],
            number=number,
            spread=[(ratios[0], ratios[2])],
            spread_axis="x",
            told=[told],
        )
        for row, ((number, _, ratios), told) in enumerate(zip(rows, said, strict=True))
        if ratios is not None
    ]
    layers.append(Layer(name="95 % interval", look="spread", shape=Shape.STEPS, points=[]))
    layers.append(Layer(name="baseline", look="limit", shape=Shape.UPRIGHT, points=[(1.0, 0.0)]))
    marks = [(value, f"{value:.2g}x") for value in _RATIOS if abs(math.log(value)) <= reach]
    names = [(len(rows) - row - 0.5, name) for row, (_, name, _) in enumerate(rows)]
    low, high = math.exp(-reach), math.exp(reach)
    return Plot(
        title="Speed against the baseline",
        described=f"{'; '.join(said)}. Bars are 95 % intervals over paired seeds.",
        x=Axis(name="times as fast as the baseline", low=low, high=high, scale="log", marks=marks),
        y=Axis(name="", low=0.0, high=float(len(rows)), marks=names),
        layers=layers,
        height=_ROW * len(rows) + 54,
    )
