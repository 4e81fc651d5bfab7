"""Cache of profiles, and their validation on random plans."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Profile
from autotune.cost_model.time_model import seconds_per_step
from autotune.engines.engine import Engine
from autotune.engines.isolated_engine import IsolatedEngine
from autotune.engines.rank_processes import run_elsewhere
from autotune.engines.registry import ENGINES, RankOptions
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.engines.worker_processes import WorkersError
from autotune.errors import InputError, JobError, ProfileError
from autotune.io.files import read_json, write_json
from autotune.job import Job
from autotune.mechanics.devices import device_kind, device_name
from autotune.plan import Plan
from autotune.profiling.job_shape import fixed_shape, profile_key
from autotune.profiling.profile_index import LEAN
from autotune.profiling.profiler import ProfilerOptions, calibration_plan, profile
from autotune.profiling.rank_profiler import profile_on_ranks

# Timed steps of one visit to a plan, after a warm-up step. Every plan is visited twice.
_TIMED_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Relative errors of predictions on random plans.

    Attributes:
        plans: number of plans.
        time_error_median: median error of seconds per step.
        time_error_p95: 95th percentile of the same.
        memory_error_median: median error of peak bytes.
        memory_error_p95: 95th percentile of the same.
        memory_underprediction_max: largest error of a peak that was predicted too low; 0 if none was.
        time_noise_median: noise of the machine: median difference between two visits to the same plan.
    """

    plans: int
    time_error_median: float
    time_error_p95: float
    memory_error_median: float
    memory_error_p95: float
    memory_underprediction_max: float
    time_noise_median: float

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ranked:
    """The ranks that train a job together.

    Attributes:
        reference: reference with which each rank loads the job.
        options: number and configuration of the ranks.
    """

    reference: str
    options: RankOptions

    def key(self, job: Job, device_name: str) -> str:
        """Return a SHA-256 of everything that the ranks' profile depends on.

        Args:
            job: the job.
            device_name: name of the device.
        """
        libraries = ",".join(map(_version_of, ENGINES[self.options.engine].requires))
        where = [device_kind(self.options.count), os.environ.get("OMP_NUM_THREADS"), libraries]
        facts = [profile_key(job, device_name), asdict(self.options), *where]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @property
    def kind(self) -> str:
        """Return the suffix of the profile's file name."""
        return f"-{self.options.count}-ranks-{self.options.layout}"


def cached_profile(
    job: Job,
    runs: Path,
    *,
    options: ProfilerOptions | None = None,
    fresh: bool = False,
    on_progress: Callable[[float], None] | None = None,
    ranked: Ranked | None = None,
) -> tuple[Profile, Path, bool]:
    """Return a job's profile on this device, from the cache if nothing that it depends on has changed.

    If a lean profile is requested, a full one in the cache is accepted too.

    Args:
        job: the job.
        runs: the folder of runs; profiles are kept in ``profiles`` in it.
        options: limits on the cost of profiling.
        fresh: whether to measure even if the cache holds a profile.
        on_progress: called with the share that is done.
        ranked: the ranks that train the job together; ``None`` for this process alone.

    Returns:
        The profile, its file, and whether it came from the cache.
    """
    device = device_name()
    key, files = _cached_files(job, runs, ranked)
    for path in files if options is not None and options.is_lean else files[:1]:
        found = None if fresh else _read_cached(path, key)
        if found is not None:
            return found, path, True
    if ranked is None:
        measured = profile(job, device_name=device, fingerprint=key, options=options, on_progress=on_progress)
    else:
        measured = profile_on_ranks(
            ranked.reference,
            ranked.options,
            device_name=device,
            fingerprint=key,
            options=options,
            on_progress=on_progress,
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, measured.to_json())
    return measured, path, False


def profile_elsewhere(reference: str, runs: Path, *, lean: bool) -> None:
    """Profile a job in a separate process, and cache the profile.

    Args:
        reference: the job's reference.
        runs: the folder of runs.
        lean: whether to make a lean profile.

    Raises:
        InputError: if the job cannot be used.
        JobError: if the process ends without a profile.
    """
    asked = {"job": reference, "runs": str(runs.absolute()), "lean": lean}
    try:
        # A profile is valid for one number of threads only.
        run_elsewhere("autotune.profiling.profiling_main", asked, threads=torch.get_num_threads())
    except WorkersError as error:
        raise JobError(f"profiling ends with {error.failure}: {error}", where=reference) from error


def find_profile(job: Job, runs: Path, ranked: Ranked | None = None) -> Profile | None:
    """Return a job's cached profile on this device, or ``None`` if there is none.

    Args:
        job: the job.
        runs: the folder of runs.
        ranked: the ranks that train the job together; ``None`` for this process alone.
    """
    key, (full, lean) = _cached_files(job, runs, ranked)
    return _read_cached(full, key) or _read_cached(lean, key)


def read_matching(path: Path, job: Job, ranked: Ranked | None = None) -> Profile | None:
    """Return a profile from a file, or ``None`` if the file is missing, damaged, or for another state of the job.

    Args:
        path: the file.
        job: the job.
        ranked: the ranks that train the job together; ``None`` for this process alone.
    """
    return _read_cached(path, _key_of(job, ranked))


def _key_of(job: Job, ranked: Ranked | None) -> str:
    return profile_key(job, device_name()) if ranked is None else ranked.key(job, device_name())


def _cached_files(job: Job, runs: Path, ranked: Ranked | None) -> tuple[str, tuple[Path, Path]]:
    """Return the key of a job's profiles on this device, and the files of the full and the lean profile."""
    key = _key_of(job, ranked)
    kind = "" if ranked is None else ranked.kind
    return key, (cache_path(job, runs, key, kind), cache_path(job, runs, key, kind + LEAN))


def _read_cached(path: Path, key: str) -> Profile | None:
    if not path.is_file():
        return None
    try:
        found = read_profile(path)
    except ProfileError:
        # It is damaged or has an older format.
        return None
    return found if found.fingerprint == key else None


def cache_path(job: Job, runs: Path, key: str, kind: str = "") -> Path:
    """Return the path of a profile, or of another measurement of a job, in the cache.

    Args:
        job: the job.
        runs: the folder of runs.
        key: what :func:`autotune.profiling.job_shape.profile_key` or :meth:`Ranked.key` returned.
        kind: suffix of the file name; empty for a full profile.
    """
    return runs / "profiles" / f"{_file_name(job.name)}-{key[:12]}{kind}.json"


def read_profile(path: Path, job: Job | None = None) -> Profile:
    """Read a profile file.

    Args:
        path: the file.
        job: the job that the profile must be for; ``None`` skips the check.

    Raises:
        ProfileError: if the profile is damaged, outdated, or was made for another job or device.
    """
    try:
        document = read_json(path)
    except InputError as error:
        raise ProfileError(error.problem, where=str(path), allowed=error.allowed) from error
    found = Profile.from_json(document, where=str(path))
    if job is not None and found.fingerprint != profile_key(job, device_name()):
        raise ProfileError(
            f"was made for job {found.job!r} on {found.device!r}, or for another state of them",
            where=str(path),
            allowed=f"a profile of {job.name!r} on {device_name()!r}; autotune profile makes one",
        )
    return found


def validate(
    job: Job,
    found: Profile,
    plans: int,
    *,
    seed: int = 1,
    on_plan: Callable[[int], None] | None = None,
    ranked: Ranked | None = None,
) -> Validation:
    """Compare predictions with measurements of random plans, on the batch of the profile.

    Args:
        job: the job.
        found: its profile.
        plans: number of plans to draw; each is measured in two interleaved visits.
        seed: random seed for plans and weights, different from the profiler's.
        on_plan: called with the number of visits that are done.
        ranked: the ranks of the profile; ``None`` for this process.

    Raises:
        ProfileError: if no plan could be measured twice.
        JobError: if batches differ in size, and ranks draw them.
    """
    space, generator = found.space, np.random.default_rng(seed)
    drawn = list(dict.fromkeys(calibration_plan(space, generator, number) for number in range(plans)))
    options = EngineOptions(discard_steps=1, statistics_every=None)
    engine: Engine
    if ranked is None:
        engine = TorchEngine(fixed_shape(job), seed=seed, options=options)
    elif found.length_spread > 0:
        raise JobError("batches differ in size", where=f"job {job.name!r}", allowed="batches of one size, on ranks")
    else:
        engine = IsolatedEngine(ranked.reference, seed=seed, options=options, ranks=ranked.options)
    engine.run(1)
    peaks: dict[Plan, int] = {}
    medians: dict[Plan, list[float]] = {plan: [] for plan in drawn}
    for done, plan in enumerate(itertools.chain(drawn, reversed(drawn)), 1):
        engine.apply(plan)
        window = engine.run(1 + _TIMED_STEPS)
        if window.failure is None and window.seconds_per_step is not None and window.peak_bytes is not None:
            peaks[plan] = window.peak_bytes
            medians[plan].append(window.seconds_per_step)
        if on_plan is not None:
            on_plan(done)
    engine.close()
    seen = {plan: values for plan, values in medians.items() if len(values) == 2}
    if not seen:
        raise ProfileError("no plan could be measured twice", where=f"profile of {job.name}")
    memory = [peak_bytes(found, plan) / peaks[plan] - 1 for plan in seen]
    times = [abs(seconds_per_step(found, plan) / statistics.fmean(values) - 1) for plan, values in seen.items()]
    noise = [abs(first - second) / statistics.fmean((first, second)) for first, second in seen.values()]
    sizes = [abs(error) for error in memory]
    return Validation(
        plans=len(seen),
        time_error_median=statistics.median(times),
        time_error_p95=float(np.quantile(times, 0.95)),
        memory_error_median=statistics.median(sizes),
        memory_error_p95=float(np.quantile(sizes, 0.95)),
        memory_underprediction_max=max(0.0, -min(memory)),
        time_noise_median=statistics.median(noise),
    )


def _version_of(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _file_name(name: str) -> str:
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)
    return safe if safe == name else f"{safe}-{hashlib.sha256(json.dumps(name).encode()).hexdigest()[:6]}"
