"""``autotune train``: train the policy that adjusts the planner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import console as shared
from autotune.cli.arguments import input_path
from autotune.cli.console import BudgetOption, ClusterOption, JsonOption, RunsOption, SeedOption, WorkerCoresOption

if TYPE_CHECKING:
    from rich.console import Console


def command(
    job: Annotated[str | None, typer.Argument(help="Real job to continue training a policy on; see --from.")] = None,
    start: Annotated[
        Path | None, typer.Option("--from", callback=input_path, help="Policy folder to start from.")
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help="Engine for a real job: torch.")] = "torch",
    windows: Annotated[
        int,
        typer.Option("--windows", min=16, max=shared.MOST_STEPS, help="Number of windows of a real job."),
    ] = 96,
    memory_budget: BudgetOption = None,
    seed: SeedOption = 0,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", callback=input_path, help="Recipe file (.toml); see policies/ppo.toml.")
    ] = None,
    search: Annotated[
        int | None,
        typer.Option("--search", max=10_000, help="Number of short trainings to search for better PPO settings."),
    ] = None,
    search_decisions: Annotated[
        int | None,
        typer.Option(
            "--search-decisions",
            max=10**9,
            help="Number of decisions in each short training; by default a fifth of the recipe's.",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", callback=input_path, help="Run directory of an interrupted training or search."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, max=256, help="Number of seeds or trials trained in parallel.")
    ] = None,
    cluster: ClusterOption = None,
    worker_cores: WorkerCoresOption = 1,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Train a policy by PPO on simulated jobs with changing conditions, or continue training one on a real job.

    The policy folder is written to the run directory. With --search, a recipe is searched for instead.
    """
    from autotune import commands
    from autotune.errors import InputError

    if engine != "torch":
        raise InputError(f"engine is {engine!r}", where="--engine", allowed="torch")
    if search_decisions is not None and search is None:
        raise InputError("--search-decisions requires --search")
    workers = shared.cluster(cluster, worker_cores)
    if workers is not None and (job is not None or search is not None):
        raise InputError("--cluster cannot be combined with a job or --search: it trains seeds on simulated jobs")
    output = shared.console(as_json=as_json)
    if job is not None:
        if recipe is not None or resume is not None or search is not None:
            raise InputError("a job cannot be combined with --recipe, --search or --resume")
        with shared.Bars(output) as bars:
            document = commands.fine_tune(
                job,
                start,
                memory_budget=memory_budget,
                windows=windows,
                seed=seed,
                runs_dir=runs_dir,
                reporter=bars,
            )
        _show(document, output, _print_fine_tuned, as_json=as_json)
        return
    if start is not None:
        raise InputError("--from requires a job: autotune train JOB --from POLICY")
    with shared.Bars(output) as bars:
        if search is not None:
            document = commands.search_recipe(
                recipe,
                trials=search,
                decisions=search_decisions,
                resume=resume,
                processes=processes,
                runs_dir=runs_dir,
                reporter=bars,
            )
        else:
            document = commands.train(
                recipe, resume=resume, processes=processes, cluster=workers, runs_dir=runs_dir, reporter=bars
            )
    _show(document, output, _print_trained if search is None else _print_searched, as_json=as_json)


def _show(
    document: dict[str, Any], output: Console, show: Callable[[dict[str, Any], Console], None], *, as_json: bool
) -> None:
    if as_json:
        shared.print_json(document)
    else:
        show(document, output)


def _print_fine_tuned(document: dict[str, Any], output: Console) -> None:
    output.print(
        f"Mean cost on held-out windows: {document['cost_before']:.4f} before, {document['cost_after']:.4f} after; "
        f"kept: {document['kept']}. The policy is {document['policy']}",
        soft_wrap=True,
    )


def _print_trained(document: dict[str, Any], output: Console) -> None:
    low, high = document["won_percent_ci95"]
    output.print(
        f"{document['decisions']:,} decisions in {document['training_s'] / 60:.0f} min; against the planner alone "
        f"{document['won_percent_mean']:+.2f} % of time (95 % interval {low:+.2f} to {high:+.2f}) on jobs it was not "
        f"trained on. The policy is {document['policy']}: autotune compare JOB --arms planner,{document['policy']}",
        soft_wrap=True,
    )


def _print_searched(document: dict[str, Any], output: Console) -> None:
    from autotune.report.terminal_tables import search_table, search_verdict

    output.print(search_table(document))
    output.print(search_verdict(document), soft_wrap=True)
