"""Errors of profiles: how well lean and full profiles predict plans that they have not measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.bench.harness import SILENT, document_of
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.mechanics.devices import device_name
from autotune.profiling.profile_cache import validate
from autotune.profiling.profiler import ProfilerOptions, profile


def bench_profile(jobs: Sequence[Job], *, plans: int, seed: int = 0, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Return the errors of lean and of full profiles on the same random plans, job by job.

    Args:
        jobs: the jobs.
        plans: number of random plans that are predicted from each profile and then measured.
        seed: random seed for the profiles; the next seed draws the plans.
        reporter: shows progress.
    """
    kinds = {"lean": ProfilerOptions.lean(seed), "full": ProfilerOptions(seed=seed)}
    found = []
    for job in jobs:
        entry: dict[str, Any] = {"job": job.name}
        for kind, options in kinds.items():
            reporter.stage(f"{job.name}: {kind} profile", 1)
            known = profile(job, device_name=device_name(), options=options, on_progress=reporter.advance)
            reporter.stage(f"{job.name}: {plans} plans against the {kind} profile", 2 * plans)
            checked = validate(job, known, plans, seed=seed + 1, on_plan=reporter.advance)
            entry[kind] = {"steps": known.steps, "seconds": known.seconds, **checked.to_json()}
        found.append(entry)
    ratio = statistics.median(one["lean"]["steps"] / one["full"]["steps"] for one in found)
    return document_of("profile", {"plans": plans, "jobs": found, "steps_ratio_median": ratio})


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the results in words."""
    parts = []
    for one in document["jobs"]:
        errors = ", ".join(
            f"{kind} ({one[kind]['steps']} steps) time {one[kind]['time_error_median']:.1%}, memory at worst "
            f"{one[kind]['memory_underprediction_max']:.1%} too low"
            for kind in ("lean", "full")
        )
        parts.append(f"{one['job']}: {errors}; one plan's windows differ by {one['lean']['time_noise_median']:.1%}")
    return [". ".join(parts)]
