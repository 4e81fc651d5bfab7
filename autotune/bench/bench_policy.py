"""Benchmark of the planner's policy on jobs that it was not trained on, both static and moving.

Every table also contains the untrained network, the planner alone, and an upper limit: the exact optimum for static
jobs, and a clairvoyant for moving ones.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.agents.recipe import Recipe
from autotune.agents.shipped_network import BareNetwork
from autotune.bench.harness import SILENT, document_of
from autotune.campaign.moving_worlds import moving_tables
from autotune.campaign.policy_judging import MOVING_SEED, BenchSettings, Judged
from autotune.campaign.static_jobs import one_lane, static_cases, static_table
from autotune.cost_model.cost_arrays import CostArrays
from autotune.cost_model.plan_pool import make_pool
from autotune.errors import InputError
from autotune.gym.levers import Watch, levers_of
from autotune.io.progress import Reporter
from autotune.simulator.online_planner import LOOK_AHEAD, Planner, Seen, Situation
from autotune.simulator.random_jobs import Shape, draw_profile

_REPEATS = 25


def bench_policy(
    judged: Judged, recipe: Recipe, settings: BenchSettings | None = None, *, reporter: Reporter = SILENT
) -> dict[str, Any]:
    """Return how far the policy and its alternatives are from the best possible.

    Args:
        judged: the policy; see :func:`load_judged`.
        recipe: defines how conditions move, and the planner whose times are the reference.
        settings: what to measure.
        reporter: shows progress.

    Raises:
        InputError: if the seed draws jobs that the recipe trains on or validates with.
    """
    settings = settings or BenchSettings()
    if settings.seed + MOVING_SEED in (recipe.jobs.seed, recipe.jobs.seed + 1):
        raise InputError(f"--seed {settings.seed} draws the recipe's own jobs", allowed="another seed")
    windows = recipe.jobs.windows
    reporter.stage(f"{settings.jobs} held-out jobs, static and moving", 1.0)
    # Progress follows each part's approximate share of the time.
    reporter.advance(0.0, "static jobs")
    methods = static_table(static_cases(settings), judged, settings, windows)
    static = {}
    for number, variant in enumerate(settings.variants):
        reporter.advance(0.12 + 0.12 * number, f"static jobs, {variant}")
        static[variant] = static_table(static_cases(settings, variant), judged, settings, windows)
    moving = moving_tables(judged, recipe, settings, lambda share, title: reporter.advance(0.5 + 0.45 * share, title))
    reporter.advance(0.95, f"decisions on {settings.units} units")
    decision = decision_times(judged, settings.units, windows)
    decision["needs_stable_baselines3"] = _needs_stable_baselines3(judged.folder)
    reporter.advance(1.0)
    figures = {
        "jobs": settings.jobs,
        "seed": settings.seed,
        "storages": [str(storage) for storage in settings.storages],
        "policy": dict(judged.hashes),
        "recipe_sha256": recipe.sha256,
        "strengths_sha256": recipe.strengths_sha256,
        "methods": methods,
        "static": static,
        **moving,
        "decision": decision,
    }
    return document_of("policy", figures)


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the results in words."""
    everything = document["dynamic"]["all"]
    won = everything["methods"]["ppo"]
    low, high = won["won_ci95"]
    won_of = [
        (name, row["planner_belief"], row["ppo"], row["clairvoyant"]) for name, row in document["families"].items()
    ]
    return [
        *(
            f"dips, {name}: a belief wins {belief:.2f} %, PPO on top of it {ppo:.2f} %, of {best:.2f} %"
            for name, belief, ppo, best in won_of
        ),
        f"moving jobs: {won['won_percent']:+.2f} % of time against the planner (95 % interval {low:+.2f} to "
        f"{high:+.2f}), of {everything['headroom_percent']:.1f} % that a clairvoyant would win; static: "
        f"{document['methods']['ppo']['regret_p95']:.2f} % off the exact optimum (p95)",
    ]


def decision_times(judged: Judged, units: int, windows: int) -> dict[str, Any]:
    """Return the median seconds of the second decision in a run of a large job.

    Args:
        judged: the policy.
        units: number of units of the job.
        windows: number of windows of the run.
    """
    shape = Shape(units=units - 2, accumulation_choices=(1, 2, 4), batching="adaptive")
    profile = draw_profile(np.random.default_rng(0), shape)
    began = time.perf_counter()
    arrays = CostArrays([profile])
    pool = make_pool(arrays)
    pool_s = time.perf_counter() - began
    planner, bare = Planner(one_lane(pool, arrays, still=False), judged.settings), BareNetwork(judged.shipped)
    watch, situation = _second_window(planner, windows)
    parts: NDArray[np.float64] = np.zeros((_REPEATS, 2))
    for repeat in range(_REPEATS):
        began = time.perf_counter()
        actions = bare.most_likely(watch.features(situation))
        parts[repeat, 0] = time.perf_counter() - began
        planner.decide(situation, levers_of(actions))
        parts[repeat, 1] = time.perf_counter() - began
    network_s, decision_s = np.median(parts, axis=0)
    return {
        "units": len(profile.units),
        "plans": int(pool.there.sum()),
        "pool_s": pool_s,
        "network_s": float(network_s),
        "decision_s": float(decision_s),
    }


def _second_window(planner: Planner, windows: int) -> tuple[Watch, Situation]:
    """Return a planner's watch after one window that went as predicted, and the situation before the next one."""
    watch, one = Watch(planner), np.ones(1)
    budget = np.full((1, LOOK_AHEAD), 0.6 * watch.baseline_peak[0])
    situation = Situation(
        budget=budget, progress=0 * one, windows_left=windows * one, noise_scale=50 * one, switch_s=0 * one
    )
    watch.features(situation)
    plan = planner.decide(situation)
    seconds = planner.step_seconds(plan, one)
    ran_out = np.zeros(1, dtype=bool)
    seen = Seen(
        plan=plan,
        length=one,
        longest=one,
        dip=0 * one,
        budget=budget[:, 0],
        step_s=seconds,
        window_s=10 * seconds,
        total_s=10 * seconds,
        ran_out=ran_out,
    )
    watch.observe(seen, situation.noise_scale)
    return watch, replace(situation, progress=one / windows, windows_left=(windows - 1) * one)


def _needs_stable_baselines3(policy: Path) -> bool:
    """Return whether a new process imports the training library to load the policy and decide once."""
    code = (
        "import sys; from pathlib import Path; from autotune.bench.bench_policy import decision_times; "
        "from autotune.campaign.policy_judging import load_judged; "
        "decision_times(load_judged(Path(sys.argv[1])), 5, 10); print('stable_baselines3' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-P", "-c", code, str(policy)], capture_output=True, text=True, check=True)
    return answer.stdout.strip() == "True"
