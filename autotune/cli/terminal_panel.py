"""The state of an attached run for terminals: a panel, or one line.

Logs may come from anyone, so control characters in their text are escaped.
"""

from __future__ import annotations

import shlex
from collections import Counter

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autotune.agents.policy import DipOutlook
from autotune.budget import format_bytes
from autotune.choices import REDUCED_PRECISIONS, STORAGES
from autotune.errors import printable
from autotune.live.logged_windows import time_error
from autotune.plan import Plan, Precision, Storage
from autotune.report.standing import Snapshot, Watched
from autotune.report.time_section import words
from autotune.report.wording import count, progress

# Largest number of cells in a plan's strip; in larger models, neighbouring units share a cell.
_CELLS = 40
_LEGEND = ", ".join(f"{precision.letter} {precision}" for precision in (*REDUCED_PRECISIONS, Precision.FP32))
_BAR = 12
# Share of the budget above which the bar is yellow.
_TIGHT = 0.92
_NOT_KNOWN = "not known yet"
_KEPT, _RECOMPUTED, _BETWEEN = ("▪", "#", "green"), ("▫", "o", "yellow"), ("◧", "+", "yellow")
_FIXED = ("·", ".", "dim")


def panel(snapshot: Snapshot, silent_s: float | None = None, *, plain: bool = False) -> Panel:
    """Return the panel: plan, memory, time, noise scale, overhead, switches and trips.

    Args:
        snapshot: the state to show.
        silent_s: seconds since the last line of the log; ``None`` to omit them.
        plain: whether to use ASCII characters only.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True, min_width=len("switches"))
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_row("plan", strip(snapshot, plain=plain) + Text("  " + told_plan(snapshot.plan, snapshot.recomputable)))
    if set(snapshot.plan.precision.values()) - {Precision.INHERIT}:
        table.add_row("", Text(_precisions(snapshot)))
    table.add_row("memory", _memory(snapshot, plain=plain))
    table.add_row("peak", Text(_measured_peak(snapshot)))
    if snapshot.dips is not None:
        table.add_row("dips", Text(told_dips(snapshot.dips)))
    table.add_row("step", Text(told_time(snapshot.predicted_s, snapshot.measured_s)))
    if snapshot.parts is not None:
        table.add_row("time", Text(words(snapshot.parts)))
    if snapshot.advice is not None:
        table.add_row("advice", Text(printable(snapshot.advice), style="yellow"))
    table.add_row("noise", Text(_noise(snapshot)))
    table.add_row("switches", _switches(snapshot))
    table.add_row("trips", Text(_trips(snapshot), style="yellow" if snapshot.trips else ""))
    title = Text(printable(f"autotune: {snapshot.name}, {snapshot.state}"))
    steps = Text(_progress(snapshot, silent_s))
    frame = box.ASCII if plain else box.ROUNDED
    return Panel(table, title=title, title_align="left", subtitle=steps, subtitle_align="right", box=frame)


def line(snapshot: Snapshot, silent_s: float | None = None) -> str:
    """Return the state in one line, the most important parts first.

    Args:
        snapshot: the state to show.
        silent_s: seconds since the last line of the log; ``None`` to omit them.
    """
    pressure = "no budget" if snapshot.pressure is None else f"{snapshot.pressure:.0%} of the budget"
    parts = [
        f"autotune {snapshot.state}, {_progress(snapshot, silent_s)}",
        f"trips: {_trips(snapshot)}",
        pressure,
        told_plan(snapshot.plan, snapshot.recomputable),
        f"{snapshot.switches:,} switches",
        _overhead(snapshot),
        f"step time {told_time(snapshot.predicted_s, snapshot.measured_s)}",
        *([] if snapshot.dips is None else [f"dips of the budget: {told_dips(snapshot.dips)}"]),
        *([] if snapshot.parts is None else [words(snapshot.parts)]),
        *([] if snapshot.advice is None else [printable(snapshot.advice)]),
    ]
    return " | ".join(parts)


def strip(snapshot: Snapshot, *, plain: bool = False) -> Text:
    """Return a strip with one cell per unit; in large models, neighbours share a cell."""
    each = max(-(-len(snapshot.units) // _CELLS), 1)
    text = Text()
    for start in range(0, len(snapshot.units), each):
        names = [name for name in snapshot.units[start : start + each] if name in snapshot.recomputable]
        cells = {_cell(snapshot.plan.storage_of(name)) for name in names}
        mark, ascii_mark, style = _BETWEEN if len(cells) > 1 else next(iter(cells), _FIXED)
        text.append(ascii_mark if plain else mark, style=style)
    return text


def _cell(storage: Storage) -> tuple[str, str, str]:
    return _RECOMPUTED if storage.recomputes else _KEPT if storage is Storage.SAVE else _BETWEEN


def told_plan(plan: Plan, recomputable: frozenset[str]) -> str:
    """Return a plan in a few words."""
    counts = Counter(plan.storage_of(name) for name in recomputable)
    told = (
        storage for storage in STORAGES[1:] if counts[storage] or (storage.recomputes and not storage.keeps_gathered)
    )
    stored = ", ".join(f"{counts[storage]} of {len(recomputable)} {storage.label}" for storage in told)
    return f"{stored}, k = {plan.accumulation_steps}"


def told_time(predicted_s: float | None, measured_s: float | None) -> str:
    """Return the measured and the predicted time per step in words."""
    if predicted_s is None:
        return _NOT_KNOWN
    told, error = f"{_milliseconds(predicted_s)} predicted", time_error(measured_s, predicted_s)
    if measured_s is None or error is None:
        return f"{told}, none measured yet"
    return f"{_milliseconds(measured_s)} measured, {told} ({error:+z.1%})"


def told_dips(dips: DipOutlook) -> str:
    """Return what is expected of dips of the memory budget in words."""
    told = f"{dips.seen:,} so far, the last {count(dips.windows, 'decision')} ago"
    left = format_bytes(dips.left_bytes)
    return f"{told}; {dips.chance:.0%} that one begins before the next decision, which leaves {left}"


def told_silence(silent_s: float) -> str:
    """Return how long ago the last line of a log was written."""
    if silent_s < 120:
        return f"last line {silent_s:.0f} s ago"
    return f"last line {silent_s / 60:.0f} min ago" if silent_s < 7200 else f"last line {silent_s / 3600:.0f} h ago"


def _progress(snapshot: Snapshot, silent_s: float | None) -> str:
    steps = progress(snapshot.steps, snapshot.total_steps)
    return steps if silent_s is None or snapshot.ended is not None else f"{steps}, {told_silence(silent_s)}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _precisions(snapshot: Snapshot) -> str:
    if len(snapshot.units) > _CELLS:
        return str(snapshot.plan)
    return "".join(snapshot.plan.precision_of(name).letter for name in snapshot.units) + f"  {_LEGEND}"


def _memory(snapshot: Snapshot, *, plain: bool) -> Text:
    peak = snapshot.predicted_peak_bytes
    if peak is None:
        return Text(_NOT_KNOWN)
    pressure, budget = snapshot.pressure, snapshot.memory_budget_bytes
    told = f"{format_bytes(peak)} predicted"
    if pressure is None or budget is None:
        return Text(f"{told}; no budget")
    full = min(round(pressure * _BAR), _BAR)
    bar = ("#" if plain else "█") * full + ("-" if plain else "░") * (_BAR - full)
    style = "red" if pressure > 1 else "yellow" if pressure > _TIGHT else "green"
    return Text.assemble((bar, style), f" {pressure:.0%} of {format_bytes(budget)}: {told}")


def _measured_peak(snapshot: Snapshot) -> str:
    # A peak measured by tracing may be several steps old and belong to another plan.
    measured = snapshot.measured_peak_bytes
    return "not measured yet" if measured is None else f"{format_bytes(measured)} when last measured"


def _noise(snapshot: Snapshot) -> str:
    if snapshot.noise_scale is None:
        return "scale unknown with one micro-batch a step"
    return f"scale {snapshot.noise_scale:,.0f} samples"


def _switches(snapshot: Snapshot) -> Text:
    counts = f"{snapshot.switches:,}, and {snapshot.placed:,} placements; {_overhead(snapshot)}"
    late = f"; {snapshot.over_budget_steps:,} steps over" if snapshot.over_budget_steps else ""
    return Text.assemble(counts, (late, "yellow"))


def _overhead(snapshot: Snapshot) -> str:
    share = snapshot.overhead_frac
    return f"overhead {_NOT_KNOWN}" if share is None else f"overhead {share:.1%}"


def _trips(snapshot: Snapshot) -> str:
    if snapshot.last_trip is None:
        return "none"
    step, reason = snapshot.last_trip[0], printable(snapshot.last_trip[1])
    return f"{snapshot.trips:,}, {'last ' if snapshot.trips > 1 else ''}at step {step:,}: {reason}"


def farewell(watched: Watched) -> str:
    """Return one line about a run that has ended."""
    snapshot = watched.snapshot
    assert snapshot is not None
    trips = count(snapshot.trips, "trip") if snapshot.trips else "no trip"
    counts = f"{count(snapshot.switches, 'switch')}, {trips}"
    told = f"{snapshot.ended} after {snapshot.steps:,} steps: {counts}, {_overhead(snapshot)}"
    return printable(f"autotune: {told}; autotune report {shlex.quote(str(watched.folder))}")
