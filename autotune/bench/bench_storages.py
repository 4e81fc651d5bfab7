"""Time and peak of a job with each storage in all units, in each precision, all in turn in one process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from autotune.bench.gpu_windows import PlanWindows
from autotune.bench.harness import SILENT, document_of
from autotune.choices import STORAGES
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.errors import EngineError, InputError
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.plan import Plan
from autotune.profiling.job_shape import fixed_shape
from autotune.stats import paired_ratio


def bench_storages(job: Job, *, rounds: int, seed: int = 0, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Return time and peak of a step with each storage in all units that take one, at the smallest k.

    All storages of this machine are measured, unless the job or ``AUTOTUNE_STORAGES`` names fewer.

    Args:
        job: the job.
        rounds: windows of each plan that count; one before them compiles and warms up.
        seed: random seed for weights and batches.
        reporter: shows progress.

    Raises:
        InputError: if there are fewer than two rounds.
        EngineError: if no plan can be measured.
    """
    if rounds < 2:
        raise InputError(f"rounds is {rounds}", where="--rounds", allowed="at least 2")
    job = fixed_shape(replace(job, storages=STORAGES if job.storages is None else job.storages))
    options = EngineOptions(discard_steps=1, statistics_every=None)
    with closing(TorchEngine(job, seed=seed, options=options)) as engine:
        space = engine.space
        k = space.accumulation_choices[0]
        plans = {
            (str(precision), str(storage)): space.plan(accumulation_steps=k, precision=precision, storage=storage)
            for precision in space.precisions
            for storage in space.storages
        }
        engine.run(1)
        windows = PlanWindows(engine, list(plans.values()))
        reporter.stage(f"{len(plans)} plans in turn", rounds + 1)
        for number in range(rounds + 1):
            windows.measure()
            reporter.advance(number + 1)
    first = next(iter(plans.values()))
    if all(windows.failure(plan) is not None for plan in plans.values()):
        raise EngineError(f"no plan can be measured: a step that saves all ends with {windows.failure(first)}")
    return document_of(
        "storages",
        {
            "job": job.name,
            "seed": seed,
            "rounds": rounds,
            "accumulation_steps": k,
            "rows": [
                {
                    "precision": precision,
                    "storage": storage,
                    **_row(windows, plan, plans[precision, str(space.storages[0])], first),
                }
                for (precision, storage), plan in plans.items()
            ],
        },
    )


def _row(windows: PlanWindows, plan: Plan, saving: Plan, first: Plan) -> dict[str, Any]:
    """Return what was measured of a plan, beside saving all in the same precision, and in the first one."""
    own, peak = windows.rounds_s(plan), windows.peak(plan)
    beside, whole, base = windows.rounds_s(saving), windows.peak(saving), windows.peak(first)
    failure = windows.failure(plan)
    paired = failure is None and own and len(own) == len(beside)
    return {
        "seconds_per_step": windows.seconds(plan),
        "first_window_s": windows.first_s(plan),
        "peak_bytes": peak,
        "over_saving": paired_ratio(own, beside) if paired else None,
        "peak_over_saving": None if peak is None or not whole else peak / whole,
        "peak_over_baseline": None if peak is None or not base else peak / base,
        "failure": failure,
    }


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the results in words: time and peak, relative to saving all in the same precision."""
    return [f"{row['precision']}, {row['storage']}: {_told(row)}" for row in document["rows"]]


def _told(row: Mapping[str, Any]) -> str:
    if row["failure"] is not None:
        return str(row["failure"])
    ratio, share = row["over_saving"], row["peak_over_saving"]
    memory = "" if share is None else f", {share:.0%} of its peak"
    if ratio is None:
        return f"{row['seconds_per_step'] * 1000:.1f} ms"
    low, high = ratio["ratio_ci95"]
    return f"{ratio['ratio_median']:.2f} [{low:.2f}, {high:.2f}] of saving's time{memory}"
