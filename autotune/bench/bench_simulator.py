"""Speed of the simulator in decisions per second, and whether it ranks plans as real runs do."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotune.agents.rules import RULES
from autotune.bench.harness import SILENT, document_of
from autotune.campaign import comparison
from autotune.campaign.arms import named_arm
from autotune.cost_model.time_model import seconds_per_step
from autotune.gym.levers import SIZES, Actions
from autotune.gym.simulated_env import SimulatedVectorEnv
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.mechanics.devices import device_name
from autotune.profiling.convergence_runs import cached_convergence
from autotune.profiling.profile_cache import cached_profile
from autotune.records.protocol import Protocol
from autotune.simulator.random_jobs import draw_job
from autotune.stats import rank_correlation

_LANES = 512
_JOBS, _DEPTH = 64, (2, 16)


def bench_simulator(*, seconds: float, seed: int, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Return decisions per second of one process.

    A decision is one window of one lane: decoding levers, making a plan, simulating costs and convergence, computing
    features and reward, and its share of starting the next run.

    Args:
        seconds: least duration of the measurement.
        seed: random seed for jobs, runs and actions.
        reporter: shows progress.
    """
    reporter.stage("simulate", 1)
    generator = np.random.default_rng(seed)
    jobs = [draw_job(generator, depth=_DEPTH) for _ in range(_JOBS)]
    env = SimulatedVectorEnv(jobs, _LANES, seed=seed)
    env.reset(seed=seed)
    actions = generator.integers(0, SIZES, (16, _LANES, len(SIZES)))
    depths = [sum(unit.recomputable for unit in job.profile.units) for job in jobs]
    figures = {
        "decisions_per_s": _rate(env, actions, seconds),
        "lanes": _LANES,
        "jobs": _JOBS,
        "recomputable_units": {"min": min(depths), "median": float(np.median(depths)), "max": max(depths)},
    }
    return document_of("simulator", figures)


def _rate(env: SimulatedVectorEnv, actions: Actions, seconds: float) -> float:
    """Return the median rate of at least three whole runs, since other load on the machine slows some of them."""
    rates: list[float] = []
    until = time.perf_counter() + seconds
    while len(rates) < 3 or time.perf_counter() < until:
        began, steps, ended = time.perf_counter(), 0, False
        while not ended:
            ended = bool(env.step(actions[steps % len(actions)])[2].all())
            steps += 1
        rates.append(steps * env.num_envs / (time.perf_counter() - began))
    return float(np.median(rates))


def rank_plans(job: Job, runs: Path, seeds: Sequence[int], *, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Return predicted and real times to the target of the hand-made rules' plans, and their rank correlation.

    Args:
        job: the job.
        runs: folder of its cached profile and convergence model, which are measured if missing.
        seeds: random seeds for the real runs; their median time counts.
        reporter: shows progress.
    """
    target = job.required_target(where="bench simulator")
    reporter.stage(f"{job.name}: real runs of five plans", 1)
    profile, _, _ = cached_profile(job, runs)
    convergence, _, _ = cached_convergence(job, runs)
    plans = {name: rule.plan(profile.space) for name, rule in RULES.registered.items()}
    predicted = {}
    for name, plan in plans.items():
        times = plan.accumulation_steps if job.batching == "adaptive" else 1
        steps = convergence.steps_to(target, float(job.batch_size * times), convergence.squared_error(plan))
        predicted[name] = steps * seconds_per_step(profile, plan)
    protocol = Protocol(
        job=job.name,
        arms=tuple(plans),
        seeds=tuple(seeds),
        horizon_samples=comparison.find_horizon(job),
        memory_budget_bytes=None,
    )
    arms = [named_arm(name, job, profile.space) for name in plans]
    document = comparison.compare(job, arms, protocol, device=device_name())
    real = {arm["name"]: _median_time(arm["runs"]) for arm in document["arms"]}
    known = {name: time_s for name, time_s in real.items() if time_s is not None}
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
    """Return the median time to the target; ``None`` if a run did not reach it."""
    times = [run["time_to_target_s"] for run in runs if run["reached"]]
    return float(np.median(times)) if len(times) == len(runs) else None


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the results in words."""
    line = f"{document['decisions_per_s']:,.0f} decisions/s"
    if "ranking" in document:
        ranking = document["ranking"]
        line += f"; rank correlation with real runs of {ranking['job']}: {ranking['rank_correlation']:.2f}"
    return [line]
