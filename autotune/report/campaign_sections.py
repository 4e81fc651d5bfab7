"""Make the sections that the pages of comparisons and of tunings share."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict

from autotune.budget import format_bytes
from autotune.plan import Plan
from autotune.records.requests import CompareRequest
from autotune.report.campaign_run import CampaignRun
from autotune.report.html import Html, element, join, table
from autotune.report.pareto import Cost, Front, predicted
from autotune.report.scatter import Dot, Trade, scatter
from autotune.report.svg import Figure

_SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_ADAPTIVE = (
    " With adaptive batching a larger k takes less time per sample while each sample is worth less; the optimum "
    "weighs both."
)


def trade_figure(run: CampaignRun, named: Sequence[tuple[str, Cost]], trade: Trade, front: Front | None) -> Figure:
    """Return the picture of time against memory."""
    return scatter("Time against memory", " ".join([_told(named), *_front_told(run, front)]), trade)


def trade_of(run: CampaignRun, named: Sequence[tuple[str, Cost]], trials: Sequence[Cost], front: Front | None) -> Trade:
    """Return time against memory: what was measured, and what the profile predicts to be best.

    Args:
        run: the run.
        named: measured arms, the baseline first; at least one.
        trials: what was measured to find plans.
        front: what is predicted; ``None`` without a profile.
    """
    largest = max(cost.peak_bytes for _, cost in named)
    unit, size = next(((name, value) for name, value in _SIZES if largest >= value), _SIZES[-1])

    def point(cost: Cost) -> tuple[float, float]:
        return cost.peak_bytes / size, cost.seconds_per_sample * 1e3

    dots = [
        Dot(
            number=number,
            name=name,
            x=point(cost)[0],
            y=point(cost)[1],
            spread=(cost.spread[0] * 1e3, cost.spread[1] * 1e3),
            told=f"{name}: {point(cost)[1]:.3g} ms per sample, peak {format_bytes(cost.peak_bytes)}",
        )
        for number, (name, cost) in enumerate(named)
    ]
    budget = run.budget_bytes
    return Trade(
        dots=dots,
        faint=[point(cost) for cost in trials],
        front=[] if front is None else [point(cost) for _, cost in front.points],
        best=None if front is None or front.best is None else point(front.best[1]),
        limit=None if budget is None else (budget / size, f"budget {format_bytes(budget)}"),
        x_name=f"peak memory, {unit}",
        y_name="training time per sample, ms",
    )


def _told(named: Sequence[tuple[str, Cost]]) -> str:
    arms = "; ".join(
        f"{name} {cost.seconds_per_sample * 1e3:.3g} ms at {format_bytes(cost.peak_bytes)}" for name, cost in named
    )
    return f"Measured: {arms}. Bars span the lowest and the highest."


def _front_told(run: CampaignRun, front: Front | None) -> list[str]:
    if front is None or run.profile is None:
        return [f"Without a profile nothing is predicted; autotune profile {run.job} makes one for the next run."]
    adaptive = _ADAPTIVE if run.profile.batching == "adaptive" else ""
    if front.best is None:
        return [f"No plan is predicted to fit the budget.{adaptive}"]
    plan, cost = front.best
    within = "" if run.budget_bytes is None else " within the budget"
    each = f"{cost.seconds_per_sample * 1e3:.3g} ms at {format_bytes(cost.peak_bytes)}"
    return [f"The exact optimum{within}, as predicted: {plan}, {each}.{adaptive}"]


def prediction_table(run: CampaignRun, plans: Sequence[tuple[str, Plan, Cost | None]]) -> Html:
    """Return what was predicted of plans beside what was measured; nothing without a profile.

    Args:
        run: the run.
        plans: what each is called, the plan, and what it cost.
    """
    if run.profile is None:
        return element("p", "The job had no profile, so nothing was predicted.")
    pairs = [
        (name, plan, told, cost)
        for name, plan, cost in plans
        if cost is not None and (told := predicted(run.profile, plan)) is not None
    ]
    rows = [
        [
            name,
            f"{told.seconds_per_sample * 1e3:.3g} ms",
            f"{cost.seconds_per_sample * 1e3:.3g} ms",
            f"{cost.seconds_per_sample / told.seconds_per_sample - 1:+.1%}",
            format_bytes(told.peak_bytes),
            format_bytes(cost.peak_bytes),
            f"{cost.peak_bytes / told.peak_bytes - 1:+.1%}",
            str(plan),
        ]
        for name, plan, told, cost in pairs
    ]
    if not rows:
        return element("p", "The profile predicts none of the plans that were measured.")
    columns = ("", "time predicted", "measured", "off by", "peak predicted", "measured", "off by", "plan")
    said = _errors_told([(told, cost) for _, _, told, cost in pairs])
    listed = table("Predicted against measured", columns, rows, numbers=(1, 2, 3, 4, 5, 6))
    return join([element("p", said), listed])


def _errors_told(pairs: Sequence[tuple[Cost, Cost]]) -> str:
    """Describe the prediction errors, also relative to the first pair: a machine that slows down slows every pair."""
    times = [cost.seconds_per_sample / told.seconds_per_sample for told, cost in pairs]
    memory = statistics.median(abs(cost.peak_bytes / told.peak_bytes - 1) for told, cost in pairs)
    off = statistics.median(abs(ratio - 1) for ratio in times)
    said = f"Per sample. Off by {off:.1%} in time and {memory:.1%} in memory, median of {len(pairs)}"
    if len(pairs) < 2:
        return f"{said}."
    beside = statistics.median(abs(ratio / times[0] - 1) for ratio in times[1:])
    return f"{said}; against the first row as measured, by {beside:.1%} in time."


def environment_section(run: CampaignRun) -> Html:
    """Return where the run was made, with what, and from which data."""
    found = asdict(run.environment)
    packages, sources = found.pop("packages"), found.pop("data")
    rows = [[key, str(value)] for key, value in found.items()]
    rows += [[name, str(version)] for name, version in packages.items() if version is not None]
    data = [[source["name"], format_bytes(source["size_bytes"]), source["sha256"]] for source in sources]
    parts = [table("Environment", ("what", "value"), rows)]
    if data:
        listed = table("Data", ("data", "size", "SHA-256"), data, numbers=(1,))
        parts = [element("h3", "Data"), listed, element("h3", "Machine and versions"), *parts]
    else:
        parts.append(element("p", "The job names no data sources.", class_="note"))
    return join(parts)


def repeat_section(run: CampaignRun) -> Html:
    """Return the commands that make the run again, and go on from it."""
    folder = shlex.quote(str(run.folder))
    job = shlex.quote(run.config.asked.job or "JOB")
    commands = [command_of(run)]
    if run.plan is not None:
        commands += [f"autotune explain {folder}", f"autotune export {folder}/plan.json --job {job} --to deepspeed"]
    if not run.compared:
        commands.append(f"autotune compare {job} --arms baseline,{folder}/plan.json")
    parts = [element("p", "The same again, on this machine or another; then the plan in detail, and for a launcher:")]
    if run.config.asked.job is None:
        parts.append(element("p", "The job was an object of a program: JOB stands for its reference.", class_="note"))
    return join([*parts, element("pre", "\n".join(commands))])


def command_of(run: CampaignRun) -> str:
    """Return the command that a run was made with."""
    asked = run.config.asked
    job = asked.job or "JOB"
    if isinstance(asked, CompareRequest):
        parts = ["autotune", "compare", job, "--arms", ",".join(asked.arms), "--seeds", str(len(asked.seeds))]
    else:
        parts = ["autotune", "tune", job, "--method", asked.method]
    for key, option in _OPTIONS.items():
        if getattr(asked, key, None) is not None:
            parts += [option, str(getattr(asked, key))]
    if not asked.lean:
        parts.append("--full")
    if asked.isolate and asked.ranks is None and asked.cluster is None:
        parts.append("--isolate")
    return shlex.join(parts)


_OPTIONS = {
    "memory_budget": "--memory-budget",
    "dips": "--dips",
    "steps": "--steps",
    "trials": "--trials",
    "storage": "--storage",
    "seed": "--seed",
}
