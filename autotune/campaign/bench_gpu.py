"""Measure on one device what the project is for: plans under budgets, predictions, and the cost of being attached.

It needs torch and the core dependencies alone, and ends within its time: parts that would begin later are left out, and
the document says which.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from autotune.agents.planner import planned
from autotune.agents.rules import RULES
from autotune.budget import format_bytes
from autotune.campaign.bench_attach import bench_overhead_attached
from autotune.campaign.progress import Reporter, Silent
from autotune.engines.profiler import ProfilerOptions, profile
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.errors import BudgetError, InputError, first_line
from autotune.job import Job
from autotune.measurement import Measurement
from autotune.mechanics.devices import device_name
from autotune.mechanics.trees import map_tensors
from autotune.physics.memory_model import peak_bytes
from autotune.physics.profile import Profile
from autotune.physics.solver import Goal
from autotune.physics.time_model import seconds_per_step
from autotune.plan import Plan

RULE_ARMS = ("paper", "uniform-bf16", "sqrt")
PLANNED_ARMS = ("exact", "ppo")
# A step that is metered and not timed, and those that are timed.
_WINDOW_STEPS = 4
# Plans of a planner that predictions cannot tell apart, of which the first round chooses.
_FINALISTS = 3
# What a device cannot run (no room, no kernel) is named; it takes nothing else that was measured with it.
_CANNOT_RUN = (InputError, RuntimeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBenchSettings:
    """Say how much is measured.

    Attributes:
        device: the device.
        shares: budgets, as shares of the baseline's peak.
        rounds: windows of each plan; the first chooses among a planner's plans, the others are reported.
        attached_steps: steps of each arm when the cost of being attached is measured.
        seconds: after which no further part begins.
        seed: of weights and batches.
    """

    device: str = "cuda"
    shares: tuple[float, ...] = (1.0, 0.6, 0.4, 0.3)
    rounds: int = 4
    attached_steps: int = 60
    seconds: float = 420.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 2:
            raise InputError(f"rounds is {self.rounds}", where="--rounds", allowed="at least 2")
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise InputError("there is no CUDA device here", where="--device", allowed="cpu, to try the command")


def bench_gpu(jobs: Sequence[Job], settings: GpuBenchSettings, *, reporter: Reporter | None = None) -> dict[str, Any]:
    """Return what plans come to on a device, job by job.

    Args:
        jobs: what is trained, the most important first.
        settings: how much is measured.
        reporter: shows progress.
    """
    shows, began = reporter or Silent(), time.perf_counter()
    found: list[dict[str, Any]] = []
    left_out: list[str] = []
    for job in jobs:
        if time.perf_counter() - began > settings.seconds:
            left_out.append(f"{job.name}: no time was left")
            continue
        try:
            found.append(_bench_job(job, settings, shows))
        except _CANNOT_RUN as error:
            left_out.append(f"{job.name}: {first_line(error)}")
        if torch.device(settings.device).type == "cuda":
            torch.cuda.empty_cache()
    return {
        "version": 1,
        "benchmark": "gpu",
        "device": device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "settings": asdict(settings),
        "jobs": found,
        "left_out": left_out,
        "seconds": time.perf_counter() - began,
    }


def _bench_job(job: Job, settings: GpuBenchSettings, shows: Reporter) -> dict[str, Any]:
    shows.stage(f"{job.name}: profile", 1)
    options = ProfilerOptions.lean(settings.seed)
    known = profile(job, device_name=device_name(), device=settings.device, options=options, on_progress=shows.advance)
    engine = TorchEngine(
        job,
        seed=settings.seed,
        device=settings.device,
        options=EngineOptions(discard_steps=1, statistics_every=None),
    )
    engine.run(1)
    baseline = engine.space.baseline()
    peak = engine.run(1).peak_bytes
    if peak is None:
        raise InputError("the baseline's memory cannot be metered", where=job.name)
    budgets = [int(share * peak) for share in settings.shares]
    candidates = _candidates(known, engine.space.baseline(), budgets)
    windows = _measure(engine, candidates, settings, shows, job.name)
    engine.close()
    reference = _seconds_per_sample(windows[baseline][1:])
    plans = list(windows)
    return {
        "job": job.name,
        "data": [source.name for source in job.data_sources()] if job.data_sources else [],
        "parameters": sum(p.numel() for p in engine.model.parameters()),
        "batch_size": job.batch_size,
        "units": len(known.units),
        "profile": {"steps": known.steps, "seconds": known.seconds, "warnings": list(known.warnings)},
        "baseline": {"seconds_per_sample": reference, "peak_bytes": peak},
        "plans": [_plan(known, plan, windows[plan]) for plan in plans],
        "budgets": [
            _budget(share, budget, candidates[budget], windows, plans, reference)
            for share, budget in zip(settings.shares, budgets, strict=True)
        ],
        "attached": _attached(job, settings, shows),
    }


def _candidates(known: Profile, baseline: Plan, budgets: Sequence[int]) -> dict[int, dict[str, list[Plan]]]:
    """Return each arm's plans by budget; a planner without a plan that fits has none."""
    found: dict[int, dict[str, list[Plan]]] = {}
    for budget in budgets:
        arms = {"baseline": [baseline], **{name: [RULES[name].plan(known.space)] for name in RULE_ARMS}}
        for name in PLANNED_ARMS:
            try:
                arms[name] = planned(name, known, budget, Goal())[:_FINALISTS]
            except BudgetError:
                arms[name] = []
        found[budget] = arms
    return found


def _measure(
    engine: TorchEngine,
    candidates: Mapping[int, Mapping[str, Sequence[Plan]]],
    settings: GpuBenchSettings,
    shows: Reporter,
    name: str,
) -> dict[Plan, list[Measurement]]:
    """Measure every plan once a round, in rounds of alternating direction."""
    plans = list(dict.fromkeys(plan for arms in candidates.values() for some in arms.values() for plan in some))
    windows: dict[Plan, list[Measurement]] = {plan: [] for plan in plans}
    shows.stage(f"{name}: {len(plans)} plans in {settings.rounds} rounds", settings.rounds)
    for number in range(settings.rounds):
        for plan in plans if number % 2 == 0 else reversed(plans):
            engine.apply(plan)
            windows[plan].append(engine.run(_WINDOW_STEPS))
        shows.advance(number + 1)
    return windows


def _seconds(windows: Sequence[Measurement]) -> float | None:
    """Return the median seconds of a step; ``None`` if a window failed."""
    if any(window.failure is not None for window in windows):
        return None
    return statistics.median(seconds for window in windows for seconds in window.step_s)


def _seconds_per_sample(windows: Sequence[Measurement]) -> float | None:
    """Return the median seconds of a sample: under adaptive batching a step takes k batches."""
    seconds, samples = _seconds(windows), windows[0].samples_per_step
    return None if seconds is None or not samples else seconds / samples


def _peak(windows: Sequence[Measurement]) -> int | None:
    return max((window.peak_bytes for window in windows if window.peak_bytes is not None), default=None)


def _plan(known: Profile, plan: Plan, windows: Sequence[Measurement]) -> dict[str, Any]:
    failures = [window for window in windows if window.failure is not None]
    return {
        "plan": plan.to_json(),
        "seconds_per_step": _seconds(windows[1:]),
        "predicted_seconds_per_step": seconds_per_step(known, plan),
        "peak_bytes": _peak(windows),
        "predicted_peak_bytes": peak_bytes(known, plan),
        "failure": str(failures[0].failure) if failures else None,
    }


def _budget(
    share: float,
    budget_bytes: int,
    candidates: Mapping[str, Sequence[Plan]],
    windows: Mapping[Plan, Sequence[Measurement]],
    plans: Sequence[Plan],
    reference: float | None,
) -> dict[str, Any]:
    """Return what each arm comes to within a budget, and whether the planners are at least the best of the others."""
    arms = {name: _arm(some, budget_bytes, windows, plans, reference) for name, some in candidates.items() if some}
    static = [arms[name]["speedup"] or 0.0 for name in ("baseline", *RULE_ARMS) if arms[name]["fits"]]
    return {
        "share": share,
        "bytes": budget_bytes,
        "arms": arms,
        "best_static_speedup": max(static, default=None),
        **{f"{name}_speedup": arms[name]["speedup"] if name in arms else None for name in PLANNED_ARMS},
    }


def _arm(
    some: Sequence[Plan],
    budget_bytes: int,
    windows: Mapping[Plan, Sequence[Measurement]],
    plans: Sequence[Plan],
    reference: float | None,
) -> dict[str, Any]:
    def first_round(plan: Plan) -> tuple[bool, float]:
        peak, seconds = _peak(windows[plan]), _seconds_per_sample(windows[plan][:1])
        return (peak is None or peak > budget_bytes), float("inf") if seconds is None else seconds

    plan = min(some, key=first_round)
    seconds, peak = _seconds_per_sample(windows[plan][1:]), _peak(windows[plan])
    return {
        "plan": plans.index(plan),
        "fits": peak is not None and peak <= budget_bytes and seconds is not None,
        "speedup": None if seconds is None or reference is None else reference / seconds,
    }


def _attached(job: Job, settings: GpuBenchSettings, shows: Reporter) -> dict[str, Any]:
    try:
        return bench_overhead_attached(
            placed(job, settings.device), steps=settings.attached_steps, seed=settings.seed, reporter=shows
        )
    except _CANNOT_RUN as error:
        return {"failure": first_line(error)}


def placed(job: Job, device: str) -> Job:
    """Return the job with its model and its batches on a device."""
    return replace(
        job,
        model=lambda: job.model().to(device),
        batches=lambda seed: (map_tensors(lambda tensor: tensor.to(device), batch) for batch in job.batches(seed)),
    )


def verdict(document: Mapping[str, Any]) -> str:
    """Return in one sentence what was found."""
    parts = []
    for job in document["jobs"]:
        ahead = [
            f"{one['share']:.0%}: exact {_times(one['exact_speedup'])}, ppo {_times(one['ppo_speedup'])}, best rule "
            f"{_times(one['best_static_speedup'])}"
            for one in job["budgets"]
        ]
        errors = [
            abs(plan["predicted_peak_bytes"] / plan["peak_bytes"] - 1) for plan in job["plans"] if plan["peak_bytes"]
        ]
        parts.append(
            f"{job['job']} (baseline {format_bytes(job['baseline']['peak_bytes'])}): {'; '.join(ahead)}; peaks "
            f"predicted within {max(errors, default=0.0):.1%}"
        )
    return ". ".join([*parts, *document["left_out"]])


def _times(speedup: float | None) -> str:
    return "none" if speedup is None else f"{speedup:.2f}x"
