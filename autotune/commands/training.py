"""Train policies on simulated jobs or on a real job, and search for training recipes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.budget import MemoryBudget
from autotune.catalog import content_folder, load_job
from autotune.engines.ray_cluster import ClusterOptions
from autotune.errors import InputError, RunDirectoryError
from autotune.io.progress import Reporter, Silent
from autotune.job import Job
from autotune.profiling.profile_cache import cached_profile
from autotune.records.run_directory import RunDirectory, require_writable
from autotune.records.run_documents import TrainConfig
from autotune.records.tracking import Tracker, send_pending

if TYPE_CHECKING:
    from autotune.agents.recipe import Recipe


def train(
    recipe: str | Path | None = None,
    *,
    resume: str | Path | None = None,
    processes: int | None = None,
    cluster: ClusterOptions | None = None,
    runs_dir: str | Path = "runs",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Train the policy that adjusts the planner, by PPO on simulated jobs.

    Args:
        recipe: a recipe file; ``None`` for the defaults, or for the recipe of ``resume``.
        resume: the run directory of an interrupted training.
        processes: number of seeds trained in parallel; ``None`` for one per core, or per worker of the cluster.
        cluster: a Ray cluster that trains the seeds; ``None`` for this machine.
        runs_dir: folder in which the run directory is made.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that ``autotune train --json`` prints.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    from autotune.campaign import policy_training

    if resume is not None:
        found, run, _ = _taken_up(recipe, resume, searched=False)
    else:
        found = _recipe(recipe)
        require_writable(Path(runs_dir))
        run = RunDirectory.create(Path(runs_dir), "train", "simulated", {"recipe": found.to_json()})
    with run:
        tracker = Tracker(run.path.parent, run.path, "train")
        document = policy_training.train(
            found, run, tracker, reporter or Silent(), processes=processes, cluster=cluster
        )
        tracker.close()
    return document


def search_recipe(
    recipe: str | Path | None = None,
    *,
    trials: int = 20,
    decisions: int | None = None,
    resume: str | Path | None = None,
    processes: int | None = None,
    runs_dir: str | Path = "runs",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Search for the best PPO settings of a recipe, by Optuna over short trainings.

    Args:
        recipe: a recipe file, whose own values are tried first; ``None`` for the defaults, or for the recipe of
            ``resume``.
        trials: number of short trainings, including those of ``resume``.
        decisions: number of decisions in each training; ``None`` for a fifth of the recipe's, or for the number of
            ``resume``.
        resume: the run directory of an interrupted search.
        processes: number of trials trained in parallel; ``None`` for one per core.
        runs_dir: folder in which the run directory is made.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that ``autotune train --search --json`` prints.

    Raises:
        InputError: for wrong input, before anything is written.
        AutotuneError: if a trial was killed, or every trial failed.
    """
    from autotune.agents.recipe_space import space_around
    from autotune.campaign import recipe_search

    if resume is not None:
        found, run, begun = _taken_up(recipe, resume, searched=True)
        if decisions not in (None, begun):
            run.close()
            raise InputError(f"is {decisions}", where="--search-decisions", allowed=f"{begun}, as at its start")
        settings = recipe_search.SearchSettings(trials=trials, decisions=begun)
    else:
        found = _recipe(recipe)
        each = recipe_search.share_of(found) if decisions is None else decisions
        settings = recipe_search.SearchSettings(trials=trials, decisions=each)
        space_around(found.ppo)
        require_writable(Path(runs_dir))
        config = {"recipe": found.to_json(), "search": {"trials": trials, "decisions": each}}
        run = RunDirectory.create(Path(runs_dir), "train", "search", config)
    with run, recipe_search.opened(found, settings, run) as search:
        send_pending(run.path.parent)
        tracker = Tracker(run.path.parent, run.path, "train search")
        document = recipe_search.run_search(search, tracker, reporter or Silent(), processes=processes)
        tracker.close()
    return document


def _recipe(path: str | Path | None) -> Recipe:
    from autotune.agents.recipe import Recipe, read_recipe

    return Recipe() if path is None else read_recipe(Path(path))


def _taken_up(recipe: str | Path | None, resume: str | Path, *, searched: bool) -> tuple[Recipe, RunDirectory, int]:
    """Return the recipe of an interrupted training, its locked run, and a search's decisions per trial (else 0)."""
    from autotune.agents.recipe import recipe_of

    if recipe is not None:
        raise InputError("--recipe cannot be combined with --resume, which uses the recipe of the run")
    where = Path(resume) / "config.json"
    config = RunDirectory.open(Path(resume)).config
    if not isinstance(config, TrainConfig):
        raise RunDirectoryError("holds no training", where=str(resume), allowed="the run directory of a training")
    if searched is (config.search is None):
        kind, other = ("no search", "without --search") if searched else ("a search", "with --search N")
        raise RunDirectoryError(f"holds {kind}", where=str(resume), allowed=f"autotune train --resume {other}")
    decisions = 0 if config.search is None else config.search.decisions
    return recipe_of(config.recipe, where=str(where)), RunDirectory.take_up(Path(resume)), decisions


def fine_tune(
    job: str | Job,
    policy: str | Path | None = None,
    *,
    memory_budget: str | None = None,
    windows: int = 96,
    seed: int = 0,
    runs_dir: str | Path = "runs",
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Continue training a policy on one real job; the better of the old and the new policy is kept.

    Args:
        job: the job, or its reference.
        policy: the policy folder to start from; ``None`` for the shipped policy.
        memory_budget: as for :func:`tune`.
        windows: number of windows of the job to train on.
        seed: random seed for training.
        runs_dir: folder in which the run directory is made.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that ``autotune train JOB --json`` prints.

    Raises:
        InputError: for wrong input, before anything is written.
    """
    from autotune.agents.policy_folder import load_policy
    from autotune.agents.ppo import FineTuning
    from autotune.campaign import fine_tuning

    found, runs, shows = load_job(job), Path(runs_dir), reporter or Silent()
    folder = content_folder("policies") / "ppo" if policy is None else Path(policy)
    load_policy(folder)
    if memory_budget is not None:
        MemoryBudget.parse(memory_budget)
    require_writable(runs)
    shows.stage("profile the units, once", 1)
    profile, _, _ = cached_profile(found, runs, on_progress=shows.advance)
    config = {"policy": str(folder), "memory_budget": memory_budget, "seed": seed}
    with RunDirectory.create(runs, "train", found, config) as run:
        tracker = Tracker(runs, run.path, f"train {found.name}")
        recipe = FineTuning(windows=windows)
        document = fine_tuning.go_on(found, folder, profile, memory_budget, recipe, run, tracker, shows, seed=seed)
        tracker.close()
    return document
