"""``autotune report``: write a page about a run as one self-contained file, and optionally figures and tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import console as shared
from autotune.cli.arguments import input_path, output_file, output_folder
from autotune.cli.console import JsonOption


def command(
    run: Annotated[
        Path,
        typer.Argument(callback=input_path, help="The run directory of a tune, a compare, a demo or an attached run."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", callback=output_file, help="File to write (default: RUN/report.html)."),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures", callback=output_folder, help="Folder for the figures: SVG, and for a campaign also PNG."
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", callback=output_folder, help="A folder for a campaign's tables as CSV.")
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option("--parquet", callback=output_folder, help="The same as Parquet.")
    ] = None,
    carbon_intensity: Annotated[
        str | None,
        typer.Option("--carbon-intensity", help="gCO2/kWh as a number, or a CSV file of them that covers the runs."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", callback=input_path, help="A profile of the job, for a campaign without one."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a page about a run: verdict, plan and reasons, arms, pictures, costs, environment, and how to repeat it."""
    from autotune.cost_model.carbon import Intensity
    from autotune.errors import InputError
    from autotune.io.files import write_atomic
    from autotune.records.run_directory import RunDirectory
    from autotune.report import attached_page, attached_run, sheets, writing
    from autotune.report.campaign_run import read_campaign

    intensity = None if carbon_intensity is None else Intensity.parse(carbon_intensity)
    made: dict[str, str] = {}
    path = out or run / writing.PAGE_NAME
    if RunDirectory.open(run).config.verb == "attach":
        if csv or parquet or profile or intensity is not None:
            where = "--csv, --parquet, --profile, --carbon-intensity"
            raise InputError("these options only apply to campaigns, not to attached runs", where=where)
        attached = attached_run.read_attached(run)
        text, drawn = attached_page.page_of(attached), attached_page.figures_of(attached)
        verdict, document = attached_run.verdict(attached), attached_run.to_json(attached)
    else:
        campaign = read_campaign(run, profile)
        page = writing.page_for(campaign, intensity)
        text, drawn, verdict, document = page.text, page.figures, page.verdict, writing.to_json(page)
        for folder, kind in ((csv, "csv"), (parquet, "parquet")):
            if folder is not None:
                with _writing(made, kind, folder):
                    sheets.write_sheets(campaign, folder, kind, intensity)
        if figures is not None:
            with _writing(made, "figures", figures):
                writing.draw_figures(page, figures)
    if figures is not None:
        with _writing(made, "figures", figures):
            writing.write_figures(drawn, figures)
    with _writing(made, "report", path):
        write_atomic(path, text)
    if as_json:
        shared.print_json({**document, **made})
        return
    output = shared.console(as_json=False)
    output.print(verdict, soft_wrap=True)
    for place in made.values():
        output.print(f"Written: {place}", soft_wrap=True)


@contextmanager
def _writing(made: dict[str, str], kind: str, path: Path) -> Iterator[None]:
    """Record what is written and where; turn a failure to write into a one-line error."""
    from autotune.errors import RunDirectoryError

    try:
        yield
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise RunDirectoryError(reason, where=str(path), allowed="a file or a folder in a writable folder") from error
    made[kind] = str(path)
