"""``autotune demo``: a profile, searches and a comparison on one real job, in ten to fifteen minutes."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from autotune.cli import console as shared
from autotune.cli.compare import show
from autotune.cli.console import JsonOption, RunsOption, SeedOption, SeedsOption, StepsOption

_ARMS = ("baseline", "paper", "random", "optuna", "planner", "ppo")


def command(
    job: Annotated[str, typer.Option("--job", help="Job to demonstrate with.")] = "charlm:short",
    memory_budget: Annotated[str, typer.Option("--memory-budget", help="Memory budget, as for tune.")] = "40%",
    seeds: SeedsOption = 3,
    steps: StepsOption = 64,
    seed: SeedOption = 0,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Tune a real training job within a memory budget, then compare the result with static configurations."""
    from autotune import commands
    from autotune.campaign.trusted_inputs import TrustedInputs
    from autotune.records.requests import CompareOptions

    options = CompareOptions(seeds=seeds, memory_budget=memory_budget, steps=steps, seed=seed)
    output = shared.console(as_json=as_json)
    output.print(
        f"Training {job} for real inside {memory_budget} of the FP32 baseline's peak memory: a profile, two searches "
        f"of {steps} real steps each, then {len(_ARMS)} arms on {seeds} fresh seeds. The planner and the shipped "
        f"policy control two of them during training.",
        soft_wrap=True,
    )
    began = time.perf_counter()
    with shared.Bars(output) as bars:
        request = options.request(job, _ARMS)
        document = commands.run_comparison(request, TrustedInputs(jobs=[job]), runs_dir, bars, verb="demo")
    show(document, output, as_json=as_json)
    output.print(f"That took {(time.perf_counter() - began) / 60:.1f} minutes. To see why this plan was chosen:")
    output.print(f"    autotune explain {document['run']}", soft_wrap=True)
    output.print(
        f"All runs are logged to MLflow: mlflow ui --backend-store-uri sqlite:///{runs_dir}/mlflow.db",
        soft_wrap=True,
    )
