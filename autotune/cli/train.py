"""``autotune train``: train the policy that leans on the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import console as shared
from autotune.cli.console import BudgetOption, JsonOption, RunsOption, SeedOption


def command(
    job: Annotated[str | None, typer.Argument(help="A real job to train a policy on with; see --from.")] = None,
    start: Annotated[Path | None, typer.Option("--from", help="The policy folder to begin with.")] = None,
    engine: Annotated[str, typer.Option("--engine", help="What a real job runs on: torch.")] = "torch",
    windows: Annotated[int, typer.Option("--windows", min=16, help="Windows of a real job to train on.")] = 96,
    memory_budget: BudgetOption = None,
    seed: SeedOption = 0,
    recipe: Annotated[Path | None, typer.Option("--recipe", help="A recipe (.toml); see policies/ppo.toml.")] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="The run directory of an interrupted training.")
    ] = None,
    processes: Annotated[int | None, typer.Option("--processes", min=1, help="Seeds trained at once.")] = None,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Train a policy by PPO: on simulated jobs whose conditions move, or on with one real job.

    The policy's folder is left in the run directory.
    """
    from autotune import api
    from autotune.errors import InputError

    if engine != "torch":
        raise InputError(f"engine is {engine!r}", where="--engine", allowed="torch")
    output = shared.console(as_json=as_json)
    if job is not None:
        if recipe is not None or resume is not None:
            raise InputError("a job is given", where="train", allowed="no --recipe and no --resume beside it")
        with shared.Bars(output) as bars:
            document = api.fine_tune(
                job,
                start,
                memory_budget=memory_budget,
                windows=windows,
                seed=seed,
                runs_dir=runs_dir,
                reporter=bars,
            )
        if as_json:
            shared.print_json(document)
            return
        output.print(
            f"Mean cost on held-out windows: {document['cost_before']:.4f} before, {document['cost_after']:.4f} after; "
            f"kept: {document['kept']}. The policy is {document['policy']}",
            soft_wrap=True,
        )
        return
    if start is not None:
        raise InputError("--from is given without a job", where="train", allowed="autotune train JOB --from POLICY")
    with shared.Bars(output) as bars:
        document = api.train(recipe, resume=resume, processes=processes, runs_dir=runs_dir, reporter=bars)
    if as_json:
        shared.print_json(document)
        return
    low, high = document["won_percent_ci95"]
    output.print(
        f"{document['decisions']:,} decisions in {document['training_s'] / 60:.0f} min; against the planner alone "
        f"{document['won_percent_mean']:+.2f} % of time (95 % interval {low:+.2f} to {high:+.2f}) on jobs it was not "
        f"trained on. The policy is {document['policy']}: autotune compare JOB --arms planner,{document['policy']}",
        soft_wrap=True,
    )
