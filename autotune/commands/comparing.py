"""Compare arms on one job: ``autotune.compare``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.campaign.arms import (
    arm_names,
)
from autotune.campaign.session import session_of
from autotune.cost_model.carbon import Intensity
from autotune.errors import InputError
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.records.protocol import Dips, paired_seeds


def compare(
    job: str | Job,
    arms: Sequence[str],
    *,
    seeds: int = 10,
    memory_budget: str | None = None,
    steps: int = 120,
    trials: int | None = None,
    seed: int = 0,
    dips: str | None = None,
    lean: bool = True,
    storage: str | None = None,
    watts: float | None = None,
    carbon_intensity: str | None = None,
    runs_dir: str | Path = "runs",
    reporter: Reporter | None = None,
    verb: str = "compare",
    within: str | None = None,
) -> dict[str, Any]:
    """Compare arms on paired, interleaved, fresh seeds; methods among them are searched for first.

    Args:
        job: the job, or its reference.
        arms: rules, methods, plan files or policy folders.
        seeds: how many paired seeds; fewer than six give an indication.
        memory_budget: as for :func:`tune`.
        steps: as for :func:`tune`, for each search.
        trials: as for :func:`tune`, for each search.
        seed: of the searches and of the tuning engine.
        dips: how the budget dips in compared runs, ``EVERY:SHARE`` as in ``5:70%``; ``None`` if it stays.
        lean: as for :func:`tune`.
        storage: as for :func:`tune`.
        watts: as for :func:`tune`.
        carbon_intensity: grams of CO2 per kWh, or a file with a series of them that covers the runs; the grams of each
            run whose energy is known then stand in the document.
        runs_dir: where the run directory is made.
        reporter: shows progress; ``None`` shows nothing.
        verb: what the run directory is called after.
        within: the run directory of a comparison of several jobs that this one belongs to; ``None`` for none.

    Returns:
        The document ``comparison.json``.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    names, drawn = arm_names(arms), paired_seeds(seeds)
    moves = None if dips is None else Dips.parse(dips)
    if moves is not None and memory_budget is None:
        raise InputError("dips are given without a memory budget", where="--dips", allowed="--memory-budget beside it")
    intensity = None if carbon_intensity is None else Intensity.parse(carbon_intensity)
    if intensity is not None:
        intensity.require_covered(time.time(), where="--carbon-intensity")
    session = session_of(
        job, memory_budget, steps, trials, seed, runs_dir, reporter, lean=lean, storage=storage, watts=watts
    )
    asked = {**session.asked, "dips": dips, "carbon_intensity": carbon_intensity, "within": within}
    session = replace(session, dips=moves, intensity=intensity, asked=asked)
    with session.opened:
        return session.compare(names, drawn, verb=verb)
