"""Fit a convergence model of a job to a few short real runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path

from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.errors import JobError, ProfileError
from autotune.io.files import read_json, write_json
from autotune.job import Job
from autotune.mechanics.devices import device_name
from autotune.profiling.gradient_error import squared_errors
from autotune.profiling.job_shape import profile_key
from autotune.profiling.profile_cache import cache_path
from autotune.simulator.convergence import Convergence, RunRecord, fit

# Length of each run as a share of the job's length, and the number of windows in it.
_SHARE = 0.6
_WINDOWS = 15
# Number of windows after which the gradient error early in a run is measured.
_EARLY = 2

Errors = dict[str, dict[str, float]]


def cached_convergence(
    job: Job,
    runs: Path,
    *,
    fresh: bool = False,
    seed: int = 0,
    on_progress: Callable[[float], None] | None = None,
) -> tuple[Convergence, Path, bool]:
    """Return the convergence model of a job, from the cache or fitted to real runs.

    Args:
        job: the job.
        runs: the folder of runs; the model is kept next to the job's profile.
        fresh: whether to measure even if the cache holds a model.
        seed: random seed for the first run.
        on_progress: called with the share of the work that is done.

    Returns:
        The model, its file, and whether it came from the cache.
    """
    path = cache_path(job, runs, profile_key(job, device_name()), "-convergence")
    if path.is_file() and not fresh:
        # If the file is damaged or has an older format, measure again.
        with contextlib.suppress(ProfileError):
            return Convergence.from_json(read_json(path), where=str(path)), path, True
    measured = measure_convergence(job, seed=seed, on_progress=on_progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, measured.to_json())
    return measured, path, False


def measure_convergence(job: Job, *, seed: int = 0, on_progress: Callable[[float], None] | None = None) -> Convergence:
    """Run a job a few times, each for three fifths of its length, and fit the convergence model.

    Under adaptive batching the runs differ in k, which shows the effect of the noise scale; under fixed batching they
    differ in seed.

    Args:
        job: the job.
        seed: random seed for the first run.
        on_progress: called with the share of the work that is done.

    Raises:
        JobError: if a run fails.
    """
    if job.batching == "adaptive":
        choices = job.accumulation_choices
        ks = sorted({choices[0], choices[len(choices) // 2], choices[-1]})
    else:
        ks = [1, 1]
    found = []
    for number, k in enumerate(ks):

        def report(share: float, number: int = number) -> None:
            if on_progress is not None:
                on_progress((number + share) / len(ks))

        found.append(_run(job, k, seed + number, report, with_errors=number == 0))
    return fit([record for record, _, _ in found], found[0][2], found[0][1])


def _run(
    job: Job, k: int, seed: int, report: Callable[[float], None], *, with_errors: bool
) -> tuple[RunRecord, Errors, Errors]:
    """Run the job once; return its record, and the low-precision gradient errors early in the run and at its end."""
    options = EngineOptions(discard_steps=0, statistics_every=2, split_to_learn_noise=True, meter_memory=False)
    engine = TorchEngine(job, seed=seed, options=options)
    plan = engine.space.baseline().changed(accumulation_steps=k)
    engine.apply(plan)
    batch = float(job.batch_size * (k if job.batching == "adaptive" else 1))
    total = max(3, math.ceil(_SHARE * job.total_samples / batch))
    length = max(1, round(total / _WINDOWS))
    steps: list[int] = []
    losses, metrics, noises = [], [], []
    early: Errors = {}
    while (steps[-1] if steps else 0) < total:
        window = engine.run(length)
        if window.failure is not None or window.loss is None:
            raise JobError(f"a run at k = {k} ends with {window.failure}", where=f"job {job.name!r}")
        steps.append((steps[-1] if steps else 0) + window.steps)
        losses.append(window.loss)
        metrics.append(engine.evaluate())
        noises.append(None if window.gradient is None else window.gradient.noise_scale)
        report(min(steps[-1] / total, 1.0))
        if with_errors and len(steps) == _EARLY:
            early = squared_errors(engine)
    late = squared_errors(engine) if with_errors else {}
    engine.close()
    record = RunRecord(
        batch=batch,
        steps=tuple(steps),
        losses=tuple(losses),
        metrics=tuple(metrics),
        noise_scales=tuple(noises),
    )
    return record, early, late
