"""``autotune replay``: compare the predictions in a decision log with measurements, and repeat the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.budget import format_bytes
from autotune.cli import console as shared
from autotune.cli.arguments import input_path
from autotune.cli.console import JsonOption, SeedOption

if TYPE_CHECKING:
    from rich.table import Table


def command(
    log: Annotated[
        Path, typer.Argument(callback=input_path, help="Run directory of an attached run, or its decisions.jsonl.")
    ],
    job: Annotated[str | None, typer.Option("--job", help="Job to train with the recorded plans.")] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, max=shared.MOST_STEPS, help="Number of steps; by default as recorded."),
    ] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare an attached run's predictions with measurements; with --job, repeat its schedule without its policy."""
    from autotune.catalog import load_job
    from autotune.live.replaying import replay

    found = None if job is None else load_job(job)
    with shared.Bars(shared.console(as_json=as_json)) as bars:
        document = replay(log, found, steps=steps, seed=seed, reporter=bars)
    if as_json:
        shared.print_json(document)
        return
    output = shared.console(as_json=False)
    for title in ("recorded", "repeated"):
        if document[title] is not None:
            output.print(_table(title, document[title]))


def _table(title: str, run: dict[str, Any]) -> Table:
    table = shared.table(title=f"{title}: {run['switches']} switches", title_justify="left")
    for name in ("step", "plan", "predicted", "measured", "off by", "predicted peak", "measured peak"):
        table.add_column(name, justify="left" if name == "plan" else "right")
    for row in run["windows"]:
        table.add_row(
            str(row["step"]),
            row["plan"] or "no plan",
            _seconds(row["predicted_s"]),
            _seconds(row["measured_s"]),
            "" if row["time_error_frac"] is None else f"{row['time_error_frac']:+z.1%}",
            "" if row["predicted_bytes"] is None else format_bytes(int(row["predicted_bytes"])),
            "" if row["measured_bytes"] is None else format_bytes(int(row["measured_bytes"])),
        )
    return table


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value * 1e3:.1f} ms"
