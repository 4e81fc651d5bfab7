"""Judge the policy that leans on a planner on jobs that it was not trained on: standing still, and moving.

Every table holds the untrained network and the planner alone beside the trained one, and what could be won at most:
the exact optimum where nothing moves, a clairvoyant where conditions do.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.agents.policy_network import BareNetwork
from autotune.agents.recipe import Recipe
from autotune.campaign.moving_worlds import moving_tables
from autotune.campaign.policy_judging import (
    MOVING_SEED,
    BenchSettings,
    Judged,
    Share,
)
from autotune.campaign.static_jobs import one_lane, static_cases, static_table
from autotune.cost_model.cost_arrays import CostArrays
from autotune.cost_model.plan_pool import make_pool
from autotune.errors import InputError
from autotune.gym.levers import Watch, levers_of
from autotune.mechanics.devices import device_name
from autotune.simulator.online_planner import LOOK_AHEAD, Planner, Seen, Situation
from autotune.simulator.random_jobs import Shape, draw_profile

_REPEATS = 25


def bench_policy(
    judged: Judged, recipe: Recipe, settings: BenchSettings | None = None, *, on_part: Share | None = None
) -> dict[str, Any]:
    """Return how far the policy, and what it is to be compared with, are from the best that can be done.

    Args:
        judged: the policy; see :func:`load_judged`.
        recipe: says how conditions move and how the planner plans that times are compared with.
        settings: what is measured.
        on_part: is told the share that is done, and what comes next.

    Raises:
        InputError: if the seed draws jobs that the recipe trains on or judges by.
    """
    settings, tell = settings or BenchSettings(), on_part or (lambda _share, _title: None)
    if settings.seed + MOVING_SEED in (recipe.jobs.seed, recipe.jobs.seed + 1):
        raise InputError(f"--seed {settings.seed} draws the recipe's own jobs", allowed="another seed")
    document: dict[str, Any] = {
        "version": 1,
        "benchmark": "policy",
        "device": device_name(),
        "jobs": settings.jobs,
        "seed": settings.seed,
        "policy": dict(judged.hashes),
        "recipe_sha256": recipe.sha256,
        "strengths_sha256": recipe.strengths_sha256,
    }
    windows = recipe.jobs.windows
    # Shares of the time that the parts take, about.
    tell(0.0, "static jobs")
    document["methods"] = static_table(static_cases(settings), judged, settings, windows)
    document["static"] = {}
    for number, variant in enumerate(settings.variants):
        tell(0.12 + 0.12 * number, f"static jobs, {variant}")
        document["static"][variant] = static_table(static_cases(settings, variant), judged, settings, windows)
    document["dynamic"], document["ablation"] = moving_tables(
        judged, recipe, settings, lambda s, t: tell(0.5 + 0.45 * s, t)
    )
    tell(0.95, f"decisions on {settings.units} units")
    document["decision"] = decision_times(judged, settings.units, windows) | {
        "needs_stable_baselines3": _needs_stable_baselines3(judged.folder)
    }
    tell(1.0, "")
    return document


def decision_times(judged: Judged, units: int, windows: int) -> dict[str, Any]:
    """Return the median seconds of one lane's decision on a large job, its second one.

    Args:
        judged: the policy.
        units: of the job.
        windows: of the run that it is in.
    """
    shape = Shape(units=units - 2, accumulation_choices=(1, 2, 4), batching="adaptive")
    profile = draw_profile(np.random.default_rng(0), shape)
    began = time.perf_counter()
    arrays = CostArrays([profile])
    pool = make_pool(arrays)
    pool_s = time.perf_counter() - began
    planner, bare = Planner(one_lane(pool, arrays, still=False), judged.settings), BareNetwork(judged.shipped)
    watch, situation = _begun(planner, windows)
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


def _begun(planner: Planner, windows: int) -> tuple[Watch, Situation]:
    """Return the watch of a planner that has seen one window go as believed, and what is known before the next."""
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
        step_s=seconds,
        window_s=10 * seconds,
        total_s=10 * seconds,
        ran_out=ran_out,
    )
    watch.observe(seen, situation.noise_scale)
    return watch, replace(situation, progress=one / windows, windows_left=(windows - 1) * one)


def _needs_stable_baselines3(policy: Path) -> bool:
    """Tell whether a fresh process that loads the policy and decides once has imported the trainer's library."""
    code = (
        "import sys; from pathlib import Path; from autotune.bench.bench_policy import decision_times; "
        "from autotune.campaign.policy_judging import load_judged; "
        "decision_times(load_judged(Path(sys.argv[1])), 5, 10); print('stable_baselines3' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-P", "-c", code, str(policy)], capture_output=True, text=True, check=True)
    return answer.stdout.strip() == "True"
