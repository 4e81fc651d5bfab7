"""One part of a GPU benchmark, in its own process, so that a failure ends only this part.

A part is a generator: each object that it yields is kept at once, and overwrites the keys of earlier ones.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autotune.agents.planner import offering
from autotune.agents.rules import RULES, rule_plan
from autotune.agents.search_methods import METHODS, PlanningMethod
from autotune.bench.bench_attach import bench_overhead_attached
from autotune.bench.gpu_jobs import gpu_jobs
from autotune.bench.gpu_windows import PlanWindows
from autotune.catalog import load_job
from autotune.choices import DEFAULT_STORAGES
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import Goal
from autotune.data import pointed_at
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.engines.worker_processes import fail, leave, opened
from autotune.errors import BudgetError, InputError
from autotune.job import Job
from autotune.mechanics import devices
from autotune.mechanics.storage_acts import offered
from autotune.mechanics.trees import map_tensors
from autotune.plan import Plan
from autotune.profiling.profiler import ProfilerOptions, profile
from autotune.records.run_directory import benchmark_folder, describe_environment

Found = dict[str, Any]

RULE_ARMS = ("paper", "uniform-bf16", "sqrt")
PLANNED_ARMS = ("exact", "ppo")
TF32_ARM, ATTACHED = "tf32", "attached"
# An arm of jobs with further storages: the solver with save and recompute alone.
TWO_STORAGES_ARM = "exact:save-recompute"
# Questions of the answers part, and the largest error at which the answer is yes.
WITHIN = {"memory": 0.05, "time": 0.10}
# Budgets of the answers part's plans, as shares of the baseline's peak.
_FIRST_SHARES = (0.6, 0.4)
# Limit on the plans of a planner that predictions cannot distinguish; the first round chooses among them.
_FINALISTS = 3
# Number of passes over one batch to compare, and the largest allowed ratio of differences between and within plans.
_PASSES, _NOISE = 3, 4.0
# Number of copies of a job that are trained in turn to measure the overhead of an attached tuner.
_COPIES = 3


def machine(asked: Mapping[str, Any]) -> Iterator[Found]:
    """Yield the machine, the jobs and the arms, before anything is trained.

    Raises:
        InputError: if there is no such device, job or arm.
    """
    if asked["device"] is None and devices.device_kind() == "cpu":
        raise InputError("there is no accelerator here", where="--device", allowed="cpu, to try the command")
    device = devices.resolved(asked["device"], "--device")
    jobs = gpu_jobs(asked["jobs"], device)
    arms = ["baseline", *([TF32_ARM] if devices.has_tf32(device) else []), *RULE_ARMS, *PLANNED_ARMS]
    if any(len(offered(job.storages)) > len(DEFAULT_STORAGES) for job in jobs.values()):
        arms.append(TWO_STORAGES_ARM)
    arms.append(ATTACHED)
    if unknown := [name for name in asked["arms"] or () if name not in arms]:
        raise InputError(f"unknown arm {unknown[0]!r}", where="--arms", allowed=", ".join(arms))
    yield {
        "machine": {
            "device": devices.device_name(device),
            "torch": torch.__version__,
            "driver": devices.driver(device),
            "settings": devices.settings(device),
            "fp32": devices.fp32_arithmetic(device),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "total_bytes": devices.total_bytes(device),
            "free_bytes": devices.free_bytes(device),
        },
        "environment": describe_environment(),
        "kind": str(device),
        "folder": benchmark_folder(Path(), devices.device_name(device)).name,
        "jobs": [{"reference": reference, "job": job.name} for reference, job in jobs.items()],
        "arms": list(asked["arms"] or arms),
    }


def known(asked: Mapping[str, Any]) -> Iterator[Found]:
    """Yield the profile of a job, and the speed and peak of its baseline."""
    job, device = _job(asked), asked["device"]
    found = profile(
        job,
        device_name=devices.device_name(device),
        device=device,
        options=ProfilerOptions.lean(asked["seed"]),
    )
    yield {"profile": found.to_json()}
    devices.release(device)
    with contextlib.closing(_engine(job, asked)) as engine:
        yield _baseline(engine, found)


def answers(asked: Mapping[str, Any]) -> Iterator[Found]:
    """Yield whether predictions are right, whether exact mode repeats the run, and an attached tuner's overhead.

    The overhead is left out if the arm :data:`ATTACHED` is.
    """
    job, device = _job(asked), asked["device"]
    found: Found = {}
    for part in known(asked):
        found |= part
        yield part
    seen = Profile.from_json(found["profile"])
    with contextlib.closing(_engine(job, asked)) as engine:
        engine.run(1)
        yield {"answers": {"exact": _repeats(engine)}}
        plans = dict.fromkeys(
            plan
            for share in _FIRST_SHARES
            for name in ("baseline", *RULE_ARMS, "exact")
            for plan in _plans(name, seen, int(share * found["baseline"]["peak_bytes"]))[:1]
        )
        windows = PlanWindows(engine, list(plans))
        for _ in range(2):
            windows.measure()
            yield {"answers": {**_predicted(windows, seen)}}
    del engine, windows
    devices.release(device)
    if asked["attaches"]:
        yield from attached({**asked, "profile": found["profile"], "peak_bytes": found["baseline"]["peak_bytes"]})


def arm(asked: Mapping[str, Any]) -> Iterator[Found]:
    """Yield, after each round, an arm's speed and peak, by plan and by budget, in turn with the baseline."""
    began, name, seen = time.perf_counter(), asked["arm"], Profile.from_json(asked["profile"])
    budgets = {share: int(share * asked["peak_bytes"]) for share in asked["shares"]}
    chosen = {share: _plans(name, seen, budget) for share, budget in budgets.items()}
    computed: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    if name == TF32_ARM:
        computed = functools.partial(devices.fp32_computed_in, "tf32")
    with contextlib.closing(_engine(_job(asked), asked)) as engine:
        # The first step of an engine is not metered.
        engine.run(1)
        windows = PlanWindows(
            engine, list(dict.fromkeys(plan for plans in chosen.values() for plan in plans)), computed
        )
        for number in range(asked["rounds"]):
            windows.measure()
            reference = windows.reference()
            # The baseline's peak differs a little between processes, and the baseline fits its own.
            whole = max(reference["peak_bytes"] or 0, asked["peak_bytes"])
            budgets = {share: int(share * whole) for share in budgets}
            yield {
                name: {
                    "rounds": number + 1,
                    "seconds": time.perf_counter() - began,
                    "reference": reference,
                    "plans": [windows.plan(plan, seen) for plan in windows.plans],
                    "budgets": [
                        {"share": share, "bytes": budgets[share], **windows.within(budgets[share], plans)}
                        for share, plans in chosen.items()
                    ],
                }
            }


def attached(asked: Mapping[str, Any]) -> Iterator[Found]:
    """Yield the overhead of an attached tuner.

    Raises:
        InputError: if the copies of the job that are trained in turn do not fit.
    """
    static = Profile.from_json(asked["profile"]).static_bytes
    needed, total = asked["peak_bytes"] + (_COPIES - 1) * static, devices.total_bytes(asked["device"])
    if total is not None and needed > total:
        raise InputError(
            f"{_COPIES} copies of the job need {needed} bytes", where=ATTACHED, allowed=f"the device's {total}"
        )
    yield {ATTACHED: bench_overhead_attached(_job(asked), steps=asked["attached_steps"], seed=asked["seed"])}


PARTS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Found]]] = {
    "machine": machine,
    "known": known,
    "answers": answers,
    "arm": arm,
    ATTACHED: attached,
}


def placed(job: Job, device: str) -> Job:
    """Return the job with its model built on a device, and its batches moved there.

    A model that cannot be built on the device is built where the job builds it, and moved.

    Args:
        job: the job.
        device: the device.
    """

    def model() -> torch.nn.Module:
        try:
            with torch.device(device):
                built = job.model()
        except Exception:  # noqa: BLE001 - after any exception, building it elsewhere may work
            built = job.model()
        return built.to(device)

    return replace(
        job,
        model=model,
        batches=lambda seed: (map_tensors(lambda tensor: tensor.to(device), batch) for batch in job.batches(seed)),
    )


def _job(asked: Mapping[str, Any]) -> Job:
    return placed(load_job(asked["job"]), asked["device"])


def _engine(job: Job, asked: Mapping[str, Any]) -> TorchEngine:
    options = EngineOptions(discard_steps=1, statistics_every=None)
    return TorchEngine(job, seed=asked["seed"], device=asked["device"], options=options)


def _baseline(engine: TorchEngine, found: Profile) -> Found:
    """Return the speed and peak of a job's baseline; the predicted peak if it does not fit."""
    engine.run(1)
    window = engine.run(3)
    measured, predicted = window.peak_bytes, int(peak_bytes(found, engine.space.baseline()))
    sources = engine.job.data_sources
    return {
        "baseline": {
            "peak_bytes": predicted if measured is None else measured,
            "predicted_peak_bytes": predicted,
            "seconds_per_step": window.seconds_per_step,
            "failure": None if window.failure is None else f"{window.failure}: {window.failure_detail}",
        },
        "data": [source.name for source in sources()] if sources else [],
        "parameters": sum(parameter.numel() for parameter in engine.model.parameters()),
        "batch_size": engine.job.batch_size,
        "units": len(found.units),
        "storages": [str(storage) for storage in found.space.storages],
        "precisions": [str(precision) for precision in found.space.precisions],
        "profiled": {"steps": found.steps, "seconds": found.seconds, "warnings": list(found.warnings)},
    }


def _plans(name: str, seen: Profile, budget: int) -> list[Plan]:
    """Return the plans of an arm within a budget; none if a planner finds no plan that fits."""
    if name in ("baseline", TF32_ARM):
        return [seen.space.baseline()]
    if name in RULES:
        return [rule_plan(name, seen.space)]
    if name == TWO_STORAGES_ARM:
        name, seen = "exact", offering(seen, DEFAULT_STORAGES)
    method = METHODS[name]
    assert isinstance(method, PlanningMethod)
    try:
        return method.plans(seen, budget, Goal())[:_FINALISTS]
    except BudgetError:
        return []


def _predicted(windows: PlanWindows, seen: Profile) -> Found:
    """Return the largest errors of predicted peaks and times."""
    rows = [windows.plan(plan, seen) for plan in windows.plans]
    answered: Found = {}
    for name, key in (("memory", "peak_bytes"), ("time", "seconds_per_step")):
        off = [abs(row[f"predicted_{key}"] / row[key] - 1) for row in rows if row[key]]
        worst = max(off, default=None)
        answered[name] = {
            "yes": None if worst is None else worst <= WITHIN[name],
            "worst_frac": worst,
            "plans": len(off),
            "failures": [row["failure"] for row in rows if row["failure"]],
        }
    return answered


def _repeats(engine: TorchEngine) -> Found:
    """Return whether recomputation changes gradients by at most ``_NOISE`` times the difference of repeated passes."""
    space = engine.space
    baseline = space.baseline()
    recomputed = baseline.changed(storage=space.leanest().storage)
    first = engine.gradient(baseline)
    own, other = (
        max(_difference(first, engine.gradient(plan)) for _ in range(_PASSES)) for plan in (baseline, recomputed)
    )
    return {"yes": other <= _NOISE * own, "repeated_frac": own, "recomputed_frac": other}


def _difference(one: Sequence[torch.Tensor | None], two: Sequence[torch.Tensor | None]) -> float:
    """Return the largest difference of two gradients, relative to the largest entry of each parameter's gradient."""
    pairs = [(a, b) for a, b in zip(one, two, strict=True) if a is not None and b is not None]
    found = [float((a - b).abs().max() / a.abs().max().clamp_min(torch.finfo(a.dtype).tiny)) for a, b in pairs]
    return max(found, default=0.0)


def main() -> None:
    """Run the part that the parent process requests, and send its results as they arrive."""
    wire, asked, number = opened()
    with contextlib.suppress(EOFError, OSError):
        try:
            with pointed_at(asked["data"]):
                for found in PARTS[asked["part"]](asked):
                    # NaN and infinities become null, since documents contain neither.
                    wire.send({"found": json.loads(json.dumps(found), parse_constant=lambda _: None)})
        except Exception as error:  # noqa: BLE001 - the parent process classifies it
            fail(wire, number, error)
        wire.send({"done": True})
    leave()


if __name__ == "__main__":
    main()
