"""``autotune resume``: finish a tuning, a comparison or a reproduction that was interrupted."""

from __future__ import annotations

import shlex
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
        Path, typer.Argument(callback=input_path, help="Run directory of tune, compare, demo or reproduce.")
    ],
    job: Annotated[
        list[str] | None,
        typer.Option("--job", help="Job of the run, if it is not in the catalog; repeat the option for several jobs."),
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option("--arms", help="Arms of the original command, if some are files or folders."),
    ] = None,
    storage: Annotated[str | None, typer.Option("--storage", help="Database of the original command.")] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="Ray cluster of the original command.")] = None,
    ds_config: Annotated[
        Path | None,
        typer.Option("--ds-config", callback=input_path, help="DeepSpeed configuration of the original command."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", callback=input_path, help="Data folder of the original reproduce.")
    ] = None,
    carbon_intensity: Annotated[
        str | None, typer.Option("--carbon-intensity", help="File of carbon intensities of the original command.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Finish an interrupted tuning, comparison or reproduction; everything that was measured is kept.

    Run directories contain only data: give code, files outside them and addresses as in the original command.
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


def finishing(folder: str) -> str | None:
    """Return the command that finishes the run in a folder; ``None`` if no command does."""
    from autotune.catalog import is_catalog_reference
    from autotune.errors import InputError
    from autotune.records.run_directory import RunDirectory

    try:
        config = RunDirectory.open(Path(folder)).config
    except InputError:
        return None
    if config.verb not in ("tune", "compare", "demo", "reproduce"):
        return None
    asked = getattr(config, "asked", None)
    name = getattr(asked, "job", None) or config.job
    own = [] if asked is None or is_catalog_reference(name) else ["--job", name]
    return shlex.join(["autotune", "resume", folder, *own])
