"""Entry point of the process that :func:`autotune.profiling.profile_cache.profile_elsewhere` starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.catalog import load_job
from autotune.engines.rank_processes import Report, be_rank
from autotune.profiling.profile_cache import cached_profile
from autotune.profiling.profile_index import remember
from autotune.profiling.profiler import ProfilerOptions


def _profiled(asked: dict[str, Any], _: Report) -> dict[str, Any]:
    reference, runs = asked["job"], Path(asked["runs"])
    options = ProfilerOptions.lean() if asked["lean"] else None
    path = cached_profile(load_job(reference), runs, options=options)[1]
    remember(reference, path, runs)
    return {"file": str(path)}


if __name__ == "__main__":
    be_rank(_profiled)
