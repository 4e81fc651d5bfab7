"""``autotune reproduce``: repeat one of the paper's tables and compare its numbers with ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import console as shared
from autotune.cli.arguments import input_path
from autotune.cli.console import JsonOption, RunsOption, SeedsOption

if TYPE_CHECKING:
    from rich.console import Console


def command(
    table: Annotated[
        str,
        typer.Argument(
            help="table1 (CIFAR-10), table2 (WikiText-2), table3 (one component after another, then single choices), "
            "table4 (several ranks) or error-analysis (where the time saved comes from)."
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option("--data", callback=input_path, help="Folder with CIFAR-10 and WikiText-2, as published."),
    ] = None,
    scale: Annotated[
        str, typer.Option("--scale", help="paper: the paper's jobs; cpu: small jobs on data that every machine has.")
    ] = "paper",
    seeds: SeedsOption = 6,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Repeat one of the paper's tables with real training runs; show the paper's numbers, ours, and their ratios.

    An interrupted run is finished by autotune resume. table4, error-analysis and a part of table3 need DeepSpeed.
    """
    from autotune import commands

    output = shared.console(as_json=as_json)
    with shared.Bars(output) as bars:
        document = commands.reproduce(table, data=data, scale=scale, seeds=seeds, runs_dir=runs_dir, reporter=bars)
    show(document, output, as_json=as_json)


def show(document: dict[str, Any], output: Console, *, as_json: bool) -> None:
    """Print a reproduced table with its notes; with ``as_json`` also the document."""
    from autotune.report.reproduction import missing_lines, reproduction_table

    output.print(reproduction_table(document))
    for note in [*missing_lines(document), *document["notes"]]:
        output.print(f"- {note}.")
    output.print(
        f"That took {document['seconds'] / 60:.1f} minutes. Written: {document['run']}/reproduction.json",
        soft_wrap=True,
    )
    if as_json:
        shared.print_json(document)
