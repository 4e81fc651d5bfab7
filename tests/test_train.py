"""Tests of training a policy: seeds in separate processes, the saved policy folder, and resumption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_tracking import runs_in

import autotune.commands
from autotune.agents.planner_policy import PlannerPolicy
from autotune.agents.policy_folder import load_policy
from autotune.agents.recipe import JobsRecipe, LeverRecipe, Recipe, read_recipe
from autotune.agents.shipped_network import LeverNetwork
from autotune.campaign.policy_training import (
    jobs_of,
    train_seed,
    validation_env,
)
from autotune.campaign.seed_files import SeedFiles
from autotune.cli.main import run
from autotune.commands.training import TrainRequest
from autotune.errors import AutotuneError, InputError, RunDirectoryError
from autotune.gym.levers import RUN_FEATURES
from autotune.records.run_directory import RunDirectory
from autotune.records.to_mlflow import tracking_uri
from autotune.simulator.moving_conditions import Strengths
from autotune.simulator.planner_settings import PlannerSettings

RECIPE = """version = 1
seeds = [4, 9]
[jobs]
training = 3
validation = 4
shallowest = 2
deepest = 3
windows = 4
[strengths]
length = 0.2
jitter = 0.1
event_every = 2
event_told = 0
switch_windows = 0.1
[planner]
rise = 0.1
[ppo]
decisions = 160
lanes = 4
batch = 8
epochs = 4
learning_rate = 0.1
width = 8
"""
ROLLOUTS = list(range(16, 161, 16))
LONG = RECIPE.replace("decisions = 160", "decisions = 640")


def recipe_file(folder: Path, text: str = RECIPE) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


@pytest.fixture(autouse=True, scope="module")
def _looks_often() -> Iterator[None]:
    """Let trainings that end soon be noticed soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.campaign.policy_training._POLL_S", 0.05)
        yield


class Told:
    """A reporter that records its messages."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, float]] = []
        self.done: list[float] = []

    def stage(self, title: str, total: float) -> None:
        self.stages.append((title, total))

    def advance(self, done: float, detail: str = "") -> None:
        self.done.append(done)


class Trained:
    """A finished training."""

    def __init__(self, runs: Path) -> None:
        self.runs, self.told = runs, Told()
        self.document = autotune.commands.train(
            TrainRequest(recipe=recipe_file(runs)), runs_dir=runs, reporter=self.told
        )
        self.run = Path(self.document["run"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("runs"))


def whole_seeds(folder: Path, text: str) -> dict[int, SeedFiles]:
    """Train every seed of a recipe from beginning to end in this process."""
    recipe = read_recipe(recipe_file(folder, text))
    found = {seed: SeedFiles(folder=folder, seed=seed) for seed in recipe.seeds}
    for seed in found:
        train_seed(recipe.to_json(), seed, str(folder), os.getppid())
    return found


def assert_same_seeds(run_folder: Path, wanted: dict[int, SeedFiles]) -> None:
    for seed, files in wanted.items():
        found = SeedFiles(folder=run_folder, seed=seed)
        own, other = load_file(found.weights), load_file(files.weights)
        assert own.keys() == other.keys()
        assert all(torch.equal(own[name], other[name]) for name in own)
        assert json.loads(found.result.read_text()) == json.loads(files.result.read_text())
        assert not found.checkpoint.exists()


# -------------------------------------------------------------------------------------------------------- what is left


def test_policy_of_the_best_seed_is_saved_as_a_loadable_folder(trained: Trained) -> None:
    document = trained.document
    assert document["policy"] == str(trained.run / "policy")
    policy = load_policy(Path(document["policy"]))
    assert isinstance(policy, PlannerPolicy)
    assert policy.settings == PlannerSettings(rise=0.1)
    won = document["won_percent"]
    assert set(won) == {"4", "9"}
    assert won[str(document["seed"])] == max(won.values())
    assert isinstance(policy.network, LeverNetwork)
    best = load_file(SeedFiles(folder=trained.run, seed=document["seed"]).weights)
    for name, tensor in policy.network.state_dict().items():
        assert torch.equal(tensor, best[name])
    assert policy.ranges is not None
    assert (policy.ranges.lowest <= policy.ranges.highest).all()
    names = list(RUN_FEATURES)
    # Jobs of the feature ranges: they have two or three blocks, a head and an embedding.
    depth = policy.ranges.highest[names.index("depth")], policy.ranges.lowest[names.index("depth")]
    np.testing.assert_allclose(depth, (np.log2(6) / 4, np.log2(5) / 4), rtol=1e-5)


def test_documents_describe_the_training(trained: Trained) -> None:
    document, recipe = trained.document, read_recipe(trained.runs / "recipe.toml")
    assert json.loads((trained.run / "trained.json").read_text()) == document
    assert document["decisions"] == 320
    assert document["won_percent_mean"] == pytest.approx(np.mean(list(document["won_percent"].values())))
    low, high = document["won_percent_ci95"]
    assert low <= document["won_percent_mean"] <= high
    assert document["parameters"] == sum(parameter.numel() for parameter in LeverNetwork(8).parameters())
    config = json.loads((trained.run / "config.json").read_text())
    assert config["verb"] == "train"
    assert config["recipe"] == recipe.to_json()
    manifest = json.loads((trained.run / "policy" / "manifest.json").read_text())
    assert manifest["training"]["recipe_sha256"] == recipe.sha256
    assert manifest["training"]["strengths_sha256"] == recipe.strengths_sha256
    assert manifest["training"]["seeds"] == 2
    card = (trained.run / "policy" / "README.md").read_text()
    assert recipe.sha256 in card
    assert "4: " in card
    assert (trained.run / "environment.json").is_file()


def test_each_seed_leaves_its_rollouts_weights_and_result(trained: Trained) -> None:
    assert trained.told.stages == [("train 2 seeds", 320)]
    assert trained.told.done[-1] == 320
    for seed in (4, 9):
        files = SeedFiles(folder=trained.run, seed=seed)
        rows = [json.loads(row) for row in files.progress.read_text().splitlines()]
        assert [row["decisions"] for row in rows] == ROLLOUTS
        assert len(json.loads(files.result.read_text())["won_percent"]) == 512
        assert not files.checkpoint.exists()
    first, second = (load_file(SeedFiles(folder=trained.run, seed=seed).weights) for seed in (4, 9))
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_result_is_the_time_saved_on_validation_jobs(trained: Trained) -> None:
    recipe = read_recipe(trained.runs / "recipe.toml")
    for seed in recipe.seeds:
        files, network = SeedFiles(folder=trained.run, seed=seed), LeverNetwork(8)
        network.load_state_dict(load_file(files.weights))
        env = validation_env(recipe)
        features, done, seen, won = env.reset(), False, [], np.zeros(env.lanes)
        while not done:
            seen.append(features[0])
            features, rewards, done = env.step(network.most_likely(features))
            won += rewards
        seen.append(features[0])
        result = json.loads(files.result.read_text())
        np.testing.assert_allclose(result["won_percent"], won)
        assert np.abs(won).max() > 0
        np.testing.assert_array_equal(result["job"], env.course.job)
        np.testing.assert_allclose(result["lowest"], np.concatenate(seen).min(axis=0))
        np.testing.assert_allclose(result["highest"], np.concatenate(seen).max(axis=0))


def test_mlflow_has_a_run_per_seed_with_its_rollouts_and_the_policy(trained: Trained) -> None:
    from mlflow import MlflowClient

    found = {run.info.run_name: run for run in runs_in(tracking_uri(trained.runs))}
    assert set(found) == {"train", "seed 4", "seed 9"}
    parent = found["train"]
    assert parent.data.params["recipe_sha256"] == read_recipe(trained.runs / "recipe.toml").sha256
    client = MlflowClient(tracking_uri=tracking_uri(trained.runs))
    for seed in (4, 9):
        child = found[f"seed {seed}"]
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        history = client.get_metric_history(child.info.run_id, "won_percent")
        rows = SeedFiles(folder=trained.run, seed=seed).progress.read_text().splitlines()
        assert sorted(entry.step for entry in history) == ROLLOUTS
        logged = {entry.step: entry.value for entry in history}
        assert logged == {row["decisions"]: row["won_percent"] for row in map(json.loads, rows)}
        assert child.info.status == "FINISHED"
    names = {path.name for path in (trained.runs / "artifacts").rglob("*")}
    assert {"manifest.json", "policy.safetensors", "README.md", "trained.json"} <= names


def test_seeds_train_identically_in_separate_processes(trained: Trained, tmp_path: Path) -> None:
    assert_same_seeds(trained.run, whole_seeds(tmp_path, RECIPE))


def test_finished_training_is_resumed_without_training_again(trained: Trained) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.run.glob("seed-*")}
    again = autotune.commands.train(TrainRequest(resume=trained.run), runs_dir=trained.runs / "not used")
    assert {path: path.stat().st_mtime_ns for path in trained.run.glob("seed-*")} == before
    same = ("seed", "won_percent", "won_percent_ci95", "parameters", "policy", "decisions")
    assert {key: again[key] for key in same} == {key: trained.document[key] for key in same}
    assert not (trained.runs / "not used").exists()


# ------------------------------------------------------------------------------------------------------- interruptions


def start(runs: Path, recipe: Path) -> subprocess.Popen:
    """Start a training as a user would, in a process group of its own."""
    command = [sys.executable, "-m", "autotune.cli.main", "train", "--recipe", str(recipe), "--runs-dir", str(runs)]
    environment = os.environ | {"PYTHONPATH": str(Path(autotune.__file__).parent.parent)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*command, "--processes", "2"], start_new_session=True, env=environment, **quiet)


def wait_until(holds: Callable[[], bool], process: subprocess.Popen) -> None:
    for _ in range(6000):
        if holds():
            return
        assert process.poll() is None, "the training ended before it could be interrupted"
        time.sleep(0.02)
    raise AssertionError("it never came to that")


def rollouts(runs: Path) -> list[int]:
    """Return the number of rollouts of each seed that has begun."""
    return [len(path.read_text().splitlines()) for path in runs.glob("*/seed-*.jsonl")]


def killed_training(runs: Path, whom: Callable[[subprocess.Popen], object]) -> Path:
    """Return the run directory of a training killed after each seed's first rollout."""
    runs.mkdir()
    process = start(runs, recipe_file(runs, LONG))
    try:
        wait_until(lambda: len(rollouts(runs)) == 2 and min(rollouts(runs)) >= 1, process)
        whom(process)
        process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    (folder,) = runs.glob("*-train-*")
    return folder


@pytest.mark.slow
def test_training_whose_processes_were_killed_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    folder = killed_training(tmp_path / "runs", lambda process: os.killpg(process.pid, signal.SIGKILL))
    for seed in (4, 9):
        files = SeedFiles(folder=folder, seed=seed)
        # It was killed midway: checkpoints exist, but no seed is finished.
        assert files.checkpoint.is_file()
        assert not files.result.is_file()
        assert 0 < len(files.progress.read_text().splitlines()) < 40
    # A kill may truncate the line that was being written.
    with SeedFiles(folder=folder, seed=4).progress.open("a") as file:
        file.write('{"decisions": 99')
    document = autotune.commands.train(TrainRequest(resume=folder))
    assert document["run"] == str(folder)
    (tmp_path / "whole").mkdir()
    assert_same_seeds(folder, whole_seeds(tmp_path / "whole", LONG))
    assert isinstance(load_policy(folder / "policy"), PlannerPolicy)
    assert not list(folder.glob(".*"))


@pytest.mark.slow
def test_seed_processes_end_after_their_parent_was_killed(tmp_path: Path) -> None:
    folder = killed_training(tmp_path / "runs", lambda process: process.kill())
    counts = []
    for _ in range(100):
        counts.append(sum(rollouts(tmp_path / "runs")))
        time.sleep(0.1)
        if len(counts) > 20 and len(set(counts[-20:])) == 1:
            break
    assert counts[-1] < 80
    assert not list(folder.glob("seed-*.json"))


@pytest.mark.parametrize("torn", [b'{"decisions": 16, "won_percent": 0.5}\n{"decisions": 3', b'{"dec', b""])
def test_torn_progress_line_is_removed_before_others_are_appended(tmp_path: Path, torn: bytes) -> None:
    files = SeedFiles(folder=tmp_path, seed=4)
    files.progress.write_bytes(torn)
    train_seed(one_seed().to_json(), 4, str(tmp_path), os.getppid())
    # Repeated rollouts leave one line.
    rows = RunDirectory(tmp_path).lines(files.progress.name)
    assert [row["decisions"] for row in rows] == [16, 32, 48]


def one_seed() -> Recipe:
    return Recipe(
        seeds=(4,),
        jobs=JobsRecipe(training=2, validation=2, shallowest=2, deepest=2, windows=4),
        ppo=LeverRecipe(decisions=48, lanes=4, batch=8, epochs=1, width=8),
        strengths=Strengths(length=0.1),
    )


@pytest.mark.slow
def test_failed_seed_says_how_to_resume_and_can_be_resumed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_folder = RunDirectory.create(tmp_path, "train", "simulated", {"recipe": one_seed().to_json()})
    run_folder.close()
    files = SeedFiles(folder=run_folder.path, seed=4)
    # Something occupies the path of the weights.
    files.weights.mkdir()
    with pytest.raises(AutotuneError, match=rf"seed 4 ended with exit code 1.*--resume {run_folder.path}"):
        autotune.commands.train(TrainRequest(resume=run_folder.path))
    assert files.checkpoint.is_file()
    assert not (run_folder.path / "policy").exists()
    files.weights.rmdir()
    assert autotune.commands.train(TrainRequest(resume=run_folder.path))["seed"] == 4
    capfd.readouterr()


NO_TRAININGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: folder.rmdir(), "is not a run directory"),
    "empty": (lambda folder: None, "is not a run directory"),
    "of another command": (lambda folder: put(folder, {"verb": "tune"}), "has no training|config.json: "),
    "recipe that is none": (lambda folder: put(folder, {"recipe": [1]}), r"has no training|recipe is \[1\]"),
    "recipe of a newer version": (lambda folder: put(folder, {"recipe": {"version": 9}}), "version is 9"),
    "recipe with an unknown key": (lambda folder: put(folder, {"recipe": {"version": 1, "x": 1}}), "unknown key 'x'"),
    "damaged": (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
}


def put(folder: Path, config: dict) -> None:
    """Write the request of a training with some changes."""
    whole = {"version": 1, "verb": "train", "job": "simulated", **config}
    (folder / "config.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("what", NO_TRAININGS)
def test_folder_without_a_training_cannot_be_resumed(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, expected = NO_TRAININGS[what]
    folder = tmp_path / "some-run"
    folder.mkdir()
    make(folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((InputError, RunDirectoryError), match=expected):
        autotune.commands.train(TrainRequest(resume=folder))
    assert run(["train", "--resume", str(folder)]) == 2
    errors = capsys.readouterr().err.strip()
    assert len(errors.splitlines()) == 1
    assert str(folder) in errors
    assert sorted(tmp_path.rglob("*")) == before


# --------------------------------------------------------------------------------------------------------------- parts


def test_validation_jobs_differ_from_training_jobs() -> None:
    recipe = one_seed()
    own, again, other = jobs_of(recipe), jobs_of(recipe), jobs_of(recipe, validation=True)
    assert [job.profile for job in own] == [job.profile for job in again]
    assert not any(job.profile == judge.profile for job in own for judge in other)
    assert {len(job.profile.units) for job in (*own, *other)} == {4}
    env, same = validation_env(recipe, lanes=8), validation_env(recipe, lanes=8)
    np.testing.assert_array_equal(env.course.budget, same.course.budget)
    assert env.settings == recipe.planner
    stronger = validation_env(recipe, Strengths(length=0.5), lanes=8)
    assert np.std(np.log(stronger.course.length)) > np.std(np.log(env.course.length))
