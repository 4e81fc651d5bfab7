"""Draw what a comparison found, and what searches cost."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.budget import format_bytes
from autotune.io.files import write_atomic
from autotune.report.curves import edge_of, mean_curve
from autotune.report.scatter import Trade

_INK, _FAINT, _BUDGET = "#1f2328", "#8c959f", "#cf222e"
# Okabe and Ito's palette: told apart by colour-blind readers.
_COLOURS = (
    *("#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#999999", "#b8a900"),
    *("#7b3fa0", "#8c510a", "#1b7837"),
)
_MARKERS = "osD^vPX*hp<>"


def draw_comparison(comparison: Mapping[str, Any], path: Path) -> Path:
    """Draw time to target against peak memory, and the metric against time, one colour per arm.

    Args:
        comparison: a ``comparison.json`` document.
        path: the PNG to write.

    Returns:
        The path.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 10, "axes.edgecolor": _FAINT, "axes.labelcolor": _INK, "text.color": _INK}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.4), layout="constrained")
        colours = {arm["name"]: _COLOURS[i % len(_COLOURS)] for i, arm in enumerate(comparison["arms"])}
        markers = {arm["name"]: _MARKERS[i % len(_MARKERS)] for i, arm in enumerate(comparison["arms"])}
        _draw_trade(left, comparison, colours, markers)
        _draw_curves(right, comparison, colours)
        seeds = len(comparison["seeds"])
        figure.suptitle(
            f"{comparison['job']} on {comparison['device']}: {seeds} paired seeds"
            + (" (an indication, not a claim)" if comparison.get("indication_only") else ""),
            fontsize=11,
        )
        _save(figure, path)
    return path


def draw_trade(trade: Trade, path: Path) -> Path:
    """Draw time against memory: what was measured, the predicted front and optimum, and the budget.

    Args:
        trade: what is drawn.
        path: the PNG to write.

    Returns:
        The path.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    if trade.faint:
        axes.plot(*zip(*trade.faint, strict=True), ".", color=_FAINT, label="measured while tuning")
    if trade.front:
        best = "predicted: best of every budget"
        axes.step(*zip(*trade.front, strict=True), where="post", color=_INK, linewidth=1.2, label=best)
    for dot in trade.dots:
        low, high = dot.spread
        colour, marker = _COLOURS[dot.number % len(_COLOURS)], _MARKERS[dot.number % len(_MARKERS)]
        spread = [[max(dot.y - low, 0.0)], [max(high - dot.y, 0.0)]]
        axes.errorbar(dot.x, dot.y, yerr=spread, fmt=marker, color=colour, markersize=8, capsize=4, label=dot.name)
    if trade.best is not None:
        axes.plot(*trade.best, "*", markersize=14, color=_COLOURS[1], markeredgecolor=_INK, label="exact optimum")
    if trade.limit is not None:
        axes.axvline(trade.limit[0], color=_BUDGET, linestyle="--", linewidth=1.2, label=trade.limit[1])
    axes.set(xlabel=trade.x_name, ylabel=trade.y_name, title="Time against memory")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9, frameon=False)
    _save(figure, path)
    return path


def draw_search(document: Mapping[str, Any], path: Path) -> Path:
    """Draw how far each method's best plan so far is from the best plan known, against real steps spent.

    Args:
        document: what ``autotune bench search`` found.
        path: the PNG to write.

    Returns:
        The path.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    regrets = [plan["regret_frac"] for plan in document["plans"]]
    for (name, method), colour in zip(document["methods"].items(), _COLOURS, strict=False):
        for number, curve in enumerate(method["curves"]):
            points = [(p["steps"], 100 * regrets[p["plan"]]) for p in curve if regrets[p["plan"]] is not None]
            steps, slower = [steps for steps, _ in points], [regret for _, regret in points]
            label = name if number == 0 else None
            axes.step(steps, slower, where="post", marker=".", color=colour, linewidth=1.4, label=label)
    axes.axhline(100 * document["within_frac"], color=_FAINT, linestyle=":", linewidth=1.4)
    axes.set_yscale("symlog", linthresh=100 * document["within_frac"])
    axes.set_ylim(bottom=-0.1)
    axes.set(
        xscale="log",
        xlabel="real optimizer steps spent, profile included",
        ylabel="slower than the best plan known, %",
        title=f"{document['job']} within {document['memory_budget']}: every repetition, plans measured again",
    )
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9, frameon=False)
    _save(figure, path)
    return path


def draw_reproduction(document: Mapping[str, Any], path: Path) -> Path:
    """Draw each of the paper's changes against its baseline beside ours, for rows that have one.

    Args:
        document: a ``reproduction.json`` document.
        path: the PNG to write.

    Returns:
        The path.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in document["rows"] if row["our_change"] is not None]
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.3 * len(rows)), layout="constrained")
    for column, name, colour, marker in (
        ("paper_change", "the paper", _COLOURS[1], "D"),
        ("our_change", "here", _COLOURS[5], "o"),
    ):
        known = [(row[column], number) for number, row in enumerate(rows) if row[column] is not None]
        if known:
            axes.plot(*zip(*known, strict=True), linestyle="none", marker=marker, color=colour, label=name)
    axes.axvline(1.0, color=_FAINT, linestyle=":", linewidth=1.4)
    names = [f"{row['metric']}: {row['configuration']}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    jobs = ", ".join(document["jobs"])
    axes.set(xlabel="times its own baseline", title=f"{document['table']} with {jobs}, {document['device']}")
    axes.grid(axis="x", alpha=0.25)
    axes.legend(fontsize=9, frameon=False)
    _save(figure, path)
    return path


def _draw_trade(
    axes: Any, comparison: Mapping[str, Any], colours: Mapping[str, str], markers: Mapping[str, str]
) -> None:
    for arm in comparison["arms"]:
        times = reached_times(arm)
        peaks = [run["peak_bytes"] for run in arm["runs"] if run["peak_bytes"]]
        if not peaks:
            continue
        memory = max(peaks) / 2**20
        label, colour, marker = arm["name"], colours[arm["name"]], markers[arm["name"]]
        if len(times) < len(arm["runs"]):
            axes.plot([], [], marker=marker, color=colour, linestyle="none", label=f"{label} (did not arrive)")
            continue
        middle = statistics.fmean(times)
        spread = [[middle - min(times)], [max(times) - middle]]
        axes.errorbar(memory, middle, yerr=spread, fmt=marker, markersize=8, capsize=4, color=colour, label=label)
    budget = comparison["memory_budget_bytes"]
    if budget is not None:
        axes.axvline(budget / 2**20, color=_BUDGET, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"budget {format_bytes(budget)} ",
            (budget / 2**20, 0.99),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            ha="right",
            color=_BUDGET,
        )
    axes.set(
        xlabel="peak memory, MiB",
        ylabel="training time to target, s",
        title="Time against memory (mean, range)",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9, frameon=False, loc="best")


def _draw_curves(axes: Any, comparison: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    target = comparison["metric"]["target"]
    for arm in comparison["arms"]:
        curve = mean_curve(arm["runs"]) or [(0.0, float("nan"))]
        axes.plot(*zip(*curve, strict=True), color=colours[arm["name"]], linewidth=1.8, label=arm["name"])
    axes.axhline(target, color=_FAINT, linestyle=":", linewidth=1.4)
    axes.annotate("target ", (1, target), xycoords=("axes fraction", "data"), va="top", ha="right", color=_INK)
    axes.set(xlabel="training time, s", ylabel="validation metric", title="Progress against time (mean over seeds)")
    axes.set_xlim(left=0)
    edge = edge_of(mean_curve(comparison["arms"][0]["runs"]), target)
    if edge is not None:
        # The steep part would flatten everything else.
        axes.set_ylim(**({"bottom": edge} if edge < target else {"top": edge}))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9, frameon=False, ncols=2)


def reached_times(arm: Mapping[str, Any]) -> list[float]:
    """Return the times to target of the runs that arrived, in seconds."""
    return [run["time_to_target_s"] for run in arm["runs"] if run["reached"]]


def _save(figure: Any, path: Path) -> None:
    """Write a figure as PNG, over a regular file or a new one, and close it."""
    import matplotlib.pyplot as plt

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    plt.close(figure)
    write_atomic(path, drawn.getvalue())
