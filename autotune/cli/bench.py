"""``autotune bench``: measure the project itself, as ratios within one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import console as shared
from autotune.cli.console import JsonOption, RunsOption, SeedOption

app = typer.Typer(help="Benchmarks; results are written to runs/benchmarks/.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep ``bench`` a group while it has one benchmark."""


@app.command("overhead")
def overhead(
    job: Annotated[str, typer.Option("--job", help="The job to train.")] = "charlm",
    pairs: Annotated[int, typer.Option("--pairs", min=2, help="Pairs of blocks of ten steps.")] = 8,
    seed: SeedOption = 0,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Compare the engine's step with a hand-written loop of the same job, interleaved."""
    from autotune.campaign.bench_overhead import bench_overhead
    from autotune.campaign.runs import require_writable
    from autotune.catalog import load_job
    from autotune.files import write_json

    require_writable(runs_dir)
    found = load_job(job)
    output = shared.console(as_json=as_json)
    with shared.Bars(output) as bars:
        bars.stage(f"{found.name}: engine against a plain loop", pairs)
        document = bench_overhead(found, pairs=pairs, seed=seed, on_pair=bars.advance)
    folder = Path(runs_dir) / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"overhead-{found.name}.json"
    write_json(path, document)
    if as_json:
        shared.print_json(document)
    low, high = document["ratio_ci95"]
    output.print(
        f"engine / plain loop = {document['ratio_median']:.4f} (median of {pairs} pairs, 95 % interval {low:.4f} to "
        f"{high:.4f}); written to {path}",
        soft_wrap=True,
    )
