"""``autotune train``: train the policy that adjusts the planner."""

from __future__ import annotations

import shlex
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

    The policy folder is written to the run directory. With --search, search for a better recipe instead.
    """
    from autotune import commands
    from autotune.commands.training import FineTuneRequest, TrainRequest
    from autotune.errors import InputError

    if engine != "torch":
        raise InputError(f"engine is {engine!r}", where="--engine", allowed="torch")
    if start is not None and job is None:
        raise InputError("--from requires a job: autotune train JOB --from POLICY")
    workers = shared.cluster(cluster, worker_cores)
    request = TrainRequest(
        recipe=recipe, resume=resume, processes=processes, cluster=workers, trials=search, decisions=search_decisions
    )
    output = shared.console(as_json=as_json)
    with shared.Bars(output) as bars:
        if job is None:
            document = commands.train(request, runs_dir=runs_dir, reporter=bars)
        elif (recipe, resume, search, workers) != (None, None, None, None):
            raise InputError("a job cannot be combined with --recipe, --search, --resume or --cluster")
        else:
            real = FineTuneRequest(job=job, policy=start, memory_budget=memory_budget, windows=windows, seed=seed)
            document = commands.fine_tune(real, runs_dir=runs_dir, reporter=bars)
    if as_json:
        shared.print_json(document)
    elif job is not None:
        _print_fine_tuned(document, output)
    elif search is not None:
        _print_searched(document, output)
    else:
        _print_trained(document, output)


def _print_fine_tuned(document: dict[str, Any], output: Console) -> None:
    output.print(
        f"Mean cost on held-out windows: {document['cost_before']:.4f} before, {document['cost_after']:.4f} after; "
        f"kept: {document['kept']}. The policy is {document['policy']}",
        soft_wrap=True,
    )


def _print_trained(document: dict[str, Any], output: Console) -> None:
    low, high = document["won_percent_ci95"]
    arms = shlex.quote(f"planner,{document['policy']}")
    output.print(
        f"{document['decisions']:,} decisions in {document['training_s'] / 60:.0f} min; against the planner alone "
        f"{document['won_percent_mean']:+.2f} % of time (95 % interval {low:+.2f} to {high:+.2f}) on jobs it was not "
        f"trained on. The policy is {document['policy']}: autotune compare JOB --arms {arms}",
        soft_wrap=True,
    )


def _print_searched(document: dict[str, Any], output: Console) -> None:
    from autotune.report.terminal_tables import search_table, search_verdict

    output.print(search_table(document))
    output.print(search_verdict(document), soft_wrap=True)
