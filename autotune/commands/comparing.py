"""Comparison of arms on one job: ``autotune.compare``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autotune.budget import MemoryBudget
from autotune.campaign import comparison_campaign
from autotune.campaign.arms import arm_names
from autotune.campaign.setup import prepare
from autotune.campaign.trusted_inputs import TrustedInputs
from autotune.engines.registry import RankOptions
from autotune.io.documents import validated
from autotune.io.files import folder_given
from autotune.io.progress import Reporter, Silent
from autotune.job import Job
from autotune.records.protocol import require_count
from autotune.records.requests import CompareOptions, CompareRequest, Ranks, recorded_address


def compare(
    job: str | Job,
    arms: Sequence[str],
    *,
    seeds: int = 10,
    memory_budget: str | int | None = None,
    gradient_norm: float | None = None,
    steps: int = 120,
    trials: int | None = None,
    seed: int = 0,
    dips: str | None = None,
    lean: bool = True,
    storage: str | None = None,
    watts: float | None = None,
    carbon_intensity: str | None = None,
    ranks: RankOptions | None = None,
    report_to: str | None = None,
    runs_dir: str | Path = "runs",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Compare arms in interleaved runs on paired seeds; arms that are methods search for a plan first.

    Args:
        job: the job, or its reference.
        arms: rules, methods, plan files or policy folders.
        seeds: number of paired seeds; with fewer than six, the result is only an indication.
        memory_budget: as for :func:`tune`.
        gradient_norm: as for :func:`tune`, for each search; in compared runs, the target is reached only once the
            gradient's norm is within the limit, too.
        steps: as for :func:`tune`, for each search.
        trials: as for :func:`tune`, for each search.
        seed: random seed for the searches and for the tuning engine.
        dips: dips of the budget in compared runs, ``EVERY:SHARE`` as in ``5:70%``, or ``FAMILY:EVERY:SHARE`` as in
            ``jittered:5:70%``; ``None`` for a constant budget.
        lean: as for :func:`tune`.
        storage: as for :func:`tune`.
        watts: as for :func:`tune`.
        carbon_intensity: grams of CO2 per kWh, or a file with a time series that covers the runs. The document then has
            the grams of CO2 of each run with known energy.
        ranks: as for :func:`tune`; searches and compared runs train on them, and the job is given by its reference.
        report_to: experiment tracker: ``mlflow``, ``tensorboard``, ``wandb`` or ``none``; ``None`` for that in the
            variable ``AUTOTUNE_REPORT_TO``, or ``mlflow``.
        runs_dir: folder in which the run directory is made.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document ``comparison.json``.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    options = CompareOptions(
        seeds=seeds,
        memory_budget=MemoryBudget.text_of(memory_budget),
        gradient_norm=gradient_norm,
        steps=steps,
        trials=trials,
        seed=seed,
        dips=dips,
        lean=lean,
        storage=recorded_address(storage),
        watts=watts,
        report_to=report_to,
        carbon_intensity=carbon_intensity,
    )
    require_count(seeds)
    validated(CompareOptions, asdict(options), where="compare")
    names = arm_names(arms)
    trusted = TrustedInputs(
        jobs=[job],
        arms=names,
        storage=storage,
        carbon_intensity=carbon_intensity,
        ds_config=None if ranks is None else ranks.config,
    )
    request = replace(options.request(job, names), ranks=Ranks.of(ranks))
    return run_comparison(request, trusted, folder_given(runs_dir, "runs_dir"), reporter or Silent())


def run_comparison(
    request: CompareRequest, trusted: TrustedInputs, runs: Path, reporter: Reporter, *, verb: str = "compare"
) -> dict[str, Any]:
    """Run the comparison that a request describes.

    Args:
        request: the request.
        trusted: inputs that the caller supplies for the request.
        runs: folder in which the run directory is made.
        reporter: shows progress.
        verb: the command that the run directory is named after.

    Returns:
        The document ``comparison.json``.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    campaign = prepare(request, trusted, runs, reporter)
    if campaign.intensity is not None:
        campaign.intensity.require_covered(time.time(), where="--carbon-intensity")
    return comparison_campaign.compare(campaign, request, verb=verb)
