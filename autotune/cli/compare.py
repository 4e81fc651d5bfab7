"""``autotune compare``: compare arms on paired seeds."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from autotune.cli import console as shared
from autotune.cli.console import (
    BudgetOption,
    JsonOption,
    LeanOption,
    RunsOption,
    SeedOption,
    StepsOption,
    StorageOption,
    TrialsOption,
)


def command(
    job: Annotated[str, typer.Argument(help="A catalog name, package.module:attribute, or file.py:attribute.")],
    arms: Annotated[
        str, typer.Option("--arms", help="Rules, methods, plan files or policy folders, separated by commas.")
    ] = "baseline,uniform-bf16,recompute-all,sqrt,paper,random,optuna,ppo",
    seeds: Annotated[int, typer.Option("--seeds", help="Paired fresh seeds; fewer than 6 give an indication.")] = 10,
    memory_budget: BudgetOption = None,
    dips: Annotated[
        str | None,
        typer.Option("--dips", help="EVERY:SHARE: the budget shrinks to this share in every such window, as in 5:70%."),
    ] = None,
    steps: StepsOption = 120,
    trials: TrialsOption = None,
    lean: LeanOption = True,
    storage: StorageOption = None,
    seed: SeedOption = 0,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Find the arms that must be searched for, then compare all of them on paired, interleaved, fresh seeds."""
    from autotune import api

    output = shared.console(as_json=as_json)
    with shared.Bars(output) as bars:
        document = api.compare(
            job,
            [name.strip() for name in arms.split(",")],
            seeds=seeds,
            memory_budget=memory_budget,
            dips=dips,
            steps=steps,
            trials=trials,
            lean=lean,
            storage=storage,
            seed=seed,
            runs_dir=runs_dir,
            reporter=bars,
        )
    show(document, output, as_json=as_json)


def show(document: dict[str, Any], output: Console, *, as_json: bool) -> None:
    """Print a comparison: a table, one sentence, and where the files are; or the document itself."""
    from autotune.report.tables import alone_lines, comparison_table, plan_lines, verdict_line

    output.print(comparison_table(document))
    for line in [*plan_lines(document), *alone_lines(document)]:
        output.print(line, soft_wrap=True)
    output.print(verdict_line(document))
    output.print(f"Written: {document['run']}/ (report.html, comparison.json, plan.json, figures)", soft_wrap=True)
    if as_json:
        shared.print_json(document)
