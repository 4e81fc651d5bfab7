"""Steps of real jobs, estimated from a machine's measured rates, beside the steps themselves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from autotune.cost_model.device_table import DeviceSpec
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.time_model import seconds_per_step
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.errors import AutotuneError
from autotune.job import Job
from autotune.plan import Plan, PlanSpace
from autotune.profiling.estimator import estimate
from autotune.profiling.job_shape import fixed_shape

_STEPS = 5


def check(
    jobs: Sequence[Job], device: DeviceSpec, *, on_job: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Return estimated and measured seconds and peaks of some plans of each job.

    Args:
        jobs: the jobs, on this machine.
        device: this machine, calibrated with as many threads.
        on_job: called after each job.
    """
    rows: list[dict[str, Any]] = []
    for job in jobs:
        try:
            rows += _rows(job, device)
        except AutotuneError as error:  # the others are checked
            rows.append({"job": job.name, "plan": "", "failure": str(error)})
        on_job()
    return rows


def errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median and the largest relative error of times and peaks; nothing where nothing was measured."""
    found = {}
    for name, key in (("times", "s"), ("peaks", "peak_bytes")):
        pairs = [(row[f"predicted_{key}"], row[f"measured_{key}"]) for row in rows if row["failure"] is None]
        own = [abs(predicted / measured - 1) for predicted, measured in pairs if measured]
        if own:
            found[name] = {"median": statistics.median(own), "largest": max(own)}
    return found


def _rows(job: Job, device: DeviceSpec) -> Iterator[dict[str, Any]]:
    profile = estimate(job, device)
    with closing(TorchEngine(fixed_shape(job), options=EngineOptions(statistics_every=None))) as engine:
        for name, plan in _plans(profile.space).items():
            engine.apply(plan)
            window = engine.run(_STEPS)
            yield {
                "job": job.name,
                "plan": name,
                "predicted_s": seconds_per_step(profile, plan),
                "measured_s": window.seconds_per_step,
                "predicted_peak_bytes": peak_bytes(profile, plan),
                "measured_peak_bytes": window.peak_bytes,
                "failure": None if window.failure is None else f"{window.failure}: {window.failure_detail}",
            }


def _plans(space: PlanSpace) -> dict[str, Plan]:
    least, *_, most = (*space.accumulation_choices, space.accumulation_choices[-1])
    first = space.precisions[0]
    plans = {
        "baseline": space.baseline(),
        **{str(one): space.plan(accumulation_steps=least, precision=one) for one in space.precisions[1:]},
        "all recomputed": space.plan(accumulation_steps=least, precision=first, recomputed=space.recomputable),
    }
    return plans | ({f"k = {most}": space.baseline().changed(accumulation_steps=most)} if most > least else {})
