"""Plots as PNG files, drawn with matplotlib in the light colours of pages."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.io.files import write_atomic
from autotune.report.campaign_plots import arrival_plot, progress_plot
from autotune.report.palette import DASHES, LIGHT, LOOKS, arm_look
from autotune.report.plot import Axis, Layer, Plot, Shape, axis_around

# The shapes of arms, as in pages.
_ARMS = "osD^vPX"
# Labels for how much slower a plan is, in percent.
_PERCENTS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def draw_comparison(comparison: Mapping[str, Any], path: Path) -> Path:
    """Draw time to target against peak memory and the metric against time, with one colour per arm.

    Args:
        comparison: a ``comparison.json`` document.
        path: the PNG file to write.

    Returns:
        The path.
    """
    indication = " (an indication, not a claim)" if comparison.get("indication_only") else ""
    title = f"{comparison['job']} on {comparison['device']}: {len(comparison['seeds'])} paired seeds{indication}"
    progress = progress_plot(comparison)
    plots = [arrival_plot(comparison)]
    if progress is not None:
        plots.append(replace(progress, title=f"{progress.title} (mean over seeds)"))
    return draw(plots, path, size=(6.5 * len(plots), 5.4), title=title)


def draw_search(document: Mapping[str, Any], path: Path) -> Path:
    """Draw how much slower each method's best plan so far is than the best known plan, against real steps.

    Args:
        document: the document of ``autotune bench search``; the median of each method's repetitions is drawn.
        path: the PNG file to write.

    Returns:
        The path.
    """
    regrets = [plan["regret_frac"] for plan in document["plans"]]
    within = 100 * document["within_frac"]
    layers = []
    for number, (name, method) in enumerate(document["methods"].items()):
        points = _median_course([[(one["steps"], regrets[one["plan"]]) for one in curve] for curve in method["curves"]])
        look, percents = arm_look(number), [(steps, 100 * regret) for steps, regret in points]
        layers.append(Layer(name=name, look=look, shape=Shape.STEPS, points=percents, number=number))
    points = [point for layer in layers for point in layer.known]
    layers.append(Layer(look="limit", shape=Shape.ACROSS, points=[(0.0, within)]))
    steps, slower = [x for x, _ in points] or [1.0], [y for _, y in points] or [1.0]
    plot = Plot(
        title=f"{document['job']} within {document['memory_budget']}: median of the repetitions, plans measured again",
        described="",
        x=Axis(
            name="real optimizer steps, profile included",
            low=min(steps) / 1.2,
            high=max(steps) * 1.2,
            scale="log",
        ),
        y=Axis(
            name="slower than the best plan known, %",
            low=-0.1,
            high=max(*slower, within) * 1.3,
            scale="asinh",
            linear_width=within,
            marks=[(value, f"{value}") for value in _PERCENTS if value <= max(*slower, within) * 1.3],
        ),
        layers=layers,
    )
    return draw([plot], path, size=(8, 5))


def _median_course(courses: Sequence[Sequence[tuple[float, float | None]]]) -> list[tuple[float, float]]:
    """Return the median over repetitions at each step from which all of them have a plan that was measured again."""
    ends = [max(steps for steps, _ in course) for course in courses if course]
    found: list[tuple[float, float]] = []
    for step in sorted({steps for course in courses for steps, _ in course}):
        latest = [
            [regret for steps, regret in course if steps <= step and regret is not None][-1:] for course in courses
        ]
        if all(latest):
            found.append((step, statistics.median(regret for last in latest for regret in last)))
    return [*found, (max(ends), found[-1][1])] if found else []


def draw_reproduction(document: Mapping[str, Any], path: Path) -> Path:
    """Draw the paper's changes against its baseline next to ours, for the rows in which ours is known.

    Args:
        document: a ``reproduction.json`` document.
        path: the PNG file to write.

    Returns:
        The path.
    """
    rows = [row for row in document["rows"] if row["our_change"] is not None]
    places = [len(rows) - number - 0.5 for number in range(len(rows))]
    layers = [
        Layer(
            name=name,
            look=arm_look(arm),
            shape=Shape.ARM,
            points=[(row[key], y) for row, y in zip(rows, places, strict=True) if row[key] is not None],
            number=arm,
        )
        for key, name, arm in (("paper_change", "the paper", 2), ("our_change", "here", 1))
    ]
    layers.append(Layer(look="limit", shape=Shape.UPRIGHT, points=[(1.0, 0.0)]))
    names = [f"{row['metric']}: {row['configuration']}" for row in rows]
    plot = Plot(
        title=f"{document['table']} with {', '.join(document['jobs'])}, {document['device']}",
        described="",
        x=axis_around("times its own baseline", [1.0, *(x for layer in layers for x, _ in layer.points)]),
        y=Axis(name="", low=0.0, high=float(max(len(rows), 1)), marks=list(zip(places, names, strict=True))),
        layers=layers,
    )
    return draw([plot], path, size=(9, 1.6 + 0.3 * len(rows)))


def draw_published(document: Mapping[str, Any], path: Path) -> Path:
    """Draw predicted over measured throughput and peak of published runs, with one colour per source.

    Args:
        document: the document of ``autotune bench published``.
        path: the PNG file to write.

    Returns:
        The path.
    """
    rows = document["rows"]
    sources = list(dict.fromkeys(row["source"] for row in rows))
    plots = []
    for key, unit, scale in (("tokens_per_s_per_device", "tokens/s per device", 1), ("peak_bytes", "peak, GB", 1e9)):
        known = [row for row in rows if row["measured"][key] is not None]
        if not known:
            continue
        pairs = {
            source: [
                (row["measured"][key] / scale, row["predicted"][key] / row["measured"][key])
                for row in known
                if row["source"] == source
            ]
            for source in sources
        }
        layers = [
            Layer(name=source, look=arm_look(number), shape=Shape.ARM, points=points, number=number)
            for number, (source, points) in enumerate(pairs.items())
            if points
        ]
        layers.append(Layer(look="limit", shape=Shape.ACROSS, points=[(0.0, 1.0)]))
        measured, ratios = zip(*(point for points in pairs.values() for point in points), strict=True)
        x = Axis(name=f"measured {unit}", low=min(measured) / 1.2, high=max(measured) * 1.2, scale="log")
        plots.append(
            Plot(title="", described="", x=x, y=axis_around("estimated over measured", [1.0, *ratios]), layers=layers)
        )
    return draw(
        plots, path, size=(6.5 * len(plots), 5.0), title=f"{len(rows)} published runs: estimates over measurements"
    )


def draw_run_costs(
    plans: Sequence[tuple[float, float]], front: Sequence[tuple[float, float]], unit: str, path: Path
) -> Path:
    """Draw days and costs of runs under several plans, and the front of those that no other plan beats in both.

    Args:
        plans: days and cost of each plan.
        front: days and cost of the plans on the front, fastest first.
        unit: unit of the costs.
        path: the PNG file to write.

    Returns:
        The path.
    """
    days, costs = zip(*plans, strict=True)
    plot = Plot(
        title="Estimated, not measured",
        described="",
        x=axis_around("days", days, least=0.0),
        y=axis_around(unit, costs, least=0.0),
        layers=[
            Layer(name="plans", look=arm_look(0), shape=Shape.DOTS, points=plans),
            Layer(name="no other plan is faster and cheaper", look=arm_look(1), shape=Shape.LINE, points=front),
        ],
    )
    return draw([plot], path)


def draw(plots: Sequence[Plot], path: Path, *, size: tuple[float, float] = (8, 5), title: str = "") -> Path:
    """Write plots side by side into one PNG file, which may replace a regular file.

    Args:
        plots: plots to draw.
        path: the file.
        size: width and height in inches, at 150 pixels per inch.
        title: title above all plots.

    Returns:
        The path.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    ink, faint = LIGHT["ink"], LIGHT["faint"]
    with plt.rc_context({"text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": faint}):
        figure, panels = plt.subplots(1, len(plots), figsize=size, layout="constrained", squeeze=False)
        for plot, axes in zip(plots, panels[0], strict=True):
            for layer in plot.layers:
                _draw_layer(axes, layer)
            for name, axis in (("x", plot.x), ("y", plot.y)):
                _set_axis(axes, name, axis)
            axes.set_title(plot.title)
            axes.grid(alpha=0.25, axis="both" if plot.y.name else "x")
            if any(layer.name for layer in plot.layers):
                axes.legend(fontsize=9, frameon=False)
        figure.suptitle(title, fontsize=11)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=150)
    plt.close(figure)
    write_atomic(path, drawn.getvalue())
    return path


def _draw_layer(axes: Any, layer: Layer) -> None:
    colour, name = LIGHT[LOOKS[layer.look]], layer.name or None
    line: dict[str, Any] = {"color": colour, "label": name, "linewidth": 1.6}
    if layer.look in DASHES:
        line["linestyle"] = (0, DASHES[layer.look])
    xs, ys = zip(*layer.known, strict=True) if layer.known else ((), ())
    match layer.shape:
        case Shape.UPRIGHT:
            axes.axvline(xs[0], **line)
        case Shape.ACROSS:
            axes.axhline(ys[0], **line)
        case Shape.LINE:
            axes.plot(xs, ys, **line)
        case Shape.STEPS:
            axes.step(xs, ys, where="post", marker=".", **line)
        case Shape.DOTS:
            star = {"marker": "*", "markersize": 14, "markeredgecolor": LIGHT["ink"]}
            faint = {"marker": ".", "alpha": 0.6}
            axes.plot(xs, ys, linestyle="none", color=colour, label=name, **(star if layer.look == "star" else faint))
        case Shape.ARM:
            middles = ys if layer.spread_axis == "y" else xs
            # By rounding, the middle of equal measurements may lie beyond their ends.
            ends = [
                (max(middle - low, 0.0), max(high - middle, 0.0))
                for middle, (low, high) in zip(middles, layer.spread, strict=False)
            ]
            bars = {f"{layer.spread_axis}err": list(zip(*ends, strict=True))} if ends else {}
            marker = _ARMS[layer.number % len(_ARMS)]
            axes.errorbar(xs, ys, fmt=marker, color=colour, markersize=7, capsize=4, label=name, **bars)


def _set_axis(axes: Any, name: str, axis: Axis) -> None:
    width = {"linear_width": axis.linear_width} if axis.scale == "asinh" else {}
    getattr(axes, f"set_{name}scale")(axis.scale, **width)
    if axis.marks:
        getattr(axes, f"{name}axis").set_minor_formatter("")
        getattr(axes, f"set_{name}ticks")(*zip(*axis.marks, strict=True), fontsize=9)
    axes.set(**{f"{name}lim": (axis.low, axis.high), f"{name}label": axis.name})
