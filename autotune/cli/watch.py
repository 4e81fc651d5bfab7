"""``autotune watch``: show the state of an attached run from its decision log, while it trains."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import console as shared
from autotune.cli.arguments import input_path
from autotune.cli.console import JsonOption

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from autotune.report.standing import Watched

# Seconds between two reads of the log.
_POLL_S = 0.5
# A terminal with fewer rows gets one line.
_ROWS_OF_A_PANEL = 14
_NO_LINE = "autotune: the decision log has no line yet"


def command(
    run: Annotated[Path, typer.Argument(callback=input_path, help="The run directory of an attached run.")],
    once: Annotated[bool, typer.Option("--once", help="Show the state of the run once, and end.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the state of an attached run while it trains: plan, memory, times, switches, trips. Ctrl-C ends the display.

    Only the run's decision log is read. A terminal shows a panel; other outputs get one line per decision.
    """
    from autotune.cli.terminal_panel import farewell
    from autotune.report.standing import Watched

    watched = Watched(run)
    if as_json:
        watched.look()
        shared.print_json(_document(watched))
        return
    output = shared.console(as_json=False)
    show = _draw if output.is_terminal and not output.is_dumb_terminal else _tell
    with contextlib.suppress(KeyboardInterrupt):
        show(watched, output, once=once)
    if watched.is_over:
        output.print(farewell(watched), soft_wrap=True)


def _draw(watched: Watched, output: Console, *, once: bool) -> None:
    """Keep a panel on a terminal up to date until the run has ended."""
    from rich.live import Live

    with Live(console=output, auto_refresh=False) as live:
        while True:
            watched.look()
            live.update(_drawn(watched, output), refresh=True)
            if once or watched.is_over:
                return
            time.sleep(_POLL_S)


def _drawn(watched: Watched, output: Console) -> RenderableType:
    from rich.text import Text

    from autotune.cli.terminal_panel import line, panel

    snapshot = watched.snapshot
    if snapshot is not None and output.size.height >= _ROWS_OF_A_PANEL:
        return panel(snapshot, watched.silent_s, plain=output.options.ascii_only)
    told = _NO_LINE if snapshot is None else line(snapshot, watched.silent_s)
    return Text(told, no_wrap=True, overflow="ellipsis")


def _tell(watched: Watched, output: Console, *, once: bool) -> None:
    """Print one line with the state of the run, and one for each new decision and trip until the run has ended."""
    from autotune.cli.terminal_panel import line

    watched.look()
    snapshot = watched.snapshot
    output.print(_NO_LINE if snapshot is None else line(snapshot, watched.silent_s), soft_wrap=True)
    while not (once or watched.is_over):
        time.sleep(_POLL_S)
        for found in watched.look():
            output.print(line(found), soft_wrap=True)


def _document(watched: Watched) -> dict[str, Any]:
    from autotune.errors import RunDirectoryError

    if watched.snapshot is None:
        raise RunDirectoryError("the decision log has no line yet", where=str(watched.folder))
    return {
        "version": 1,
        "run": str(watched.folder),
        **watched.snapshot.to_json(),
        "seconds_since_last_line": watched.silent_s,
    }
