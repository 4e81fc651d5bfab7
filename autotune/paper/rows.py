"""Set the paper's numbers beside ours: one row per number, the same for every table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

REPRODUCTION_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number of the paper and what was measured for it here.

    Attributes:
        metric: what it is.
        configuration: of which configuration.
        unit: of both numbers.
        paper: the paper's; ``None`` where it states none.
        ours: measured here; ``None`` where it could not be, and the note says why.
        paper_change: the paper's over its own baseline's; ``None`` for a baseline, or where there is none.
        our_change: ours over our own baseline's.
        source: where the paper's stands.
        note: what a reader must know of ours.
    """

    metric: str
    configuration: str
    unit: str
    paper: float | None = None
    ours: float | None = None
    paper_change: float | None = None
    our_change: float | None = None
    source: str = ""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Return ours over the paper's."""
        return None if self.paper is None or self.ours is None or not self.paper else self.ours / self.paper

    def to_json(self) -> dict[str, Any]:
        """Return the row as a JSON object, the ratio included."""
        return {**asdict(self), "ratio": self.ratio}


def over(value: float | None, baseline: float | None) -> float | None:
    """Return a number over its baseline's, where both are there."""
    return None if value is None or not baseline else value / baseline


def document_of(
    table: str, scale: str, rows: Sequence[Row], notes: Sequence[str], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what ``reproduce --json`` prints.

    Args:
        table: which of the paper's.
        scale: at which scale it was repeated.
        rows: the paper's numbers and ours; those of one metric are put together.
        notes: what a reader must know, in sentences.
        facts: what else was measured, by name.
    """
    metrics = list(dict.fromkeys(row.metric for row in rows))
    return {
        "version": REPRODUCTION_VERSION,
        "table": table,
        "scale": scale,
        **facts,
        "rows": [row.to_json() for row in sorted(rows, key=lambda row: metrics.index(row.metric))],
        "notes": list(notes),
    }
