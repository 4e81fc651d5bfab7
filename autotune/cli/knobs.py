"""``autotune knobs``: measure what free knobs win on a job."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Annotated

import typer

from autotune.cli import console as shared
from autotune.cli.console import JobArgument, JsonOption, SeedOption, TolerantOption


def command(
    job: JobArgument,
    pairs: Annotated[
        int,
        typer.Option(
            "--pairs", min=6, max=10_000, help="Most pairs of timed steps, of a knob and of the job as it is."
        ),
    ] = 12,
    only: Annotated[
        str, typer.Option("--only", help="The knobs to measure, as in fused,threads=4; by default all that may help.")
    ] = "",
    tolerant: TolerantOption = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure launch choices that need no plan: fused optimizers, layouts, attention kernels, threads, data loading.

    Nothing is written or changed. Recommended are bit-identical knobs that are faster beyond doubt. An AdamW
    with states of 8 bits is measured too, for its memory.
    """
    from autotune.campaign.knob_trials import KnobTrials
    from autotune.catalog import load_job
    from autotune.report.knobs_section import COLUMNS, absent_lines, knob_lines, rows

    found = load_job(job)
    output = shared.console(as_json=as_json)
    with shared.Bars(output) as bars:
        names = tuple(only.split(",")) if only else ()
        trials = KnobTrials(only=names, pairs=pairs, tolerant=tolerant, seed=seed, reporter=bars)
        document = asdict(trials.measure(found))
    if as_json:
        shared.print_json(document)
        return
    table = shared.table(title=f"{found.name}: free knobs", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, no_wrap=name in ("knob", "training"))
    for row in rows(document):
        table.add_row(*row)
    output.print(table)
    for line in (*absent_lines(document), *knob_lines(document)):
        output.print(line, soft_wrap=True)
    if document["recommended"] is not None:
        output.print("Tune, compare and export with them:")
        command = shlex.join(["autotune", "tune", f"{job}+{document['recommended']}"])
        output.print(f"    {command}", soft_wrap=True)
