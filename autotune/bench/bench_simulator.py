"""Measure the simulator: decisions per second, and whether it ranks plans as real runs do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotune.agents.rules import RULES
from autotune.campaign import comparison
from autotune.campaign.arms import named_arm
from autotune.cost_model.time_model import seconds_per_step
from autotune.gym.levers import SIZES, Actions
from autotune.gym.simulated_env import SimulatedVectorEnv
from autotune.job import Job
from autotune.mechanics.devices import device_name
from autotune.profiling.convergence_runs import cached_convergence
from autotune.profiling.profile_cache import cached_profile
from autotune.records.protocol import Protocol
from autotune.simulator.random_jobs import draw_job
from autotune.stats import rank_correlation

_LANES = 512
_JOBS, _DEPTH = 64, (2, 16)


def bench_simulator(*, seconds: float, seed: int) -> dict[str, Any]:
    """Return decisions per second of one process.

    A decision is one window of one lane: levers decoded, a plan made, costs and convergence simulated, features and
    reward computed, and its share of beginning the next run.

    Args:
        seconds: how long it is measured.
        seed: of jobs, runs and actions.
    """
    generator = np.random.default_rng(seed)
    jobs = [draw_job(generator, depth=_DEPTH) for _ in range(_JOBS)]
    env = SimulatedVectorEnv(jobs, _LANES, seed=seed)
    env.reset(seed=seed)
    actions = generator.integers(0, SIZES, (16, _LANES, len(SIZES)))
    depths = [sum(unit.recomputable for unit in job.profile.units) for job in jobs]
    return {
        "version": 1,
        "benchmark": "simulator",
        "device": device_name(),
        "decisions_per_s": _rate(env, actions, seconds),
        "lanes": _LANES,
        "jobs": _JOBS,
        "recomputable_units": {"min": min(depths), "median": float(np.median(depths)), "max": max(depths)},
    }


def _rate(env: SimulatedVectorEnv, actions: Actions, seconds: float) -> float:
    """Return the median rate of whole runs, at least three: other load on the machine slows some of them."""
    rates: list[float] = []
    until = time.perf_counter() + seconds
    while len(rates) < 3 or time.perf_counter() < until:
        began, steps, ended = time.perf_counter(), 0, False
        while not ended:
            ended = bool(env.step(actions[steps % len(actions)])[2].all())
            steps += 1
        rates.append(steps * env.num_envs / (time.perf_counter() - began))
    return float(np.median(rates))


def rank_plans(
    job: Job,
    runs: Path,
    seeds: Sequence[int],
    *,
    on_progress: Callable[[str, int, float], None] | None = None,
) -> dict[str, Any]:
    """Return predicted and real times to the target of the hand-made rules' plans, and their rank correlation.

    Args:
        job: the job.
        runs: where its profile and its convergence model are kept; they are measured where they are missing.
        seeds: of the real runs; the median over them counts.
        on_progress: is told of arm, seed and share.
    """
    profile, _, _ = cached_profile(job, runs)
    convergence, _, _ = cached_convergence(job, runs)
    plans = {name: rule.plan(profile.space) for name, rule in RULES.items()}
    predicted = {}
    for name, plan in plans.items():
        times = plan.accumulation_steps if job.batching == "adaptive" else 1
        steps = convergence.steps_to(job.target, float(job.batch_size * times), convergence.squared_error(plan))
        predicted[name] = steps * seconds_per_step(profile, plan)
    protocol = Protocol(
        job=job.name,
        arms=tuple(plans),
        seeds=tuple(seeds),
        horizon_samples=comparison.find_horizon(job),
        memory_budget_bytes=None,
    )
    arms = [named_arm(name, job, profile.space) for name in plans]
    document = comparison.compare(job, arms, protocol, device=device_name(), on_progress=on_progress)
    real = {arm["name"]: _median_time(arm["runs"]) for arm in document["arms"]}
    known = {name: time for name, time in real.items() if time is not None}
    return {
        "job": job.name,
        "plans": {name: str(plan) for name, plan in plans.items()},
        "predicted_time_to_target_s": predicted,
        "real_time_to_target_s": real,
        "seeds": list(seeds),
        "rank_correlation": rank_correlation([predicted[name] for name in known], list(known.values())),
        "convergence": {
            "loss_error_frac": convergence.loss_error_frac,
            "metric_error_frac": convergence.metric_error_frac,
            "runs": convergence.runs,
            "steps": convergence.steps,
        },
    }


def _median_time(runs: Sequence[dict[str, Any]]) -> float | None:
    times = [run["time_to_target_s"] for run in runs if run["reached"]]
    return float(np.median(times)) if len(times) == len(runs) else None
