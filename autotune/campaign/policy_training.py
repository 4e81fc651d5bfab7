"""Training of the policy that adjusts a planner: several seeds train in parallel, and the best is kept.

Seeds train in separate processes and write their state to files, which this process reads to show their progress. An
interrupted training is resumed from these files.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotune.agents.recipe import Recipe, recipe_of
from autotune.agents.saved_training import SavedTraining
from autotune.campaign.seed_files import (
    VALIDATION_LANES,
    SeedFiles,
    SeedResult,
    finished,
    identity,
    own_folder,
    read_result,
    taken_up,
    write_result,
)
from autotune.campaign.seed_processes import ClusterSeeds, LocalSeeds, SeedProcess
from autotune.choices import DEFAULT_STORAGES, STORAGES
from autotune.engines.ray_cluster import ClusterOptions
from autotune.errors import AutotuneError, WorkerLostError
from autotune.gym.moving_env import MovingEnv
from autotune.io.files import append_json_line
from autotune.io.progress import Reporter
from autotune.records.run_directory import RunDirectory
from autotune.records.tracking import Tracker
from autotune.simulator.moving_conditions import Strengths
from autotune.simulator.random_jobs import draw_job
from autotune.simulator.simulated_job import SimulatedJob
from autotune.stats import clustered_mean_interval

logger = logging.getLogger(__name__)

POLICY = "policy"
_POLL_S = 1.0


def jobs_of(recipe: Recipe, *, validation: bool = False) -> list[SimulatedJob]:
    """Return the simulated jobs on which a recipe trains, or validates."""
    jobs = recipe.jobs
    generator = np.random.default_rng(jobs.seed + validation)
    count = jobs.validation if validation else jobs.training
    depth, ladders = (jobs.shallowest, jobs.deepest), round(count * jobs.all_storages_frac)
    storages = [STORAGES] * ladders + [DEFAULT_STORAGES] * (count - ladders)
    return [draw_job(generator, depth=depth, storages=offered) for offered in storages]


def validation_env(recipe: Recipe, strengths: Strengths | None = None, lanes: int = VALIDATION_LANES) -> MovingEnv:
    """Return the environment that evaluates networks on validation jobs and courses."""
    return MovingEnv(
        jobs_of(recipe, validation=True),
        strengths or recipe.strengths,
        lanes,
        windows=recipe.jobs.windows,
        settings=recipe.planner,
        seed=recipe.jobs.seed + 1,
    )


def train_seed(document: dict[str, Any], seed: int, folder: str, parent: int) -> None:
    """Train and evaluate one seed; the main function of its process.

    Args:
        document: the recipe as a JSON object.
        seed: random seed for the network, the courses and the actions.
        folder: the run directory.
        parent: process id of the parent process; training stops when that process has ended.
    """
    import torch
    from safetensors.torch import save

    from autotune.agents.ppo import train_levers

    torch.set_num_threads(1)
    recipe, files = recipe_of(document), SeedFiles(folder=Path(folder), seed=seed)
    generations = files.generations()
    saved = taken_up(files, recipe, generations)
    told = {row["decisions"] for row in files.rows()}
    env = MovingEnv(
        jobs_of(recipe),
        recipe.strengths,
        recipe.ppo.lanes,
        windows=recipe.jobs.windows,
        settings=recipe.planner,
        clones=recipe.ppo.clones,
        seed=1000 + seed,
    )
    began = time.perf_counter()

    def on_rollout(decisions: int, won: float) -> None:
        if os.getppid() != parent:
            # The parent process has ended; the training can be resumed from its checkpoints.
            raise SystemExit(1)
        if decisions in told:
            return
        seconds = time.perf_counter() - began
        append_json_line(files.progress, {"decisions": decisions, "won_percent": won, "seconds": seconds})

    def on_save(reached: SavedTraining) -> None:
        generations.write(reached.to_bytes(identity(files, recipe)))

    network = train_levers(env, recipe.ppo, seed=seed, saved=saved, on_save=on_save, on_rollout=on_rollout)
    judged = validation_env(recipe)
    features, done, won = judged.reset(), False, np.zeros(judged.lanes)
    lowest, highest = features[0].min(axis=0), features[0].max(axis=0)
    while not done:
        features, rewards, done = judged.step(network.most_likely(features))
        won += rewards
        lowest, highest = np.minimum(lowest, features[0].min(axis=0)), np.maximum(highest, features[0].max(axis=0))
    weights = save({name: tensor.contiguous() for name, tensor in network.state_dict().items()})
    result = SeedResult(won=won, job=judged.course.job, lowest=lowest, highest=highest, weights=weights)
    write_result(files, recipe, result)
    generations.remove()


def train(
    recipe: Recipe,
    run: RunDirectory,
    tracker: Tracker,
    reporter: Reporter,
    *,
    processes: int | None = None,
    cluster: ClusterOptions | None = None,
) -> dict[str, Any]:
    """Train every unfinished seed, and write the policy of the best seed.

    Args:
        recipe: the training recipe.
        run: the run directory; an interrupted training in it is resumed.
        tracker: logs progress.
        reporter: shows progress.
        processes: number of parallel seeds; ``None`` for the number of cores, or of places in the cluster.
        cluster: cluster that trains the seeds; ``None`` for this machine.

    Returns:
        The document that ``train --json`` prints.

    Raises:
        InputError: if the cluster does not answer.
        AutotuneError: if the process of a seed ended without a result, or all machines of the cluster were lost.
    """
    began = time.perf_counter()
    seeds = [SeedFiles(folder=run.path, seed=seed) for seed in recipe.seeds]
    tracker.params({"recipe_sha256": recipe.sha256, "strengths_sha256": recipe.strengths_sha256})
    reporter.stage(f"train {len(seeds)} seeds", recipe.ppo.decisions * len(seeds))
    waiting = []
    for files in seeds:
        if finished(files, recipe) is None:
            waiting.append(files)
        else:
            files.keep_rows()
    running: dict[int, SeedProcess] = {}
    keys = {files.seed: tracker.begin(f"seed {files.seed}") for files in seeds}
    logged = dict.fromkeys(keys, 0)
    places = LocalSeeds(train_seed, processes) if cluster is None else ClusterSeeds(train_seed, cluster, processes)
    try:
        while waiting or running:
            while waiting and len(running) < places.at_once:
                files = waiting.pop(0)
                # Damaged files are reported here, since the seed's process may run on another machine.
                taken_up(files, recipe)
                running[files.seed] = places.begin(recipe.to_json(), files.seed, run.path)
            time.sleep(_POLL_S)
            waiting += _ended(running, run)
            _log(seeds, tracker, keys, logged, reporter, recipe.ppo.decisions)
    finally:
        for process in running.values():
            process.terminate()
            process.join()
        places.close()
    _log(seeds, tracker, keys, logged, reporter, recipe.ppo.decisions)
    for key in keys.values():
        tracker.end(key)
    return _finish(recipe, run, tracker, seeds, time.perf_counter() - began)


def _ended(running: dict[int, SeedProcess], run: RunDirectory) -> list[SeedFiles]:
    """Remove the processes that ended, and return the seeds whose machine was lost."""
    lost = []
    for seed, process in list(running.items()):
        files = SeedFiles(folder=run.path, seed=seed)
        try:
            code = process.exitcode
        except WorkerLostError as error:
            logger.warning("seed %d continues on another machine: %s", seed, error)
            del running[seed]
            lost.append(files)
            continue
        if code is None:
            continue
        del running[seed]
        if not files.result.is_file():
            raise AutotuneError(
                f"seed {seed} ended with exit code {code}; resume it: autotune train --resume {run.path}"
            )
    return lost


def _log(
    seeds: Sequence[SeedFiles],
    tracker: Tracker,
    keys: dict[int, str],
    logged: dict[int, int],
    reporter: Reporter,
    decisions: int,
) -> None:
    """Log and show the progress that the seeds wrote since the last call."""
    done, last = 0, 0.0
    for files in seeds:
        rows = files.rows()
        for row in rows[logged[files.seed] :]:
            tracker.metrics({"won_percent": row["won_percent"]}, step=row["decisions"], run=keys[files.seed])
        logged[files.seed] = len(rows)
        done += min(rows[-1]["decisions"], decisions) if rows else 0
        last = rows[-1]["won_percent"] if rows else last
    reporter.advance(done, f"{last:+.2f} % against the planner")


def _finish(
    recipe: Recipe, run: RunDirectory, tracker: Tracker, seeds: Sequence[SeedFiles], seconds: float
) -> dict[str, Any]:
    import torch

    from autotune.agents.planner_policy import Ranges
    from autotune.agents.policy_folder import LeverTraining, save_levers

    results = [read_result(files, recipe) for files in seeds]
    won = np.array([result.won for result in results])
    interval = clustered_mean_interval(won, results[0].job)
    best = int(won.mean(axis=1).argmax())
    network = results[best].network(recipe.ppo.width)
    training = LeverTraining(
        recipe_sha256=recipe.sha256,
        strengths_sha256=recipe.strengths_sha256,
        seed=recipe.seeds[best],
        seeds=len(seeds),
        decisions=recipe.ppo.decisions,
        won_percent=float(won.mean()),
        won_ci95=list(interval),
    )
    with torch.no_grad():
        parameters = sum(parameter.numel() for parameter in network.parameters())
    document = {
        "version": 1,
        "policy": str(run.path / POLICY),
        "seed": recipe.seeds[best],
        "won_percent": {str(files.seed): float(row.mean()) for files, row in zip(seeds, won, strict=True)},
        "won_percent_mean": float(won.mean()),
        "won_percent_ci95": list(interval),
        "decisions": recipe.ppo.decisions * len(seeds),
        "decisions_per_s": recipe.ppo.decisions * len(seeds) / seconds,
        "parameters": parameters,
        "training_s": seconds,
        "run": str(run.path),
    }
    ranges = Ranges(results[best].lowest, results[best].highest)
    save_levers(
        own_folder(run.path / POLICY), network, recipe.planner, ranges, training, card(recipe, training, document)
    )
    tracker.artifact(run.path / POLICY)
    tracker.artifact(run.write("trained.json", document))
    return document


def card(recipe: Recipe, training: Any, document: dict[str, Any]) -> str:
    """Return the text of a policy card."""
    seeds = ", ".join(f"{seed}: {value:+.2f} %" for seed, value in document["won_percent"].items())
    low, high = document["won_percent_ci95"]
    minutes = document["training_s"] / 60
    frac = recipe.jobs.all_storages_frac
    ladders = f"; {frac:.0%} of them offer all storages" if frac else ""
    return f"""# Policy

A network of {document["parameters"]:,} parameters that adjusts a planner while the conditions of a run change: the odds
of a dip of the memory, the margin for longer sequences and deeper dips, the value of a larger k, of 16-bit formats and
of unmeasured plans, and the threshold for switching. The planner makes the plans, and has a belief about dips of its
own; an untrained network does not adjust it.

| | |
|---|---|
| trained by | PPO, {training.decisions:,} windows for each of {training.seeds} seeds, in {minutes:.0f} minutes |
| trained on | {recipe.jobs.training} simulated jobs of {recipe.jobs.shallowest} to {recipe.jobs.deepest} blocks, \
{recipe.jobs.windows} windows each{ladders} |
| time saved against the planner, on {recipe.jobs.validation} other jobs | {document["won_percent_mean"]:+.2f} % \
(95 % interval over jobs and seeds {low:+.2f} to {high:+.2f}) |
| the seeds | {seeds}; seed {training.seed} is this one |
| recipe, SHA-256 | `{training.recipe_sha256}` |
| strengths of changing conditions, SHA-256 | `{training.strengths_sha256}` |

## When not to use it

- If the conditions of a run do not change, the planner alone is as good.
- If a feature of a run is outside the range of training, the planner acts alone and reports it.
- It was trained on simulated runs. The project's README has its few results on real runs.
"""
