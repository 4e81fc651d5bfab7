"""``autotune report``: one page on a run, in one file that fetches nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import console as shared
from autotune.cli.console import JsonOption


def command(
    run: Annotated[Path, typer.Argument(help="The run directory of an attached run.")],
    out: Annotated[Path | None, typer.Option("--out", help="The file to write; RUN/report.html, if left out.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a page on an attached run: memory, times, plans, decisions and trips."""
    from autotune.errors import RunDirectoryError
    from autotune.report.attached_page import PAGE_NAME, write_page
    from autotune.report.attached_run import read_attached, to_json, verdict

    found = read_attached(run)
    path = out or run / PAGE_NAME
    try:
        write_page(found, path)
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise RunDirectoryError(reason, where=str(path), allowed="a file in a writable folder") from error
    if as_json:
        shared.print_json({**to_json(found), "report": str(path)})
        return
    output = shared.console(as_json=False)
    output.print(verdict(found), soft_wrap=True)
    output.print(f"Written: {path}", soft_wrap=True)
