"""Measure how well profiles predict plans that they have not seen, and what a lean one gives away."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from autotune.io.progress import Reporter, Silent
from autotune.job import Job
from autotune.mechanics.devices import device_name
from autotune.profiling.profile_cache import validate
from autotune.profiling.profiler import ProfilerOptions, profile


def bench_profile(
    jobs: Sequence[Job], *, plans: int, seed: int = 0, reporter: Reporter | None = None
) -> dict[str, Any]:
    """Return the errors of lean and of full profiles on the same random plans, job by job.

    Args:
        jobs: the jobs.
        plans: random plans that each profile predicts and that are then measured.
        seed: of profiles; plans are drawn from another.
        reporter: shows progress.
    """
    shows = reporter or Silent()
    kinds = {"lean": ProfilerOptions.lean(seed), "full": ProfilerOptions(seed=seed)}
    found = []
    for job in jobs:
        entry: dict[str, Any] = {"job": job.name}
        for kind, options in kinds.items():
            shows.stage(f"{job.name}: {kind} profile", 1)
            known = profile(job, device_name=device_name(), options=options, on_progress=shows.advance)
            shows.stage(f"{job.name}: {plans} plans against the {kind} profile", 2 * plans)
            checked = validate(job, known, plans, seed=seed + 1, on_plan=shows.advance)
            entry[kind] = {"steps": known.steps, "seconds": known.seconds, **checked.to_json()}
        found.append(entry)
    return {
        "version": 1,
        "benchmark": "profile",
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "plans": plans,
        "jobs": found,
        "steps_ratio_median": statistics.median(one["lean"]["steps"] / one["full"]["steps"] for one in found),
    }


def verdict(document: dict[str, Any]) -> str:
    """Return in one line how far predictions were off."""
    parts = []
    for one in document["jobs"]:
        errors = ", ".join(
            f"{kind} ({one[kind]['steps']} steps) time {one[kind]['time_error_median']:.1%}, memory at worst "
            f"{one[kind]['memory_underprediction_max']:.1%} too low"
            for kind in ("lean", "full")
        )
        parts.append(f"{one['job']}: {errors}; one plan's windows differ by {one['lean']['time_noise_median']:.1%}")
    return ". ".join(parts)
