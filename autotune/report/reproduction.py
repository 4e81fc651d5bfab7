"""A reproduced table of the paper, for terminals."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table


def reproduction_table(document: Mapping[str, Any]) -> Table:
    """Return a table with a row per number: the paper's, ours, their ratio, and each relative to its own baseline.

    Args:
        document: the output of ``reproduce --json``.
    """
    jobs = ", ".join(document["jobs"])
    table = Table(
        title=f"{document['table']} with {jobs}: the paper's numbers and ours ({len(document['seeds'])} seeds)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("")
    table.add_column("of", overflow="fold")
    for name in ("paper", "ours", "ours /\npaper", "paper /\nbaseline", "ours /\nbaseline"):
        table.add_column(name, justify="right", no_wrap=True)
    for (metric, unit), group in itertools.groupby(document["rows"], lambda row: (row["metric"], row["unit"])):
        rows = list(group)
        for number, row in enumerate(rows):
            table.add_row(
                f"{metric}, {unit}" if not number else "",
                row["configuration"],
                *(_number(row[key]) for key in ("paper", "ours", "ratio", "paper_change", "our_change")),
                end_section=len(rows) > 1 and number == len(rows) - 1,
            )
    return table


def missing_lines(document: Mapping[str, Any]) -> list[str]:
    """Return one line for each reason why our numbers are missing."""
    reasons: dict[str, list[str]] = {}
    for row in document["rows"]:
        if row["ours"] is None and row["note"]:
            reasons.setdefault(row["note"], []).append(f"{row['metric']} of {row['configuration']}")
    return [f"{', '.join(of)}: {reason}" for reason, of in reasons.items()]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
