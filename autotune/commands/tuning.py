"""Find a plan: ``autotune.tune``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.budget import MemoryBudget
from autotune.campaign.session import session_of
from autotune.engines.deepspeed_config import STAGES
from autotune.engines.ray_cluster import ClusterOptions
from autotune.engines.registry import RankOptions
from autotune.errors import BudgetError
from autotune.io.progress import Reporter
from autotune.job import Job


def tune(
    job: str | Job,
    method: str = "ppo",
    *,
    memory_budget: str | None = None,
    steps: int = 120,
    trials: int | None = None,
    seed: int = 0,
    lean: bool = True,
    isolate: bool = False,
    ranks: RankOptions | None = None,
    cluster: ClusterOptions | None = None,
    storage: str | None = None,
    weights: str | None = None,
    watts: float | None = None,
    runs_dir: str | Path = "runs",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Find the fastest plan for a job within a memory budget, by measuring plans on the job itself.

    Args:
        job: the job, or its reference.
        method: ``exact``, ``greedy``, ``planner``, ``ppo``, ``random``, ``optuna``, ``optuna-prices`` or
            ``ppo-scratch``.
        memory_budget: a size (``20GiB``) or a share of the FP32 baseline's peak (``75%``); ``None`` for no budget.
        steps: real optimizer steps that may be spent.
        trials: plans that may be measured; ``None`` for as many as the steps allow.
        seed: of the search and of the engine.
        lean: whether a profile, where there is none yet, may be one in a tenth of the steps.
        isolate: whether windows run in a process of their own, so that what kills or hangs it is a failed window. The
            job is then given by its reference.
        ranks: how many such processes train it together, through DeepSpeed, at which ZeRO stage; ``None`` for one
            without.
        cluster: a Ray cluster on whose workers plans are measured at once, each in a process of its own; ``None`` for
            one after another, here. For ``random``, ``optuna`` and ``optuna-prices``.
        storage: a database for Optuna's studies, ``postgresql://user@host:port/database``; ``None`` keeps them in the
            run directory.
        weights: of time, memory and energy in what is minimised, ``1,0,0.5``; ``None`` for time alone.
        watts: the device's power, for an estimate of energy where it cannot be measured; ``None`` makes none.
        runs_dir: where the run directory is made.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that ``autotune tune --json`` prints.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    session = session_of(
        job,
        memory_budget,
        steps,
        trials,
        seed,
        runs_dir,
        reporter,
        lean=lean,
        isolate=isolate,
        ranks=ranks,
        cluster=cluster,
        storage=storage,
        weights=weights,
        watts=watts,
    )
    with session.opened:
        return session.tune(method)


def tune_stages(
    job: str,
    method: str,
    count: int,
    *,
    memory_budget: str | None = None,
    config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Tune a job at every ZeRO stage in turn, and return the fastest plan of all of them.

    Args:
        job: the job's reference.
        method: as for :func:`tune`.
        count: how many ranks.
        memory_budget: as for :func:`tune`; a share is one of the baseline's peak at stage 0, for all stages.
        config: a DeepSpeed configuration of the user's own.
        settings: what else :func:`tune` takes, for each stage.

    Returns:
        The fastest one's document, and under ``stages`` what was measured at each, or why it was not.

    Raises:
        InputError: for wrong input; or for a budget that is met at no stage.
    """
    budget, found, stages = memory_budget, [], {}
    for stage in STAGES:
        try:
            document = tune(
                job,
                method,
                memory_budget=budget,
                ranks=RankOptions(count=count, zero_stage=stage, config=config),
                **settings,
            )
        except BudgetError as error:
            if budget is not None and MemoryBudget.parse(budget).share is not None:
                raise
            stages[str(stage)] = {"refused": str(error)}
            continue
        found.append(document)
        stages[str(stage)] = {"measured": document["measured"], "run": document["run"]}
        if budget is not None:
            budget = f"{document['measured']['memory_budget_bytes']}B"
    if not found:
        raise BudgetError(f"{memory_budget} is met at no ZeRO stage", where="--memory-budget", allowed="a larger one")
    best = min(found, key=lambda document: document["measured"]["seconds_per_step"] or math.inf)
    return {**best, "stages": stages}
