"""Search for the best PPO settings of a recipe by many short trainings, evaluated in the same way as full ones.

A trial trains one seed in a separate process for a share of the recipe's decisions. Its score is the gain over the
planner on validation jobs; a full training selects its best seed by the same score. No trial is pruned: the gain in a
rollout comes from sampled actions on training jobs, predicts the score poorly, and would penalise settings that
explore. An interrupted search is resumed from its files.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from autotune.agents.optuna_search import Outcome, Proposal, RecipeStudy
from autotune.agents.recipe import Recipe
from autotune.agents.recipe_space import own_values, space_around, with_values
from autotune.campaign.policy_training import train_seed
from autotune.campaign.seed_files import SeedFiles, SeedResult, finished, own_folder, read_result, taken_up
from autotune.campaign.seed_processes import SeedProcess, begin_seed
from autotune.errors import AutotuneError, InputError
from autotune.io.files import write_atomic
from autotune.io.progress import Reporter
from autotune.records.run_directory import RunDirectory
from autotune.records.run_documents import SearchSettings
from autotune.records.tracking import Tracker
from autotune.stats import clustered_mean_interval

logger = logging.getLogger(__name__)

RECIPE_FILE, RESULT_FILE = "recipe.toml", "searched.json"
TRIALS = "trials"
_SHARE = 5
_POLL_S = 0.5


# Starts the training of a trial.
Begin = Callable[[Recipe, SeedFiles], SeedProcess]


def begin_process(recipe: Recipe, files: SeedFiles) -> SeedProcess:
    """Start the training of a seed in a separate process, which ends with this one."""
    return begin_seed(train_seed, recipe.to_json(), files.seed, files.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """An open search; see :func:`opened`.

    Attributes:
        recipe: the recipe whose settings are searched.
        settings: limits of the search.
        run: the run directory.
        study: proposals and their outcomes.
    """

    recipe: Recipe
    settings: SearchSettings
    run: RunDirectory
    study: RecipeStudy

    def files(self, proposal: Proposal) -> SeedFiles:
        """Return the files of a trial's training."""
        return SeedFiles(folder=self.run.path / TRIALS / f"{proposal.number:04d}", seed=self.recipe.seeds[0])

    def short(self, proposal: Proposal) -> Recipe:
        """Return the recipe of a trial: one seed, fewer decisions."""
        recipe = with_values(self.recipe, proposal.values)
        return replace(recipe, seeds=recipe.seeds[:1], ppo=replace(recipe.ppo, decisions=self.settings.decisions))

    def decisions(self, proposal: Proposal) -> int:
        """Return the number of decisions that a trial has made so far."""
        rows = self.files(proposal).rows()
        return min(rows[-1]["decisions"], self.settings.decisions) if rows else 0

    def result(self, proposal: Proposal) -> SeedResult | None:
        """Return the result of a trial; ``None`` if it has not finished, or its result was damaged."""
        return finished(self.files(proposal), self.short(proposal))


def share_of(recipe: Recipe) -> int:
    """Return the default number of decisions in a trial."""
    return max(recipe.ppo.decisions // _SHARE, 1)


@contextmanager
def opened(recipe: Recipe, settings: SearchSettings, run: RunDirectory) -> Iterator[Search]:
    """Open a new or an interrupted search, and close it at the end.

    Raises:
        InputError: if more trials have begun than the limit, or a setting of the recipe is outside the search space.
        RunDirectoryError: if the study in the run directory is damaged.
    """
    study = RecipeStudy(space_around(recipe.ppo), run.path, recipe.seeds[0], own_values(recipe.ppo))
    try:
        begun = len(study.proposals())
        if settings.trials < begun:
            raise InputError(
                f"is {settings.trials}, but {begun} trials have begun", where="--search", allowed=f"{begun} or more"
            )
        yield Search(recipe=recipe, settings=settings, run=run, study=study)
    finally:
        study.close()


def run_search(
    search: Search,
    tracker: Tracker,
    reporter: Reporter,
    *,
    processes: int | None = None,
    begin: Begin = begin_process,
) -> dict[str, Any]:
    """Train every trial without an outcome, and write the best recipe.

    Args:
        search: the search, new or interrupted.
        tracker: logs trials.
        reporter: shows progress.
        processes: number of parallel trials; ``None`` for the number of cores. With more than one, proposals depend on
            which trial ends first.
        begin: starts the training of a trial.

    Returns:
        The document that ``train --search --json`` prints.

    Raises:
        AutotuneError: if a trial was killed, or every trial failed.
    """
    began = time.perf_counter()
    settings = search.settings
    tracker.params({"recipe_sha256": search.recipe.sha256, "trials": settings.trials, "decisions": settings.decisions})
    reporter.stage(f"search {settings.trials} recipes", settings.trials * settings.decisions)
    for outcome in search.study.outcomes():
        _track(outcome, tracker)
    running: dict[int, tuple[Proposal, SeedProcess]] = {}
    try:
        for proposal in search.study.untold():
            running[proposal.number] = (proposal, _begin(search, proposal, begin))
        _train_all(search, running, tracker, reporter, processes or os.cpu_count() or 1, begin)
    finally:
        for _, training in running.values():
            training.terminate()
            training.join()
    return _finish(search, tracker, time.perf_counter() - began)


def _train_all(
    search: Search,
    running: dict[int, tuple[Proposal, SeedProcess]],
    tracker: Tracker,
    reporter: Reporter,
    at_once: int,
    begin: Begin,
) -> None:
    """Propose and train until the number of trials is reached; ``running`` has the trials that have not ended."""
    outcomes = search.study.outcomes()
    while running or len(outcomes) < search.settings.trials:
        while len(running) < min(at_once, search.settings.trials - len(outcomes)):
            proposal = search.study.ask()
            running[proposal.number] = (proposal, _begin(search, proposal, begin))
        ended = [number for number, (_, training) in running.items() if training.exitcode is not None]
        for number in ended:
            outcomes.append(_tell(search, *running.pop(number)))
            _track(outcomes[-1], tracker)
        _report(search, outcomes, [proposal for proposal, _ in running.values()], reporter)
        if not ended:
            time.sleep(_POLL_S)


class _Done:
    """A training that finished before an interruption, without its outcome being recorded."""

    exitcode = 0

    def terminate(self) -> None:
        """Do nothing."""

    def join(self) -> None:
        """Do nothing."""


def _begin(search: Search, proposal: Proposal, begin: Begin) -> SeedProcess:
    files, recipe = search.files(proposal), search.short(proposal)
    if search.result(proposal) is not None:
        return _Done()
    own_folder(files.folder.parent)
    own_folder(files.folder)
    taken_up(files, recipe)
    return begin(recipe, files)


def _tell(search: Search, proposal: Proposal, training: SeedProcess) -> Outcome:
    """Record the outcome of a training that has ended; a training without a result is a failed trial."""
    code = training.exitcode
    if code is not None and code < 0:
        raise AutotuneError(
            f"trial {proposal.number} was killed (exit code {code}); resume the search: "
            f"autotune train --search {search.settings.trials} --resume {search.run.path}"
        )
    result = search.result(proposal)
    gain = None if result is None else float(result.won.mean())
    search.study.tell(proposal, gain)
    return Outcome(proposal=proposal, gain=gain)


def _track(outcome: Outcome, tracker: Tracker) -> None:
    key = tracker.begin(f"trial {outcome.proposal.number}")
    tracker.params({**outcome.proposal.values, "own": outcome.proposal.own}, run=key)
    tracker.metrics({"gain_percent": outcome.gain}, run=key)
    tracker.end(key, failed=outcome.gain is None)


def _report(search: Search, outcomes: list[Outcome], running: list[Proposal], reporter: Reporter) -> None:
    done = len(outcomes) * search.settings.decisions + sum(search.decisions(proposal) for proposal in running)
    gains = [outcome.gain for outcome in outcomes if outcome.gain is not None]
    reporter.advance(done, f"best {max(gains):+.2f} % against the planner" if gains else "")


def best_first(outcomes: list[Outcome]) -> list[Outcome]:
    """Return outcomes in order of falling gain; on a tie the recipe's own settings first, failed trials last."""
    return sorted(
        outcomes,
        key=lambda outcome: (
            outcome.gain is None,
            -(outcome.gain or 0.0),
            not outcome.proposal.own,
            outcome.proposal.number,
        ),
    )


def _finish(search: Search, tracker: Tracker, seconds: float) -> dict[str, Any]:
    ranked = best_first(search.study.outcomes())
    best = ranked[0]
    if best.gain is None:
        raise AutotuneError(f"all {len(ranked)} trials failed; their errors are on stderr")
    recipe = with_values(search.recipe, best.proposal.values)
    path = search.run.path / RECIPE_FILE
    write_atomic(path, _heading(search, best) + recipe.to_toml())
    document = {
        "version": 1,
        "recipe": str(path),
        "best": best.proposal.number,
        "gain_percent": best.gain,
        "own_remains_best": best.proposal.own,
        "ahead_of_own": _ahead(search, ranked),
        "trials": [_row(outcome) for outcome in ranked],
        "decisions": search.settings.decisions,
        "seed": search.recipe.seeds[0],
        "search_s": seconds,
        "run": str(search.run.path),
    }
    tracker.metrics({"gain_percent": best.gain})
    tracker.tags({"best": best.proposal.number, "own_remains_best": best.proposal.own})
    tracker.artifact(path)
    tracker.artifact(search.run.write(RESULT_FILE, document))
    return document


def _heading(search: Search, best: Outcome) -> str:
    what = "the recipe's own settings remain the best" if best.proposal.own else f"trial {best.proposal.number}"
    settings = search.settings
    return (
        f"# Found by autotune train --search {settings.trials}: {what}, {best.gain:+.2f} % against the planner\n"
        f"# on validation jobs, after {settings.decisions:,} decisions of seed {search.recipe.seeds[0]}.\n"
    )


def _row(outcome: Outcome) -> dict[str, Any]:
    proposal = outcome.proposal
    return {
        "number": proposal.number,
        "own": proposal.own,
        "gain_percent": outcome.gain,
        "values": dict(proposal.values),
    }


def _ahead(search: Search, ranked: list[Outcome]) -> dict[str, Any] | None:
    """Return the lead of the best trial over the recipe's own settings on the same runs; ``None`` if it is unknown.

    The interval covers only jobs: one seed says nothing about others, and the best of many trials is overestimated.
    """
    own = next((outcome for outcome in ranked if outcome.proposal.own and outcome.gain is not None), None)
    if own is None:
        return None
    try:
        best, reference = (
            read_result(search.files(one), search.short(one)) for one in (ranked[0].proposal, own.proposal)
        )
    except InputError as error:
        # The recorded gains of the two trials remain valid.
        logger.warning("%s: %s; the lead of the best trial is unknown", error.where, error.problem)
        return None
    ahead = best.won - reference.won
    return {"percent": float(ahead.mean()), "percent_ci95": list(clustered_mean_interval(ahead[None], best.job))}
