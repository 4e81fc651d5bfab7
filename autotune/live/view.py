"""Say in a few lines how an attached run stands: a snapshot of its figures, and how people see it.

Nothing here knows a terminal; ``live.screen`` puts the lines on one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autotune.budget import format_bytes
from autotune.errors import printable
from autotune.plan import Plan, Precision, Storage

# Cells of a plan's strip at most: neighbours share one beyond it.
_CELLS = 40
_BAR = 12
# Above this share of the budget a bar warns.
_TIGHT = 0.92
_NOT_KNOWN = "not known yet"
_SHOWN = {"kept": ("▪", "#", "green"), "recomputed": ("▫", "o", "yellow"), "both": ("◧", "+", "yellow")}
_FIXED = ("·", ".", "dim")
_LETTERS = {Precision.INHERIT: ".", Precision.FP32: "f", Precision.BF16: "b", Precision.FP16: "h"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Hold how an attached run stands at one moment.

    Attributes:
        name: what the run is called.
        state: what the tuner does, in a word or two.
        steps: optimizer steps so far.
        total_steps: length of the run; ``None`` if it is not known.
        plan: the plan that is applied.
        units: names of the units, in the order of the forward pass.
        recomputable: those of them whose storage can be chosen.
        switches: decided switches.
        placed: changes of storage between them, for a batch or a budget.
        over_budget_steps: steps that ran though no plan was known to fit.
        trips: step and reason of each trip.
        memory_budget_bytes: the budget; ``None`` for none.
        predicted_peak_bytes: of the applied plan; ``None`` before there is a profile.
        measured_peak_bytes: the last one measured; ``None`` before.
        predicted_s: predicted seconds per step of the plans of the last window that had steps to compare, at the
            profiled batch's size; ``None`` before one.
        measured_s: what those steps took, as if at that size.
        noise_scale: simple noise scale in samples; ``None`` while unknown.
        overhead_frac: the tuner's own share of the run's time.
    """

    name: str
    state: str
    steps: int
    total_steps: int | None
    plan: Plan
    units: tuple[str, ...]
    recomputable: frozenset[str]
    switches: int
    placed: int
    over_budget_steps: int
    trips: tuple[tuple[int, str], ...]
    memory_budget_bytes: int | None
    predicted_peak_bytes: float | None
    measured_peak_bytes: int | None
    predicted_s: float | None
    measured_s: float | None
    noise_scale: float | None
    overhead_frac: float

    @classmethod
    def of(cls, name: str, units: Sequence[str], recomputable: Sequence[str], status: Mapping[str, Any]) -> Snapshot:
        """Return the snapshot of a live tuner's ``status``."""
        own = {item: status[item] for item in cls.__dataclass_fields__ if item in status}
        return cls(
            **{**own, "trips": tuple(status["trips"])},
            name=name,
            state=_state(status),
            units=tuple(units),
            recomputable=frozenset(recomputable),
        )

    @property
    def pressure(self) -> float | None:
        """Return the predicted peak over the budget; ``None`` without both."""
        if self.predicted_peak_bytes is None or not self.memory_budget_bytes:
            return None
        return self.predicted_peak_bytes / self.memory_budget_bytes

    @property
    def time_error(self) -> float | None:
        """Return by what share measured steps take longer than predicted; ``None`` if either is not known."""
        return self.measured_s / self.predicted_s - 1 if self.measured_s and self.predicted_s else None


def _state(status: Mapping[str, Any]) -> str:
    if status["stage"] == "observe":
        return "observing"
    if status["acting"]:
        return "acting"
    return "paused by a trip" if status["trips"] else "profiling"


def panel(snapshot: Snapshot, *, plain: bool = False) -> Panel:
    """Return the panel: plan, memory, time, noise scale, overhead, switches and trips.

    Args:
        snapshot: what to show.
        plain: whether the terminal knows ASCII alone.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True, min_width=len("switches"))
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_row("plan", strip(snapshot, plain=plain) + Text("  " + told_plan(snapshot.plan, snapshot.recomputable)))
    if set(snapshot.plan.precision.values()) - {Precision.INHERIT}:
        table.add_row("", Text(_precisions(snapshot)))
    table.add_row("memory", _memory(snapshot, plain=plain))
    table.add_row("peak", Text(_measured_peak(snapshot)))
    table.add_row("step", Text(told_time(snapshot.predicted_s, snapshot.measured_s)))
    table.add_row("noise", Text(_noise(snapshot)))
    table.add_row("switches", _switches(snapshot))
    table.add_row("trips", Text(_trips(snapshot.trips), style="yellow" if snapshot.trips else ""))
    title = Text(printable(f"autotune: {snapshot.name}, {snapshot.state}"))
    steps = Text(told_steps(snapshot.steps, snapshot.total_steps))
    frame = box.ASCII if plain else box.ROUNDED
    return Panel(table, title=title, title_align="left", subtitle=steps, subtitle_align="right", box=frame)


def line(snapshot: Snapshot) -> Text:
    """Return all of it that fits one line, what matters most first."""
    pressure = "no budget" if snapshot.pressure is None else f"{snapshot.pressure:.0%} of the budget"
    parts = [
        f"autotune {snapshot.state}, {told_steps(snapshot.steps, snapshot.total_steps)}",
        f"trips: {_trips(snapshot.trips)}",
        pressure,
        told_plan(snapshot.plan, snapshot.recomputable),
        f"{snapshot.switches:,} switches",
        f"overhead {snapshot.overhead_frac:.1%}",
        told_time(snapshot.predicted_s, snapshot.measured_s),
    ]
    return Text(" | ".join(parts), style="yellow" if snapshot.trips else "", no_wrap=True, overflow="ellipsis")


def strip(snapshot: Snapshot, *, plain: bool = False) -> Text:
    """Return one cell per unit: kept, recomputed, or fixed; where there are many, one per few neighbours."""
    each = max(-(-len(snapshot.units) // _CELLS), 1)
    text = Text()
    for start in range(0, len(snapshot.units), each):
        names = [name for name in snapshot.units[start : start + each] if name in snapshot.recomputable]
        kinds = {snapshot.plan.storage_of(name) for name in names}
        both = "both" if len(kinds) > 1 else "recomputed" if Storage.RECOMPUTE in kinds else "kept"
        mark, ascii_mark, style = _SHOWN[both] if kinds else _FIXED
        text.append(ascii_mark if plain else mark, style=style)
    return text


def told_plan(plan: Plan, recomputable: frozenset[str]) -> str:
    """Return a plan in a few words."""
    count = sum(plan.storage_of(name) is Storage.RECOMPUTE for name in recomputable)
    return f"{count} of {len(recomputable)} recomputed, k = {plan.accumulation_steps}"


def told_time(predicted_s: float | None, measured_s: float | None) -> str:
    """Return predicted against measured seconds per step, in words."""
    if predicted_s is None:
        return _NOT_KNOWN
    told = f"{_milliseconds(predicted_s)} predicted"
    if not measured_s:
        return f"{told}, none measured yet"
    return f"{_milliseconds(measured_s)} measured, {told} ({measured_s / predicted_s - 1:+.1%})"


def told_steps(steps: int, total: int | None) -> str:
    """Return how far a run is."""
    return f"step {steps:,}" if total is None else f"step {steps:,} of {total:,}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _precisions(snapshot: Snapshot) -> str:
    if len(snapshot.units) > _CELLS:
        return str(snapshot.plan)
    return "".join(_LETTERS[snapshot.plan.precision_of(name)] for name in snapshot.units) + "  b bf16, h fp16, f fp32"


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
    # Where a peak is measured by tracing, that was some steps ago, and under another plan perhaps.
    measured = snapshot.measured_peak_bytes
    return "not measured yet" if measured is None else f"{format_bytes(measured)} when last measured"


def _noise(snapshot: Snapshot) -> str:
    if snapshot.noise_scale is None:
        return "scale unknown with one micro-batch a step"
    return f"scale {snapshot.noise_scale:,.0f} samples"


def _switches(snapshot: Snapshot) -> Text:
    counts = f"{snapshot.switches:,}, and {snapshot.placed:,} placements; overhead {snapshot.overhead_frac:.1%}"
    late = f"; {snapshot.over_budget_steps:,} steps over" if snapshot.over_budget_steps else ""
    return Text.assemble(counts, (late, "yellow"))


def _trips(trips: Sequence[tuple[int, str]]) -> str:
    if not trips:
        return "none"
    step, reason = trips[-1][0], printable(trips[-1][1])
    return (
        f"{len(trips)}, at step {step:,}: {reason}" if len(trips) == 1 else f"{len(trips)}, last at {step:,}: {reason}"
    )


def farewell(summary: Mapping[str, Any], reason: str, folder: object) -> str:
    """Return one line on a run that is over.

    Args:
        summary: the tuner's last ``status``.
        reason: why it was detached.
        folder: the run directory; ``None`` for none.
    """
    trips, switches = len(summary["trips"]), summary["switches"]
    counts = f"{switches:,} switch{'' if switches == 1 else 'es'}, {trips or 'no'} trip{'s' if trips > 1 else ''}"
    report = "" if folder is None else f"; autotune report {folder}"
    overhead = f"overhead {summary['overhead_frac']:.1%}"
    return f"autotune: {reason} after {summary['steps']:,} steps: {counts}, {overhead}{report}"
