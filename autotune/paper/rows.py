"""The format of every table: one row per number of the paper, with ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

REPRODUCTION_VERSION = 1


@dataclass(frozen=True, slots=True)
class TableRow:
    """One number of the paper and our measurement.

    Attributes:
        metric: what the number measures.
        configuration: what it was measured on.
        unit: unit of all numbers.
        ours: the number measured here; ``None`` where it could not be measured.
        base: our baseline's number; ``None`` in the row of the baseline itself, or where there is no baseline.
        paper: the paper's number; ``None`` where it states none.
        paper_base: the number of the paper's baseline; ``None`` as for ``base``.
        source: where the paper states its number.
        problem: reason if our number is missing.
    """

    metric: str
    configuration: str
    unit: str
    ours: float | None
    _: KW_ONLY
    base: float | None = None
    paper: float | None = None
    paper_base: float | None = None
    source: str = ""
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the row as a JSON object, with each number over its baseline's, and ours over the paper's."""
        return {
            "metric": self.metric,
            "configuration": self.configuration,
            "unit": self.unit,
            "paper": self.paper,
            "ours": self.ours,
            "paper_change": over(self.paper, self.paper_base),
            "our_change": over(self.ours, self.base),
            "source": self.source,
            "note": self.problem if self.ours is None else "",
            "ratio": over(self.ours, self.paper),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A measured table.

    Attributes:
        rows: its rows; :meth:`document` groups them by metric.
        notes: sentences that a reader must know.
        facts: further measurements by name.
    """

    rows: list[TableRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def __add__(self, other: Table) -> Table:
        return Table(rows=self.rows + other.rows, notes=self.notes + other.notes, facts={**self.facts, **other.facts})

    def document(self, name: str, scale: str, about: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document that ``reproduce --json`` prints.

        Args:
            name: name of the paper's table.
            scale: scale at which it was reproduced.
            about: device, jobs and seeds.
        """
        metrics = list(dict.fromkeys(row.metric for row in self.rows))
        return {
            "version": REPRODUCTION_VERSION,
            "table": name,
            "scale": scale,
            **about,
            **self.facts,
            "rows": [row.to_json() for row in sorted(self.rows, key=lambda row: metrics.index(row.metric))],
            "notes": self.notes,
        }


def over(value: float | None, baseline: float | None) -> float | None:
    """Return a number divided by a baseline's; ``None`` if either is missing or the baseline's is 0."""
    return None if value is None or not baseline else value / baseline
