"""``autotune demo``: a profile, searches and a comparison on one real job, in about ten minutes."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from typing import Annotated

import typer

from autotune.budget import MemoryBudget
from autotune.cli import console as shared
from autotune.cli.compare import show
from autotune.cli.console import JsonOption, RunsOption, SeedOption, StepsOption

_ARMS = ("baseline", "paper", "random", "optuna", "planner", "ppo")
# Jobs with their length in steps, and numbers of seeds, the most telling first; the last one if none fits in the time.
_CHOICES = (("charlm:short", 36, 3), ("charlm:brief", 24, 3), ("charlm:brief", 24, 2))
_MINUTES = 12.5
# Steps of the profile.
_PROFILED = 18


def command(
    job: Annotated[
        str | None,
        typer.Option("--job", help="Job to demonstrate with; by default a small GPT, trained as long as time allows."),
    ] = None,
    memory_budget: Annotated[str, typer.Option("--memory-budget", help="Memory budget, as for tune.")] = "40%",
    seeds: Annotated[
        int | None, typer.Option("--seeds", help="Number of paired fresh seeds; by default 3, or 2 on a slow machine.")
    ] = None,
    steps: StepsOption = 64,
    seed: SeedOption = 0,
    runs_dir: RunsOption = shared.RUNS,
    as_json: JsonOption = False,
) -> None:
    """Tune a real training job within a memory budget, then compare the result with static configurations."""
    from autotune import commands
    from autotune.campaign.trusted_inputs import TrustedInputs
    from autotune.records.requests import CompareOptions

    output = shared.console(as_json=as_json)
    options = CompareOptions(seeds=3 if seeds is None else seeds, memory_budget=memory_budget, steps=steps, seed=seed)
    if job is None:
        # What is wrong is said before the machine is timed.
        options.request(_CHOICES[0][0], _ARMS)
        MemoryBudget.parse(memory_budget)
        job, few = _that_fits(steps)
        options = replace(options, seeds=few if seeds is None else seeds)
    output.print(
        f"Training {job} for real inside {memory_budget} of the FP32 baseline's peak memory: a profile, two searches "
        f"of {steps} real steps each, then {len(_ARMS)} arms on {options.seeds} fresh seeds. The planner and the "
        f"shipped policy control two of them during training.",
        soft_wrap=True,
    )
    began = time.perf_counter()
    with shared.Bars(output) as bars:
        request = options.request(job, _ARMS)
        document = commands.run_comparison(request, TrustedInputs(jobs=[job]), runs_dir, bars, verb="demo")
    show(document, output, as_json=as_json)
    output.print(f"That took {(time.perf_counter() - began) / 60:.1f} minutes. To see why this plan was chosen:")
    output.print(f"    autotune explain {shlex.quote(document['run'])}", soft_wrap=True)
    output.print(
        f"All runs are logged to MLflow: mlflow ui --backend-store-uri {shlex.quote(f'sqlite:///{runs_dir}/mlflow.db')}",
        soft_wrap=True,
    )


def _that_fits(steps: int) -> tuple[str, int]:
    """Return the job and the number of seeds with which the demo takes some ten minutes on this machine.

    Args:
        steps: number of steps of each search.
    """
    seconds = _seconds_of_a_step(_CHOICES[0][0])

    def fits(length: int, seeds: int) -> bool:
        # The profile, two searches, a pilot run, and the runs of all arms, as if they were all as slow as the baseline.
        return seconds * (_PROFILED + 2 * steps + length * (1 + len(_ARMS) * seeds)) < 60 * _MINUTES

    found = next((choice for choice in _CHOICES if fits(*choice[1:])), _CHOICES[-1])
    return found[0], found[2]


def _seconds_of_a_step(job: str) -> float:
    from autotune.catalog import load_job
    from autotune.engines.torch_engine import EngineOptions, TorchEngine

    engine = TorchEngine(load_job(job), seed=0, options=EngineOptions())
    try:
        engine.run(1)
        began = time.perf_counter()
        engine.run(2)
        return (time.perf_counter() - began) / 2
    finally:
        engine.close()
