"""Further training of a policy on one real job; the result is kept only if it is better on that job."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from autotune.agents.planner_policy import PlannerPolicy
from autotune.agents.policy_folder import LeverTraining, load_policy, save_levers
from autotune.agents.ppo import FineTuning, fine_tune
from autotune.agents.shipped_network import LeverNetwork
from autotune.campaign.policy_training import POLICY
from autotune.cost_model.profile import Profile
from autotune.errors import PolicyFileError
from autotune.gym.job_env import TuningEnv
from autotune.gym.lever_env import LeverEnv
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.records.run_directory import RunDirectory
from autotune.records.tracking import Tracker

_HELD_OUT_WINDOWS = 16


def go_on(
    job: Job,
    folder: Path,
    profile: Profile,
    memory_budget: str | None,
    recipe: FineTuning,
    run: RunDirectory,
    tracker: Tracker,
    reporter: Reporter,
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """Continue training a policy on a real job, and write the better of the old and the new policy.

    The better policy has the lower mean cost over held-out windows of runs with seeds that training did not use. Both
    policies run with the same seeds, and their windows alternate.

    Args:
        job: the job.
        folder: the policy to start from.
        profile: the job's profile.
        memory_budget: a size or a share of the baseline's peak; ``None`` for none.
        recipe: PPO settings.
        run: run directory in which the policy is written.
        tracker: logs progress.
        reporter: shows progress.
        seed: random seed for training.

    Returns:
        The document that ``train JOB --json`` prints.

    Raises:
        PolicyFileError: if the folder has no policy that adjusts a planner.
    """
    policy = load_policy(folder)
    if not isinstance(policy, PlannerPolicy) or not isinstance(policy.network, LeverNetwork) or policy.ranges is None:
        raise PolicyFileError("does not adjust a planner", where=str(folder), allowed="a policy of kind levers")
    began = time.perf_counter()

    def env(windows: int) -> LeverEnv:
        plans = TuningEnv(job, memory_budget_bytes=memory_budget, max_windows=windows, evaluate=False)
        return LeverEnv(plans, profile, policy.settings)

    reporter.stage(f"continue training on {job.name}", recipe.windows)
    seen = 0

    def on_window() -> None:
        nonlocal seen
        seen += 1
        reporter.advance(seen)

    training = env(recipe.rollout)
    trained = fine_tune(training, policy.network, recipe, seed=seed, on_window=on_window)
    training.close()
    reporter.stage("held-out windows, before and after", 2 * _HELD_OUT_WINDOWS)
    costs: dict[str, list[float]] = {"before": [], "after": []}
    networks = {"before": policy.network, "after": trained}
    runs = {name: env(_HELD_OUT_WINDOWS) for name in networks}
    observations = {name: held_out.reset(seed=seed + 10_000)[0] for name, held_out in runs.items()}
    for window in range(_HELD_OUT_WINDOWS):
        for name in ("before", "after") if window % 2 == 0 else ("after", "before"):
            features = observations[name]
            rows = features["units"].reshape(1, len(profile.units), -1)
            action = networks[name].most_likely((features["run"][None], rows))[0]
            observations[name], reward, _, _, _ = runs[name].step(np.asarray(action))
            costs[name].append(-reward)
        reporter.advance(2 * (window + 1))
    for held_out in runs.values():
        held_out.close()
    means = {name: statistics.fmean(values) for name, values in costs.items()}
    kept = "after" if means["after"] < means["before"] else "before"
    document = {
        "version": 1,
        "job": job.name,
        "from": str(folder),
        "cost_before": means["before"],
        "cost_after": means["after"],
        "kept": kept,
        "windows": recipe.windows,
        "training_s": time.perf_counter() - began,
        "policy": str(run.path / POLICY),
        "run": str(run.path),
    }
    about = _training(folder)
    card = _card(folder, document)
    save_levers(run.path / POLICY, networks[kept], policy.settings, policy.ranges, about, card)
    tracker.metrics({f"cost_{name}": mean for name, mean in means.items()})
    tracker.artifact(run.path / POLICY)
    tracker.artifact(run.write("trained.json", document))
    return document


def _training(folder: Path) -> LeverTraining:
    from autotune.agents.policy_folder import MANIFEST
    from autotune.io.files import read_json

    return LeverTraining.model_validate(read_json(folder / MANIFEST)["training"])


def _card(folder: Path, document: dict[str, Any]) -> str:
    return f"""# Policy

The policy `{folder.name}`, trained further on the job `{document["job"]}` for {document["windows"]} windows. Over
held-out windows its mean cost against the baseline was {document["cost_before"]:.4f} before and
{document["cost_after"]:.4f} after; kept: {document["kept"]}. Its earlier training is described in `manifest.json`.
"""
