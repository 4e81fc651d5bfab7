"""``autotune resume``: take up a tuning or a comparison that was interrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import compare, reproduce, tune
from autotune.cli import console as shared
from autotune.cli.arguments import input_path
from autotune.cli.console import JsonOption


def command(
    run: Annotated[
        Path, typer.Argument(callback=input_path, help="The run directory of a tune, a compare, a demo or a reproduce.")
    ],
    job: Annotated[
        list[str] | None,
        typer.Option("--job", help="The job, if it is not in the catalog; several times for a run on several jobs."),
    ] = None,
    arms: Annotated[
        str | None, typer.Option("--arms", help="The arms again, if plan files or policy folders are among them.")
    ] = None,
    storage: Annotated[str | None, typer.Option("--storage", help="The database again, if there was one.")] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="The Ray cluster again, if there was one.")] = None,
    ds_config: Annotated[
        Path | None,
        typer.Option(
            "--ds-config", callback=input_path, help="The configuration of DeepSpeed again, if there was one."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", callback=input_path, help="A reproduction's data again, if it was given.")
    ] = None,
    carbon_intensity: Annotated[
        str | None, typer.Option("--carbon-intensity", help="The file of carbon intensities again, if there was one.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Take up a campaign that was killed at any instant: what it measured stays, and it is finished.

    A run's folder is data: code, files outside it and addresses that it was begun with must be named again.
    """
    from autotune import commands
    from autotune.io.files import read_json
    from autotune.records.run_directory import RunDirectory
    from autotune.records.run_documents import TuneConfig

    output = shared.console(as_json=as_json)
    config = RunDirectory.open(run).config
    with shared.Bars(output) as bars:
        document = commands.resume(
            run,
            job=job,
            arms=[] if arms is None else [name.strip() for name in arms.split(",")],
            storage=storage,
            cluster=cluster,
            ds_config=None if ds_config is None else read_json(ds_config),
            data=None if data is None else data.absolute(),
            carbon_intensity=carbon_intensity,
            reporter=bars,
        )
    if "table" in document:
        reproduce.show(document, output, as_json=as_json)
    elif "together" in document:
        compare.show_jobs(document, output, as_json=as_json)
    elif "arms" in document:
        compare.show(document, output, as_json=as_json)
    else:
        assert isinstance(config, TuneConfig)
        request = replace(config.asked, job=config.asked.job or config.job)
        tune.show(document, request, output, as_json=as_json)
