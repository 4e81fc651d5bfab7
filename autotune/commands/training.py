"""Training of policies on simulated jobs or on a real job, and search for training recipes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
from autotune.records.run_documents import SearchSettings, TrainConfig
from autotune.records.tracking import Tracker, send_pending
from autotune.report_to import chosen

if TYPE_CHECKING:
    from autotune.agents.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """Options of a training on simulated jobs, or of a search for its recipe.

    Attributes:
        recipe: a recipe file; a search tries its own settings first. ``None`` for the defaults, or for the recipe of
            ``resume``.
        resume: run directory of an interrupted training or search; ``None`` for a new one.
        processes: number of seeds or trials trained in parallel; ``None`` for one per core, or per worker of the
            cluster.
        cluster: a Ray cluster that trains the seeds; ``None`` for this machine.
        trials: number of short trainings in a search, including those of ``resume``; ``None`` for a training.
        decisions: number of decisions in each trial; ``None`` for a fifth of the recipe's, or for the number of
            ``resume``.

    Raises:
        InputError: if two options contradict each other.
    """

    recipe: Path | None = None
    resume: Path | None = None
    processes: int | None = None
    cluster: ClusterOptions | None = None
    trials: int | None = None
    decisions: int | None = None

    def __post_init__(self) -> None:
        if self.decisions is not None and self.trials is None:
            raise InputError("--search-decisions requires --search")
        if self.cluster is not None and self.trials is not None:
            raise InputError("--cluster cannot be combined with --search: it trains seeds on simulated jobs")
        if self.recipe is not None and self.resume is not None:
            raise InputError("--recipe cannot be combined with --resume, which uses the recipe of the run")


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuneRequest:
    """Options of further training on a real job.

    Attributes:
        job: the job, or its reference.
        policy: the policy folder to start from; ``None`` for the shipped policy.
        memory_budget: as for :func:`autotune.tune`.
        windows: number of windows of the job to train on.
        seed: random seed for training.
    """

    job: str | Job
    policy: Path | None = None
    memory_budget: str | None = None
    windows: int = 96
    seed: int = 0


def train(request: TrainRequest, *, runs_dir: str | Path = "runs", reporter: Reporter | None = None) -> dict[str, Any]:
    """Train the policy that adjusts the planner with PPO on simulated jobs, or search for the best recipe with Optuna.

    Args:
        request: the options.
        runs_dir: folder in which the run directory is made.
        reporter: shows progress; ``None`` shows nothing.

    Returns:
        The document that ``autotune train --json`` prints, or ``autotune train --search --json`` for a search.

    Raises:
        InputError: for wrong input, before anything is written.
        AutotuneError: if a seed or a trial was killed, or every trial failed.
    """
    from autotune.campaign import policy_training, recipe_search

    chosen()
    shows, processes = reporter or Silent(), request.processes
    opened = _begun(request, Path(runs_dir)) if request.resume is None else _resumed(request, request.resume)
    recipe, settings, run = opened
    if settings is None:
        with run:
            tracker = Tracker(run.path.parent, run.path, "train")
            document = policy_training.train(recipe, run, tracker, shows, processes=processes, cluster=request.cluster)
            tracker.close()
        return document
    with run, recipe_search.opened(recipe, settings, run) as search:
        send_pending(run.path.parent)
        tracker = Tracker(run.path.parent, run.path, "train search")
        document = recipe_search.run_search(search, tracker, shows, processes=processes)
        tracker.close()
    return document


def _begun(request: TrainRequest, runs: Path) -> tuple[Recipe, SearchSettings | None, RunDirectory]:
    """Check the recipe and the limits of a search, and make the run directory."""
    from autotune.agents.recipe import Recipe, read_recipe
    from autotune.agents.recipe_space import space_around
    from autotune.campaign.recipe_search import share_of

    recipe = Recipe() if request.recipe is None else read_recipe(request.recipe)
    settings = None
    if request.trials is not None:
        decisions = share_of(recipe) if request.decisions is None else request.decisions
        settings = SearchSettings(trials=request.trials, decisions=decisions)
        space_around(recipe.ppo)
    require_writable(runs)
    config = {"recipe": recipe.to_json(), **({} if settings is None else {"search": asdict(settings)})}
    called = "simulated" if settings is None else "search"
    return recipe, settings, RunDirectory.create(runs, "train", called, config)


def _resumed(request: TrainRequest, resume: Path) -> tuple[Recipe, SearchSettings | None, RunDirectory]:
    """Return the recipe and the limits of an interrupted training or search, and its locked run directory."""
    from autotune.agents.recipe import recipe_of

    config = RunDirectory.open(resume).config
    if not isinstance(config, TrainConfig):
        raise RunDirectoryError("has no training", where=str(resume), allowed="the run directory of a training")
    if (request.trials is None) is not (config.search is None):
        problem, other = "is not a search", "without --search"
        if request.trials is None:
            problem, other = "is a search", "with --search N"
        raise RunDirectoryError(problem, where=str(resume), allowed=f"autotune train --resume {other}")
    settings = None
    if config.search is not None and request.trials is not None:
        decisions = config.search.decisions
        if request.decisions not in (None, decisions):
            allowed = f"{decisions}, as at its start"
            raise InputError(f"is {request.decisions}", where="--search-decisions", allowed=allowed)
        settings = SearchSettings(trials=request.trials, decisions=decisions)
    recipe = recipe_of(config.recipe, where=str(resume / "config.json"))
    return recipe, settings, RunDirectory.take_up(resume)


def fine_tune(
    request: FineTuneRequest, *, runs_dir: str | Path = "runs", reporter: Reporter | None = None
) -> dict[str, Any]:
    """Continue training a policy on one real job; the better of the old and the new policy is kept.

    Args:
        request: the options.
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

    job, budget, seed = load_job(request.job), request.memory_budget, request.seed
    runs, shows = Path(runs_dir), reporter or Silent()
    folder = content_folder("policies") / "ppo" if request.policy is None else request.policy
    load_policy(folder)
    chosen()
    if budget is not None:
        MemoryBudget.parse(budget)
    require_writable(runs)
    shows.stage("profile the units, once", 1)
    profile, _, _ = cached_profile(job, runs, on_progress=shows.advance)
    config = {"policy": str(folder), "memory_budget": budget, "seed": seed}
    with RunDirectory.create(runs, "train", job, config) as run:
        tracker = Tracker(runs, run.path, f"train {job.name}")
        recipe = FineTuning(windows=request.windows)
        document = fine_tuning.go_on(job, folder, profile, budget, recipe, run, tracker, shows, seed=seed)
        tracker.close()
    return document
