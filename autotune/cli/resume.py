"""``autotune resume``: take up a tuning or a comparison that was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import compare, reproduce, tune
from autotune.cli import console as shared
from autotune.cli.console import JsonOption


def command(
    run: Annotated[Path, typer.Argument(help="The run directory of a tune, a compare, a demo or a reproduce.")],
    as_json: JsonOption = False,
) -> None:
    """Take up a campaign that was killed at any instant: what it measured stays, and it is finished."""
    from autotune import api
    from autotune.campaign.runs import RunDirectory

    output = shared.console(as_json=as_json)
    config = RunDirectory.open(run).read("config.json")
    with shared.Bars(output) as bars:
        document = api.resume(run, reporter=bars)
    if "table" in document:
        reproduce.show(document, output, as_json=as_json)
    elif "together" in document:
        compare.show_jobs(document, output, as_json=as_json)
    elif "arms" in document:
        compare.show(document, output, as_json=as_json)
    else:
        asked = config["asked"]
        tune.show(document, asked["job"], asked["method"], output, as_json=as_json)
