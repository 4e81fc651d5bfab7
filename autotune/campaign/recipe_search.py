"""Search for the values that a recipe trains best with: many short trainings, judged as full ones are.

A trial trains one seed, in a process of its own, for a share of the recipe's decisions. What it gains over the planner
on validation jobs, the figure that a full training picks its best seed by, is what the search is told. No trial is cut
short: what a rollout reports is won by sampled actions on training jobs, which says little of that figure and would
punish values that explore. A search that is interrupted, at whatever point, is taken up where its files end.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from autotune.agents.optuna_search import Outcome, Proposal, RecipeStudy
from autotune.agents.recipe import Recipe
from autotune.agents.recipe_space import own_values, space_around, with_values
from autotune.campaign.policy_training import train_seed
from autotune.campaign.seed_files import SeedFiles, SeedResult, finished, own_folder, read_result, taken_up
from autotune.campaign.seed_processes import begin_seed
from autotune.errors import AutotuneError, InputError
from autotune.io.files import write_atomic
from autotune.io.progress import Reporter
from autotune.records.run_directory import RunDirectory
from autotune.records.tracking import Tracker
from autotune.stats import clustered_mean_interval

logger = logging.getLogger(__name__)

RECIPE_FILE, RESULT_FILE = "recipe.toml", "searched.json"
TRIALS = "trials"
_SHARE = 5
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """How much a search may spend.

    Attributes:
        trials: how many, those of earlier, interrupted commands included; failed ones count.
        decisions: that each trial trains on.

    Raises:
        InputError: if there are none.
    """

    trials: int
    decisions: int

    def __post_init__(self) -> None:
        for option, value in (("--search", self.trials), ("--search-decisions", self.decisions)):
            if value < 1:
                raise InputError(f"is {value}", where=option, allowed="at least 1")


class Training(Protocol):
    """One trial's training, while it runs and after; a process is one."""

    @property
    def exitcode(self) -> int | None:
        """Return ``None`` while it runs, then 0, or what else it ended with; below 0 if it was killed."""
        ...

    def terminate(self) -> None:
        """End it."""
        ...

    def join(self) -> None:
        """Wait until it has ended."""
        ...


Begin = Callable[[Recipe, SeedFiles], Training]


def begin_process(recipe: Recipe, files: SeedFiles) -> Training:
    """Begin to train a seed in a process of its own, which ends with this one."""
    return begin_seed(train_seed, recipe.to_json(), files.seed, files.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search that is begun; see :func:`opened`.

    Attributes:
        recipe: whose values are searched.
        settings: how much is searched.
        run: the run directory.
        study: what was proposed and told.
    """

    recipe: Recipe
    settings: SearchSettings
    run: RunDirectory
    study: RecipeStudy

    def files(self, proposal: Proposal) -> SeedFiles:
        """Return the files of a trial's training."""
        return SeedFiles(folder=self.run.path / TRIALS / f"{proposal.number:04d}", seed=self.recipe.seeds[0])

    def short(self, proposal: Proposal) -> Recipe:
        """Return the recipe that a trial trains by: one seed, fewer decisions."""
        recipe = with_values(self.recipe, proposal.values)
        return replace(recipe, seeds=recipe.seeds[:1], ppo=replace(recipe.ppo, decisions=self.settings.decisions))

    def decisions(self, proposal: Proposal) -> int:
        """Return how many decisions a trial has made so far."""
        rows = self.files(proposal).rows()
        return min(rows[-1]["decisions"], self.settings.decisions) if rows else 0

    def result(self, proposal: Proposal) -> SeedResult | None:
        """Return what a trial's training came to, or ``None`` where it has not ended, or its result was damaged."""
        return finished(self.files(proposal), self.short(proposal))


def share_of(recipe: Recipe) -> int:
    """Return the decisions of a trial where nobody says otherwise."""
    return max(recipe.ppo.decisions // _SHARE, 1)


@contextmanager
def opened(recipe: Recipe, settings: SearchSettings, run: RunDirectory) -> Iterator[Search]:
    """Open a search, one that an interruption left or a new one, and close it at the end.

    Raises:
        InputError: if more trials have begun than there shall be, or an own value cannot be searched.
        RunDirectoryError: if the folder's study is damaged.
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
    """Train every trial that is not told of yet, and write the best recipe.

    Args:
        search: the search; one that an interruption left is taken up.
        tracker: where trials are logged.
        reporter: shows progress.
        processes: trials at once; ``None`` takes the number of cores. With more than one, what is proposed depends on
            which ends first.
        begin: begins to train a trial.

    Returns:
        What ``train --search --json`` prints.

    Raises:
        AutotuneError: if a trial was killed, or every trial failed.
    """
    began = time.perf_counter()
    settings = search.settings
    tracker.params({"recipe_sha256": search.recipe.sha256, "trials": settings.trials, "decisions": settings.decisions})
    reporter.stage(f"search {settings.trials} recipes", settings.trials * settings.decisions)
    for outcome in search.study.outcomes():
        _track(outcome, tracker)
    running: dict[int, tuple[Proposal, Training]] = {}
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
    running: dict[int, tuple[Proposal, Training]],
    tracker: Tracker,
    reporter: Reporter,
    at_once: int,
    begin: Begin,
) -> None:
    """Ask and tell until there are as many trials as there shall be; ``running`` holds those that have not ended."""
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
    """A training that an earlier command finished but could not report."""

    exitcode = 0

    def terminate(self) -> None:
        """Do nothing."""

    def join(self) -> None:
        """Do nothing."""


def _begin(search: Search, proposal: Proposal, begin: Begin) -> Training:
    files, recipe = search.files(proposal), search.short(proposal)
    if search.result(proposal) is not None:
        return _Done()
    own_folder(files.folder.parent)
    own_folder(files.folder)
    taken_up(files, recipe)
    return begin(recipe, files)


def _tell(search: Search, proposal: Proposal, training: Training) -> Outcome:
    """Tell the study what a training that has ended gained; one that raised has failed, its values with it."""
    code = training.exitcode
    if code is not None and code < 0:
        raise AutotuneError(
            f"trial {proposal.number} was killed (exit code {code}); take the search up again: "
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
    """Return outcomes by what they gained, the recipe's own before its equals, failed ones last."""
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
        raise AutotuneError(f"no trial of {len(ranked)} ended well; what they met is on stderr")
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
    what = "the recipe's own values remain the best" if best.proposal.own else f"trial {best.proposal.number}"
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
    """Return by how much the best is ahead of the recipe's own values on the same runs; ``None`` if that is not known.

    The interval is over jobs alone: one seed says nothing of others, and the best of many looks better than it is.
    """
    own = next((outcome for outcome in ranked if outcome.proposal.own and outcome.gain is not None), None)
    if own is None:
        return None
    try:
        best, reference = (
            read_result(search.files(one), search.short(one)) for one in (ranked[0].proposal, own.proposal)
        )
    except InputError as error:
        # What the two gained was told, and stands.
        logger.warning("%s: %s; by how much the best is ahead is not known", error.where, error.problem)
        return None
    ahead = best.won - reference.won
    return {"percent": float(ahead.mean()), "percent_ci95": list(clustered_mean_interval(ahead[None], best.job))}
