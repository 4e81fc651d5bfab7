"""Where the time of steps goes, as tables and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table as TerminalTable

from autotune.report.rendering import Table
from autotune.step_parts import PARTS, StepParts, advice, mean_parts

# How parts are named in tables.
NAMES: Mapping[str, str] = {
    "data": "data",
    "compute": "compute",
    "communication": "comm.",
    "synchronisation": "waiting",
    "update": "update",
    "control": "own",
}
_NOTE = (
    "Shares of a timed step: fetching the batch and moving it to the device; forward and backward passes; on several "
    "ranks communication that nothing hides, and waiting for the slowest rank; unscaling, clipping and the optimizer's "
    "update; this program's own work."
)
Named = Sequence[tuple[str, StepParts]]


def read_parts(document: Mapping[str, Any] | None) -> StepParts | None:
    """Return the parts of a validated document; ``None`` for ``None``."""
    return None if document is None else StepParts.from_json(document)


def arm_parts(comparison: Mapping[str, Any]) -> Named:
    """Return the parts of each arm's steps, the mean of its runs; arms without any are left out."""
    named = []
    for arm in comparison["arms"]:
        parts = mean_parts([(run["steps"], read_parts(run.get("parts"))) for run in arm["runs"]])
        if parts is not None:
            named.append((arm["name"], parts))
    return named


def tuned_parts(document: Mapping[str, Any]) -> Named:
    """Return the parts of the baseline's and the tuned plan's steps of ``tuned.json``, if it has any."""
    measured = document["measured"]
    found = (("baseline", measured.get("baseline_parts")), ("tuned", measured.get("parts")))
    return [(name, parts) for name, one in found if (parts := read_parts(one)) is not None]


def words(parts: StepParts) -> str:
    """Return the parts that take at least one percent of the step, the largest first, and the rates."""
    shares = sorted(parts.shares().items(), key=lambda one: -one[1])
    told = [f"{share:.0%} {NAMES[part]}" for part, share in shares if share >= 0.01]
    return "; ".join([", ".join(told), *_rates(parts)])


def _rates(parts: StepParts) -> list[str]:
    found = [] if parts.mfu is None else [f"MFU {parts.mfu:.1%}"]
    return found + ([rate] if (rate := _rate(parts)) else [])


def _rate(parts: StepParts) -> str:
    if parts.items_per_s is not None:
        return f"{parts.items_per_s:,.0f} items/s"
    return "" if parts.samples_per_s is None else f"{parts.samples_per_s:,.4g} samples/s"


def _shown(named: Named) -> list[str]:
    """Return the parts that take time in any of the rows; ranks' parts are left out for one rank."""
    return [part for part in PARTS if any(parts.seconds()[part] > 0 for _, parts in named)]


def _cells(parts: StepParts, shown: Sequence[str]) -> list[str]:
    shares = parts.shares()
    utilisation = "" if parts.mfu is None else f"{parts.mfu:.1%}"
    return [*(f"{shares[part]:.1%}" for part in shown), utilisation, _rate(parts)]


def terminal_table(named: Named) -> TerminalTable | None:
    """Return the table for terminals, narrow enough for 80 columns; ``None`` without parts."""
    if not named:
        return None
    table, shown = TerminalTable(title="where the time of a step goes", title_justify="left"), _shown(named)
    for name in ("", *(NAMES[part] for part in shown), "MFU", "rate"):
        table.add_column(name, justify="right" if name else "left")
    for name, parts in named:
        table.add_row(name, *_cells(parts, shown))
    return table


def time_lines(named: Named) -> list[str]:
    """Return one line of advice on the last row that has any, and where the peak rate in MFU comes from."""
    told = [f"{name}: {line}." for name, parts in reversed(named) if (line := advice(parts)) is not None]
    sources = {parts.peak_source for _, parts in named if parts.mfu is not None}
    return [*told[:1], *(f"MFU is of a peak rate from: {source}." for source in sorted(sources))]


def time_table(named: Named) -> Table | None:
    """Return the table of a page; ``None`` without parts."""
    if not named:
        return None
    shown = _shown(named)
    rows = [[name, f"{parts.step_s * 1e3:,.1f} ms", *_cells(parts, shown)] for name, parts in named]
    columns = ("", "step", *(NAMES[part] for part in shown), "MFU", "rate")
    note = " ".join([_NOTE, *time_lines(named)])
    return Table(label="Where the time of a step goes", columns=columns, rows=rows, numbers=range(1, 9), note=note)
