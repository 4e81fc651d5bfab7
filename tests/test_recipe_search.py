"""Tests of searching for a recipe: short trainings, the recipe's own values first, and resumption."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import optuna
import pytest
from rich.console import Console
from safetensors.torch import save
from test_tracking import runs_in
from test_train import Told, put, recipe_file, wait_until

import autotune.commands
from autotune.agents.optuna_search import Outcome, Proposal, RecipeStudy
from autotune.agents.recipe import JobsRecipe, LeverRecipe, Recipe, read_recipe, recipe_of
from autotune.agents.recipe_space import PPO_SPACE, Choice, Range, own_values, space_around, with_values
from autotune.agents.shipped_network import LeverNetwork
from autotune.campaign.policy_training import train_seed
from autotune.campaign.recipe_search import (
    Search,
    best_first,
    opened,
    run_search,
    share_of,
)
from autotune.campaign.seed_files import VALIDATION_LANES, SeedFiles, SeedResult, write_result
from autotune.cli.main import run
from autotune.commands.training import TrainRequest
from autotune.errors import AutotuneError, InputError, RunDirectoryError
from autotune.gym.levers import RUN_FEATURES
from autotune.records.run_directory import RunDirectory
from autotune.records.run_documents import SearchSettings
from autotune.records.to_mlflow import tracking_uri
from autotune.records.tracking import Tracker
from autotune.report.terminal_tables import search_table, search_verdict
from autotune.simulator.moving_conditions import Strengths

RECIPE = """version = 1
seeds = [4, 9]
[jobs]
training = 2
validation = 3
shallowest = 2
deepest = 2
windows = 4
[strengths]
length = 0.2
jitter = 0.1
switch_windows = 0.1
[ppo]
decisions = 160
lanes = 4
batch = 8
epochs = 2
learning_rate = 0.1
width = 8
"""
TINY = Recipe(
    seeds=(4, 9),
    jobs=JobsRecipe(training=2, validation=2, shallowest=2, deepest=2, windows=2),
    ppo=LeverRecipe(decisions=40, lanes=2, batch=4, epochs=2, learning_rate=0.1, width=8),
    strengths=Strengths(length=0.2, jitter=0.1),
)
PARAMETERS = set(PPO_SPACE)


class Here:
    """A training process that has already ended."""

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode

    def terminate(self) -> None:
        pass

    def join(self) -> None:
        pass


def train_here(recipe: Recipe, files: SeedFiles) -> Here:
    """Train in this process, because a separate process takes seconds to start."""
    train_seed(recipe.to_json(), files.seed, str(files.folder), os.getppid())
    return Here(0)


def pretend(recipe: Recipe, files: SeedFiles) -> Here:
    """Write the files of a training at once; a narrower clip range gains more."""
    job, features = np.arange(VALIDATION_LANES) % recipe.jobs.validation, np.zeros(len(RUN_FEATURES))
    won = np.where(job == 0, 1.0, 1.5) - recipe.ppo.clip
    weights = save(LeverNetwork(recipe.ppo.width).state_dict())
    result = SeedResult(won=won, job=job, lowest=features, highest=features, weights=weights)
    write_result(files, recipe, result)
    return Here(0)


class Untracked:
    """A tracker that records logged values without sending them."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.failed: list[str] = []

    def begin(self, name: str) -> str:
        self.begun.append(name)
        return name

    def end(self, run: str, *, failed: bool = False) -> None:
        self.failed += [run] if failed else []

    def params(self, values: object, run: str | None = None) -> None: ...
    def metrics(self, values: object, run: str | None = None) -> None: ...
    def tags(self, values: object) -> None: ...
    def artifact(self, path: Path) -> None: ...


@pytest.fixture(autouse=True, scope="module")
def _looks_often() -> Iterator[None]:
    """Let trainings that end soon be noticed soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.campaign.recipe_search._POLL_S", 0.05)
        yield


def folder_of(path: Path, recipe: Recipe = TINY) -> RunDirectory:
    path.mkdir(exist_ok=True)
    put(path, {"version": 1, "recipe": recipe.to_json(), "search": {"trials": 4, "decisions": 8}})
    return RunDirectory(path)


def searched(run_folder: RunDirectory, trials: int, begin: Callable = pretend, tracker: object = None) -> dict:
    settings = SearchSettings(trials=trials, decisions=8)
    with opened(TINY, settings, run_folder) as search:
        return run_search(search, tracker or Untracked(), Told(), processes=1, begin=begin)  # type: ignore[arg-type]


def told(run_folder: Path) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name="recipe", storage=f"sqlite:///{run_folder}/optuna.db").trials


# ------------------------------------------------------------------------------------------------------- a real search


class Searched:
    """A finished search: one trial as a user begins it, and another after resuming."""

    def __init__(self, runs: Path) -> None:
        self.runs, self.told = runs, Told()
        self.recipe = read_recipe(recipe_file(runs, RECIPE))
        self.first = autotune.commands.train(
            TrainRequest(recipe=runs / "recipe.toml", trials=1, processes=1), runs_dir=runs
        )
        self.run = Path(self.first["run"])
        tracker = Tracker(runs, self.run, "taken up")
        with opened(self.recipe, SearchSettings(trials=2, decisions=32), RunDirectory(self.run)) as search:
            self.document = run_search(search, tracker, self.told, processes=1, begin=train_here)
        tracker.close()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    return Searched(tmp_path_factory.mktemp("runs"))


def test_recipe_values_are_tried_first_and_every_trial_is_a_short_training(found: Searched) -> None:
    trials = told(found.run)
    assert [trial.number for trial in trials] == [0, 1]
    assert trials[0].params == own_values(found.recipe.ppo)
    assert trials[1].params != trials[0].params
    assert found.first["decisions"] == found.document["decisions"] == 160 // 5
    assert found.first["own_remains_best"]
    for trial in trials:
        files = SeedFiles(folder=found.run / "trials" / f"{trial.number:04d}", seed=4)
        rows = [json.loads(row) for row in files.progress.read_text().splitlines()]
        assert [row["decisions"] for row in rows] == [16, 32]
        # The value that selects the best seed of a full training.
        assert trial.value == pytest.approx(np.mean(json.loads(files.result.read_text())["won_percent"]))


def test_best_recipe_is_complete_and_has_the_values_of_the_best_trial(found: Searched) -> None:
    best = max(told(found.run), key=lambda trial: trial.value or 0.0)
    assert found.document["best"] == best.number
    recipe = read_recipe(found.run / "recipe.toml")
    assert found.document["recipe"] == str(found.run / "recipe.toml")
    assert own_values(recipe.ppo) == best.params
    assert recipe == with_values(found.recipe, best.params)
    assert (recipe.seeds, recipe.ppo.decisions) == ((4, 9), 160)


def test_document_ranks_the_trials(found: Searched) -> None:
    document = found.document
    assert json.loads((found.run / "searched.json").read_text()) == document
    gains = [row["gain_percent"] for row in document["trials"]]
    assert gains == sorted(gains, reverse=True)
    assert document["gain_percent"] == gains[0]
    assert {row["number"]: row["own"] for row in document["trials"]} == {0: True, 1: False}
    assert document["own_remains_best"] == (document["best"] == 0)
    assert document["ahead_of_own"]["percent"] == pytest.approx(
        gains[0] - next(row["gain_percent"] for row in document["trials"] if row["own"])
    )
    assert found.told.stages == [("search 2 recipes", 64)]
    assert found.told.done[-1] == 64
    assert found.told.done == sorted(found.told.done)


def test_mlflow_has_a_run_per_trial_with_its_values_and_gain(found: Searched) -> None:
    logged = {run.info.run_name: run for run in runs_in(tracking_uri(found.runs))}
    assert set(logged) == {"train search", "taken up", "trial 0", "trial 1"}
    for trial in told(found.run):
        child = logged[f"trial {trial.number}"]
        parents = {logged[name].info.run_id for name in ("train search", "taken up")}
        assert child.data.tags["mlflow.parentRunId"] in parents
        assert child.data.metrics == {"gain_percent": pytest.approx(trial.value)}
        values = {name: str(value) for name, value in trial.params.items()}
        assert child.data.params == {**values, "own": str(trial.number == 0)}
        assert child.info.status == "FINISHED"
    names = {path.name for path in (found.runs / "artifacts").rglob("*")}
    assert {"recipe.toml", "searched.json"} <= names


def test_finished_search_is_resumed_without_training_again(found: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in (found.run / "trials").rglob("*")}
    assert run(["train", "--search", "2", "--resume", str(found.run), "--json"]) == 0
    captured = capsys.readouterr()
    again = json.loads(captured.out)
    assert {**again, "search_s": 0.0} == {**found.document, "search_s": 0.0}
    assert run(["train", "--search", "2", "--resume", str(found.run)]) == 0
    shown = capsys.readouterr().out
    assert "0 own" in shown
    assert ("own values remain the best" in shown) == found.document["own_remains_best"]
    assert {path: path.stat().st_mtime_ns for path in (found.run / "trials").rglob("*")} == before


# ------------------------------------------------------------------------------------------------------- interruptions


class Stopped(KeyboardInterrupt):
    """An interrupt, as by the user's Ctrl-C."""


def stopping_at(trial: int, begin: Callable, *, after_training: bool) -> Callable:
    """Return a training function that is interrupted at a given trial."""

    def begin_or_stop(recipe: Recipe, files: SeedFiles) -> Here:
        if files.folder.name == f"{trial:04d}":
            if after_training:
                begin(recipe, files)
            raise Stopped
        return begin(recipe, files)

    return begin_or_stop


def assert_ends_as_one_that_was_not_stopped(
    folder: Path, begin: Callable, trials: int, trial: int, *, after_training: bool
) -> None:
    whole, run_folder = searched(folder_of(folder / "whole"), trials, begin), folder_of(folder / "run")
    with pytest.raises(Stopped):
        searched(run_folder, trials, stopping_at(trial, begin, after_training=after_training))
    assert [row.state.name for row in told(run_folder.path)] == ["COMPLETE"] * trial + ["RUNNING"]
    trained: list[str] = []

    def noted(recipe: Recipe, files: SeedFiles) -> Here:
        trained.append(files.folder.name)
        return Here(begin(recipe, files).exitcode)

    tracker = Untracked()
    document = searched(run_folder, trials, noted, tracker=tracker)
    # A trained trial that was not recorded is recorded, not trained again.
    assert trained == [f"{number:04d}" for number in range(trial + after_training, trials)]
    assert document["trials"] == whole["trials"]
    assert (document["best"], document["ahead_of_own"]) == (whole["best"], whole["ahead_of_own"])
    assert tracker.begun == [f"trial {number}" for number in range(trials)]


def test_search_stopped_during_a_trial_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    assert_ends_as_one_that_was_not_stopped(tmp_path, train_here, 2, 1, after_training=False)


def test_search_stopped_before_recording_a_trial_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    assert_ends_as_one_that_was_not_stopped(tmp_path, pretend, 2, 0, after_training=True)


def test_search_can_be_extended_but_not_shortened(tmp_path: Path) -> None:
    run_folder = folder_of(tmp_path / "run")
    searched(run_folder, 2)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=r"--search: is 1, but 2 trials have begun \(allowed: 2 or more\)"):
        searched(run_folder, 1)
    assert sorted(tmp_path.rglob("*")) == before
    assert {row["number"] for row in searched(run_folder, 3)["trials"]} == {0, 1, 2}


def test_recipe_values_lost_by_a_kill_are_proposed_again(tmp_path: Path) -> None:
    own = own_values(TINY.ppo)
    study = RecipeStudy(space_around(TINY.ppo), tmp_path, 0, own)
    trial = study._study.ask()
    trial.suggest_float("learning_rate", 1e-4, 0.1, log=True)
    study.close()
    again = RecipeStudy(space_around(TINY.ppo), tmp_path, 0, own)
    assert again.proposals() == []
    assert again.ask() == Proposal(number=1, own=True, values=own)
    assert not again.ask().own
    again.close()


@pytest.mark.slow
def test_killed_search_is_resumed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autotune.cli.main", "train", "--search", "2", "--processes", "1"]
    paths = ["--recipe", str(recipe_file(tmp_path, RECIPE)), "--runs-dir", str(tmp_path / "runs")]
    process = subprocess.Popen(
        [*command, *paths, "--search-decisions", "800"],
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(Path(autotune.__file__).parent.parent)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        written = (tmp_path / "runs").glob
        wait_until(lambda: sum(len(p.read_text().splitlines()) for p in written("*/trials/*/*.jsonl")) >= 3, process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    (folder,) = (tmp_path / "runs").glob("*-train-search-*")
    assert not list(folder.glob("trials/*/seed-4.json"))
    document = autotune.commands.train(TrainRequest(trials=2, resume=folder))
    assert sorted(row["number"] for row in document["trials"]) == [0, 1]
    rows = [row["decisions"] for row in RunDirectory(folder).lines("trials/0000/seed-4.jsonl")]
    # It resumes from its checkpoint instead of starting over.
    assert rows.count(16) == 1
    assert rows[-1] == 800


# ------------------------------------------------------------------------------------------------------------- failures


def fails_on(*numbers: int, exitcode: int = 1) -> Callable:
    """Return a training function that fails in some trials, with an exit code and without a result."""

    def begin(recipe: Recipe, files: SeedFiles) -> Here:
        return Here(exitcode) if int(files.folder.name) in numbers else pretend(recipe, files)

    return begin


def test_failed_trial_is_recorded_and_the_search_continues(tmp_path: Path) -> None:
    tracker = Untracked()
    document = searched(folder_of(tmp_path), 3, fails_on(1), tracker=tracker)
    assert [row.state.name for row in told(tmp_path)] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert document["trials"][-1]["number"] == 1
    assert document["trials"][-1]["gain_percent"] is None
    assert tracker.failed == ["trial 1"]


def test_no_trial_is_called_better_if_the_recipe_values_fail(tmp_path: Path) -> None:
    document = searched(folder_of(tmp_path), 2, fails_on(0))
    assert document["ahead_of_own"] is None
    assert not document["own_remains_best"]
    assert "with the recipe's own, training failed" in search_verdict(document)


def test_search_in_which_every_trial_fails_reports_it(tmp_path: Path) -> None:
    with pytest.raises(AutotuneError, match="all 1 trials failed"):
        searched(folder_of(tmp_path), 1, fails_on(0))
    assert not (tmp_path / "recipe.toml").exists()


def test_killed_trial_says_how_to_resume_and_can_be_resumed(tmp_path: Path) -> None:
    run_folder = folder_of(tmp_path)
    with pytest.raises(AutotuneError, match=rf"trial 1 was killed \(exit code -9\).*--search 2 --resume {tmp_path}"):
        searched(run_folder, 2, fails_on(1, exitcode=-9))
    assert {row["number"] for row in searched(run_folder, 2)["trials"]} == {0, 1}


NO_SEARCHES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda folder: None, "is not a run directory"),
    "of another command": (lambda folder: put(folder, {"verb": "tune"}), "has no training|config.json: "),
    "a training": (lambda folder: put(folder, {"recipe": TINY.to_json()}), "is not a search"),
    "search that is none": (
        lambda folder: put(folder, {"recipe": TINY.to_json(), "search": {"decisions": 0}}),
        "search",
    ),
    "damaged study": (
        lambda folder: folder_of(folder) and (folder / "optuna.db").write_text("?" * 99),
        "not an Optuna",
    ),
}


@pytest.mark.parametrize("what", NO_SEARCHES)
def test_folder_without_a_search_cannot_be_resumed(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, expected = NO_SEARCHES[what]
    make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((InputError, RunDirectoryError), match=expected):
        autotune.commands.train(TrainRequest(trials=2, resume=tmp_path))
    assert run(["train", "--search", "2", "--resume", str(tmp_path)]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in errors if line.startswith("autotune: ")]) == len(errors) == 1
    assert str(tmp_path) in errors[0]
    assert sorted(tmp_path.rglob("*")) == before


BAD: dict[str, tuple[list[str], str]] = {
    "no trials": (["--search", "0"], "--search: is 0 (allowed: at least 1)"),
    "fewer than none": (["--search", "-3"], "--search: is -3"),
    "trials that are no number": (["--search", "many"], "--search"),
    "no decisions": (["--search", "2", "--search-decisions", "0"], "--search-decisions: is 0"),
    "decisions without a search": (["--search-decisions", "9"], "--search-decisions requires --search"),
    "search with a job": (["charlm", "--search", "2"], "a job cannot be combined with --recipe, --search"),
    "search from a policy": (["--search", "2", "--from", "p"], "--from requires a job"),
    "recipe that is missing": (["--search", "2", "--recipe", "none.toml"], "cannot be read"),
    "recipe beside a search to take up": (
        ["--search", "2", "--recipe", "r", "--resume", "s"],
        "--recipe cannot be combined",
    ),
    "entropy without a logarithm": (["--search", "2", "--recipe", "no-entropy.toml"], "ppo.entropy is 0.0"),
    "other decisions": (
        ["--search", "2", "--search-decisions", "9", "--resume", "run"],
        "allowed: 8, as at its start",
    ),
    "taken up as a training": (["--resume", "run"], "--search N"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_input_gives_one_line_exit_code_2_and_no_files(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "run")
    (tmp_path / "no-entropy.toml").write_text("version = 1\n[ppo]\nentropy = 0\n")
    before = sorted(tmp_path.rglob("*"))
    arguments, expected = BAD[case]
    assert run(["train", *arguments]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert expected in errors[0]
    assert sorted(tmp_path.rglob("*")) == before


# --------------------------------------------------------------------------------------------------------------- parts


def test_search_space_contains_the_recipe_values_wherever_they_lie() -> None:
    assert space_around(LeverRecipe(batch=3072)) == PPO_SPACE
    ppo = LeverRecipe(learning_rate=0.1, entropy=1e-6, epochs=1, batch=8, width=16, clip=0.5, discount=1.0, trace=0.5)
    space = space_around(ppo)
    for name, value in own_values(ppo).items():
        place, usual = space[name], PPO_SPACE[name]
        if isinstance(place, Choice):
            assert isinstance(usual, Choice)
            assert set(place.options) == {*usual.options, value}
            continue
        assert isinstance(usual, Range)
        assert (place.low, place.high) == (min(usual.low, value), max(usual.high, value))
        assert (place.log, place.whole) == (usual.log, usual.whole)


def test_study_proposes_within_its_space_and_identically_when_resumed(tmp_path: Path) -> None:
    names = ("learning_rate", "epochs", "batch", "clip")
    space = {name: space_around(TINY.ppo)[name] for name in names}
    own = {name: own_values(TINY.ppo)[name] for name in names}
    study = RecipeStudy(space, tmp_path, 3, own)
    # Ten trials are random before TPE starts modelling.
    for _ in range(12):
        proposal = study.ask()
        study.tell(proposal, -float(proposal.values["clip"]))
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / "optuna.db", tmp_path / "copy")
    again = RecipeStudy(space, tmp_path / "copy", 3, own)
    assert again.ask() == study.ask()
    proposed = study.proposals()
    again.close()
    study.close()
    assert [proposal.own for proposal in proposed] == [True] + [False] * 12
    for proposal in proposed:
        recipe = with_values(TINY, proposal.values)
        assert {name: own_values(recipe.ppo)[name] for name in names} == proposal.values
        assert recipe_of(recipe.to_json()) == recipe
        for name, place in space.items():
            value = proposal.values[name]
            if isinstance(place, Choice):
                assert value in place.options
            else:
                assert place.low <= value <= place.high
                assert type(value) is (int if place.whole else float)


def test_recipe_round_trips_through_toml(tmp_path: Path) -> None:
    shipped = read_recipe(Path(__file__).parent.parent / "policies" / "ppo.toml")
    odd = with_values(TINY, {"learning_rate": 1.2345678901234567e-05, "discount": 0.1 + 0.2})
    for recipe in (Recipe(), shipped, odd):
        again = read_recipe(recipe_file(tmp_path, recipe.to_toml()))
        assert again == recipe
        assert again.sha256 == recipe.sha256


def test_recipe_values_win_ties_and_failures_are_ranked_last() -> None:
    def outcome(number: int, gain: float | None, own: bool = False) -> Outcome:
        return Outcome(proposal=Proposal(number=number, own=own, values={}), gain=gain)

    ranked = best_first([outcome(0, None), outcome(1, 0.5), outcome(2, 0.5, own=True), outcome(3, -0.1)])
    assert [one.proposal.number for one in ranked] == [2, 1, 3, 0]


def test_trial_is_short_uses_one_seed_and_trains_at_least_one_decision(tmp_path: Path) -> None:
    settings = SearchSettings(trials=1, decisions=8)
    with opened(TINY, settings, folder_of(tmp_path)) as search:
        assert isinstance(search, Search)
        short = search.short(Proposal(number=0, own=False, values={"epochs": 7}))
    assert (short.seeds, short.ppo.decisions, short.ppo.epochs) == ((4,), 8, 7)
    assert (short.jobs, short.strengths, short.planner) == (TINY.jobs, TINY.strengths, TINY.planner)
    assert share_of(TINY) == 8
    assert share_of(Recipe(ppo=LeverRecipe(decisions=3))) == 1


def document_of(best: int, low: float) -> dict:
    rows = [
        {"number": number, "own": number == 0, "gain_percent": 0.2, "values": own_values(TINY.ppo)}
        for number in range(3)
    ]
    return {
        "trials": rows,
        "recipe": "somewhere/recipe.toml",
        "best": best,
        "gain_percent": 0.2,
        "own_remains_best": best == 0,
        "ahead_of_own": {"percent": 0.1, "percent_ci95": [low, 0.4]},
        "decisions": 8,
    }


def test_verdict_calls_only_clear_gains_better() -> None:
    assert "No other of 3 trials gained more: the recipe's own values remain the best" in search_verdict(
        document_of(0, 0.0)
    )
    shown, not_shown = search_verdict(document_of(2, 0.05)), search_verdict(document_of(2, -0.05))
    assert "+0.10 % ahead of the recipe's own values (95 % interval over jobs +0.05 to +0.40)" in shown
    assert "No difference" not in shown
    assert "No difference from the recipe's own values is shown." in not_shown
    for text in (shown, not_shown):
        assert "looks better than it is" in text
        assert "autotune train --recipe somewhere/recipe.toml" in text


def test_table_of_a_search_fits_80_columns() -> None:
    document, shown = document_of(2, 0.0), io.StringIO()
    document["trials"][0]["values"] |= {"learning_rate": 0.000123456, "entropy": 0.000123456, "discount": 0.87654}
    document["trials"][1]["gain_percent"] = None
    Console(file=shown, width=80).print(search_table(document))
    for text in ("learning", "discount", "0.000123", "0.877", "0 own", "failed", "+0.20 %"):
        assert text in shown.getvalue()
    assert "…" not in shown.getvalue()
