"""Errors of predictions by kind of operation, and by whether memory or computing bounds it, over many short runs.

Each run trains real steps of a job under a random plan and k. Two predictions are compared with it: the profile's, of
the whole step, which plans are chosen by; and the roofline's, of every operator, which `autotune plan` estimates
devices by, here at this machine's measured rates.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from autotune.bench.harness import SILENT, document_of
from autotune.cost_model.profile import Profile
from autotune.cost_model.time_model import seconds_per_step
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.errors import EngineError
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.mechanics.devices import device_kind
from autotune.mechanics.processor_wait import is_disturbed
from autotune.plan import Plan
from autotune.profiling.job_shape import fixed_shape
from autotune.profiling.operator_kinds import KINDS
from autotune.profiling.operator_times import COMPUTE, MEMORY, Rates, operator_times
from autotune.profiling.profile_cache import cached_profile
from autotune.profiling.profiler import ProfilerOptions, calibration_plan

# Number of runs that the paper analysed.
PAPER_RUNS = 150
_TIMED_STEPS = 3

Cells = Sequence[Mapping[str, Any]]


def bench_operations(
    jobs: Sequence[Job], *, runs: int, runs_dir: Path, seed: int = 0, reporter: Reporter = SILENT
) -> dict[str, Any]:
    """Return the errors of predictions by operation and by bound.

    Args:
        jobs: the jobs, among which the runs are divided evenly.
        runs: number of runs; plans are drawn at random, k included.
        runs_dir: folder of runs, which keeps the profiles.
        seed: random seed for weights and plans.
        reporter: shows progress.

    Raises:
        EngineError: if no run could be measured.
    """
    reporter.stage("measure the machine's rates", 1)
    rates: Rates | None = None
    found: list[dict[str, Any]] = []
    for number, job in enumerate(jobs):
        reporter.stage(f"{job.name}: profile the units, once", 1)
        profile = cached_profile(job, runs_dir, options=ProfilerOptions.lean(seed), on_progress=reporter.advance)[0]
        rates = rates or Rates.measured(profile.precisions, device_kind())
        share = runs // len(jobs) + (number < runs % len(jobs))
        reporter.stage(f"{job.name}: {share} runs", share)
        found += _runs(job, profile, rates, share, seed, reporter.advance)
    whole = [run for run in found if run["failure"] is None]
    if not whole or rates is None:
        raise EngineError("no run could be measured: " + (found[0]["failure"] if found else "there is no job"))
    return document_of(
        "operations",
        {
            "rates": rates.to_json(),
            "asked": runs,
            "failed": len(found) - len(whole),
            "disturbed": sum(run["disturbed"] for run in whole),
            "step": {"all": _step_errors(whole)} | {bound: _step_errors(_bound_by(whole, bound)) for bound in _BOUNDS},
            "kinds": {kind: entry for kind in KINDS if (entry := _summary(whole, "kind", kind)) is not None},
            "bounds": {bound: entry for bound in _BOUNDS if (entry := _summary(whole, "bound", bound)) is not None},
            "runs": found,
        },
    )


_BOUNDS = (COMPUTE, MEMORY)


def _runs(
    job: Job, profile: Profile, rates: Rates, count: int, seed: int, on_run: Callable[[int], None]
) -> list[dict[str, Any]]:
    generator = np.random.default_rng(seed + 1)
    options = EngineOptions(discard_steps=1, statistics_every=None, meter_memory=False)
    found = []
    with closing(TorchEngine(fixed_shape(job), seed=seed, options=options)) as engine:
        engine.run(1)
        for number in range(count):
            plan = calibration_plan(profile.space, generator, number)
            found.append({"job": job.name, "plan": plan.to_json(), **_measured(engine, plan, profile, rates)})
            on_run(number + 1)
    return found


def _measured(engine: TorchEngine, plan: Plan, profile: Profile, rates: Rates) -> dict[str, Any]:
    """Return one run: the step's measured and predicted seconds, and its operators' by kind and bound."""
    engine.apply(plan)
    window = engine.run(1 + _TIMED_STEPS)
    if window.failure is not None or window.seconds_per_step is None:
        return {"failure": f"{window.failure}: {window.failure_detail}"}
    try:
        cells = operator_times(engine, rates)
    except EngineError as error:
        return {"failure": str(error)}
    return {
        "failure": None,
        "disturbed": window.waited_frac is not None and is_disturbed(window.waited_frac),
        "seconds_per_step": window.seconds_per_step,
        "predicted_s": seconds_per_step(profile, plan),
        "operators": [asdict(cell) for cell in cells],
    }


def _seconds(cells: Cells, key: str, name: str) -> tuple[float, float]:
    """Return the measured and the predicted seconds of a step's operators with a given kind or bound."""
    own = [cell for cell in cells if cell[key] == name]
    return sum(cell["measured_s"] for cell in own), sum(cell["predicted_s"] for cell in own)


def _summary(runs: Sequence[Mapping[str, Any]], key: str, name: str) -> dict[str, Any] | None:
    """Return the share of time and the roofline's errors of one kind or bound; ``None`` if no run has such operators.

    ``time_frac`` is the mean share of the operators' time. ``predicted_frac`` are predicted over measured seconds of a
    run: the median, and the 10th and 90th percentiles.
    """
    pairs = [(*_seconds(run["operators"], key, name), _total(run)) for run in runs]
    ratios = [predicted / measured for measured, predicted, _ in pairs if measured > 0]
    if not ratios:
        return None
    return {
        "runs": len(ratios),
        "time_frac": statistics.fmean(measured / total for measured, _, total in pairs),
        "predicted_frac": statistics.median(ratios),
        "predicted_frac_p10_p90": [float(value) for value in np.quantile(ratios, (0.1, 0.9))],
    }


def _total(run: Mapping[str, Any]) -> float:
    return float(sum(cell["measured_s"] for cell in run["operators"]))


def _bound_by(runs: Sequence[Mapping[str, Any]], bound: str) -> list[Mapping[str, Any]]:
    """Return the runs that spend at least half of their operators' time in operators with a bound."""
    return [run for run in runs if _seconds(run["operators"], "bound", bound)[0] >= _total(run) / 2]


def _step_errors(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the relative errors of the profile's predicted seconds per step, without signs; empty without runs."""
    errors = [abs(run["predicted_s"] / run["seconds_per_step"] - 1) for run in runs]
    if not errors:
        return {"runs": 0}
    return {
        "runs": len(errors),
        "error_median": statistics.median(errors),
        "error_p90": float(np.quantile(errors, 0.9)),
    }


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the results in words."""
    steps = document["step"]
    shown = [
        f"{name}: {one['error_median']:.1%} (median of {one['runs']})" for name, one in steps.items() if one["runs"]
    ]
    said = [f"error of the profile's seconds per step, {'; '.join(shown)}"]
    for part in ("bounds", "kinds"):
        for name, one in document[part].items():
            low, high = one["predicted_frac_p10_p90"]
            said.append(
                f"{name}: {one['time_frac']:.0%} of the operators' time, roofline {one['predicted_frac']:.2f} of the "
                f"measured time ({low:.2f} to {high:.2f})"
            )
    if document["disturbed"]:
        said.append(f"{document['disturbed']} runs were disturbed by other programs: their times are doubtful")
    return said
