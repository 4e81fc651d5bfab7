"""``autotune export``: the files that launch a plan with other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import console as shared
from autotune.cli.arguments import output_folder, require_readable
from autotune.cli.console import JsonOption


def command(
    plan: Annotated[str, typer.Argument(metavar="PLAN|RUN", help="A plan file, or a run directory with one.")],
    job: Annotated[str, typer.Option("--job", help="The job that the plan is for.")],
    to: Annotated[
        str, typer.Option("--to", help="deepspeed, accelerate, transformers, torchtitan, python or json.")
    ] = "deepspeed",
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", min=1, max=100_000, help="Number of ranks to train on (default: those of the mesh, or 1)."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", callback=output_folder, help="The folder to write to; made if there is none.")
    ] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Write the files that launch a plan with another program, and list the parts of it that they cannot express."""
    from autotune.catalog import load_job
    from autotune.io.files import write_atomic, write_json
    from autotune.plan import Plan
    from autotune.report.plan_export import export

    path = Path(plan)
    require_readable(path, where=plan)
    found = Plan.load(path)
    if ranks is None:
        ranks = 1 if found.launch.layout is None else found.launch.layout.ranks
    made = export(found, load_job(job), to, ranks=ranks, reference=job)
    out.mkdir(parents=True, exist_ok=True)
    for name, document in made.files.items():
        if isinstance(document, str):
            write_atomic(out / name, document)
        else:
            write_json(out / name, dict(document))
    if as_json:
        shared.print_json(made.to_json())
        return
    output = shared.console(as_json=False)
    output.print(f"written: {', '.join(str(out / name) for name in made.files)}", soft_wrap=True)
    output.print(f"launch: {made.command}", soft_wrap=True)
    for note in made.notes:
        output.print(f"note: {note}", soft_wrap=True)
