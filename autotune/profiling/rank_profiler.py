"""Profile a job on several ranks: all run the same steps in the same order, and each profiles its share.

The first rank's profile is kept, with its memory raised to that of the rank that needs the most.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from autotune import knobs
from autotune.cost_model.profile import Profile
from autotune.engines.rank_processes import RanksError, Report, be_rank, run_on_ranks
from autotune.engines.registry import ENGINES, RankOptions
from autotune.engines.torch_engine import EngineOptions
from autotune.errors import InputError, JobError
from autotune.job import Job
from autotune.measurement import Failure
from autotune.mechanics.devices import device_kind
from autotune.profiling.profiler import ProfilerOptions, profile
from autotune.profiling.tracing_engine import watched_ranks

# The time for which gloo's collectives wait for the other ranks.
_PATIENCE_S = 1800.0


def profile_on_ranks(
    job: str,
    ranks: RankOptions,
    *,
    device_name: str,
    fingerprint: str,
    options: ProfilerOptions | None = None,
    patience_s: float = _PATIENCE_S,
    on_progress: Callable[[float], None] | None = None,
) -> Profile:
    """Profile a job as several ranks train it together.

    If a rank runs out of memory, all ranks end. They are restarted, and skip the step that was tried then.

    Args:
        job: reference with which each rank loads the job.
        ranks: the engine, its number of ranks and its options.
        device_name: name of the device, for the profile.
        fingerprint: fingerprint of the profile.
        options: limits on the cost of profiling.
        patience_s: seconds without any report or output after which the ranks are ended.
        on_progress: called with the share that is done.

    Raises:
        InputError: if the engine cannot be profiled, its library is missing, or its configuration contradicts the job.
        JobError: if a rank ends before the profile is done.
    """
    if not ENGINES[ranks.engine].has_profile:
        able = [f"--engine {name}" for name, entry in ENGINES.items() if entry.has_profile]
        raise InputError(f"--engine {ranks.engine} cannot be profiled: costs of its units do not add up", allowed=able)
    began, no_room = time.perf_counter(), list[str]()
    asked = {
        "job": job,
        "ranks": asdict(ranks),
        "device": device_kind(ranks.count),
        "device_name": device_name,
        "fingerprint": fingerprint,
        "options": asdict(options or ProfilerOptions()),
        "no_room": no_room,
    }
    module = "autotune.profiling.rank_profiler"
    while True:
        try:
            found = run_on_ranks(
                module, asked, ranks=ranks.count, threads=None, patience_s=patience_s, on_progress=on_progress
            )
        except RanksError as error:
            if error.failure is not Failure.OUT_OF_MEMORY or error.tried is None or error.tried in no_room:
                raise JobError(f"profiling fails: {error}", where=job) from error
            no_room.append(error.tried)
        else:
            return replace(Profile.from_json(found, where=job), seconds=time.perf_counter() - began)


def profiled_rank(asked: dict[str, Any], report: Report) -> dict[str, Any]:
    """Profile the share of one rank, on the engine that was asked for.

    Args:
        asked: the document that :func:`profile_on_ranks` sends to every rank.
        report: progress reports to it.
    """
    from autotune.catalog import load_job

    ranks = RankOptions(**asked["ranks"])
    make_engine = functools.partial(
        watched_ranks(ENGINES[ranks.engine].load()),
        **ranks.arguments(),
        no_room=asked["no_room"],
        on_try=report.tries,
    )
    job = load_job(asked["job"])
    found = profile(
        job,
        device_name=asked["device_name"],
        fingerprint=asked["fingerprint"],
        device=asked["device"],
        options=ProfilerOptions(**asked["options"]),
        on_progress=report.done,
        make_engine=make_engine,
    )
    return replace(found, warnings=(*found.warnings, *_sent_warnings(job, ranks, asked, report))).to_json()


def _sent_warnings(job: Job, ranks: RankOptions, asked: dict[str, Any], report: Report) -> list[str]:
    """Return what the form in which ranks send gradients and weights does to a step's gradient, for users."""
    what = "the job twice, to compare gradients"
    if ranks.engine != "fsdp2" or what in asked["no_room"] or not (sent := knobs.of_ranks(job.launch.knobs)):
        return []
    from autotune.profiling.sent_error import sent_error

    report.tries(what)
    options = EngineOptions(meter_memory=False, statistics_every=1)
    engine = functools.partial(
        ENGINES[ranks.engine].load(), device=asked["device"], options=options, **ranks.arguments()
    )
    error = sent_error(job, engine)
    return [] if error is None else [error.line(sent)]


if __name__ == "__main__":
    be_rank(profiled_rank)
