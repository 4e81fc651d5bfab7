"""Tests of damaged checkpoints and results: they cost time, never a wrong result."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from test_recipe_search import folder_of, pretend, searched
from test_train import one_seed

import autotune.commands
from autotune.agents.recipe import Recipe
from autotune.agents.saved_training import SavedTraining
from autotune.campaign.policy_training import train_seed
from autotune.campaign.seed_files import SeedFiles, finished, identity, read_result, taken_up
from autotune.campaign.seed_processes import SeedHost
from autotune.commands.training import TrainRequest
from autotune.errors import InputError, RunDirectoryError
from autotune.records.generations import Generations
from autotune.records.run_directory import RunDirectory

RECIPE, SEED, ROLLOUT = one_seed(), 4, 16


class Stopped(Exception):
    """Stands for any event that ends a training halfway."""


def train_until(folder: Path, rollouts: int, recipe: Recipe = RECIPE, seed: int = SEED) -> None:
    """Train a seed and stop it after some rollouts, as its process does when its parent is gone."""
    asked: list[int] = []

    def getppid() -> int:
        asked.append(1)
        if len(asked) > rollouts:
            raise Stopped
        return 1

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "getppid", getppid)
        with pytest.raises(Stopped):
            train_seed(recipe.to_json(), seed, str(folder), 1)


def train_on(folder: Path, recipe: Recipe = RECIPE, seed: int = SEED) -> SeedFiles:
    train_seed(recipe.to_json(), seed, str(folder), os.getppid())
    return SeedFiles(folder=folder, seed=seed)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SeedFiles:
    """Return the files of a seed trained without interruption."""
    return train_on(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a seed stopped in its last rollout."""
    folder = tmp_path_factory.mktemp("stopped")
    train_until(folder, 2)
    return folder


@pytest.fixture
def interrupted(stopped: Path, tmp_path: Path) -> SeedFiles:
    shutil.copytree(stopped, tmp_path / "run")
    return SeedFiles(folder=tmp_path / "run", seed=SEED)


def assert_same(found: SeedFiles, wanted: SeedFiles) -> None:
    assert found.weights.read_bytes() == wanted.weights.read_bytes()
    assert json.loads(found.result.read_text()) == json.loads(wanted.result.read_text())
    assert [row["decisions"] for row in found.rows()] == [ROLLOUT, 2 * ROLLOUT, 3 * ROLLOUT]
    assert [row["won_percent"] for row in found.rows()] == [row["won_percent"] for row in wanted.rows()]
    assert {path.name for path in found.folder.iterdir()} == {path.name for path in wanted.folder.iterdir()}


# ------------------------------------------------------------------------------------------------------- ways to damage


def sealed(payload: bytes) -> bytes:
    """Return a forged checkpoint with a valid checksum."""
    return hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload


def rewritten(change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]) -> Callable[[Path], object]:
    """Return a function that changes the tensors and numbers of a checkpoint and its checksum."""

    def damage(path: Path) -> None:
        payload = path.read_bytes()[65:]
        header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
        tensors, numbers = load(payload), json.loads(header["__metadata__"]["numbers"])
        change(tensors, numbers)
        path.write_bytes(sealed(save(tensors, metadata={"numbers": json.dumps(numbers)})))

    return damage


def tensor(name: str, value: Any) -> Callable[[Path], object]:
    return rewritten(lambda tensors, _: tensors.update({name: value(tensors[name])}))


def number(name: str, value: Any) -> Callable[[Path], object]:
    return rewritten(lambda _, numbers: numbers.update({name: value}))


def courses(**changes: Any) -> Callable[[Path], object]:
    return rewritten(lambda _, numbers: numbers["courses"].update(changes))


def not_finite(value: torch.Tensor) -> torch.Tensor:
    return torch.full_like(value, torch.nan)


class Hostile:
    """An object that creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


WEIGHT = "weights levers.weight"
DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:60]),
    "a flipped bit": flip,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "text": lambda path: path.write_text("?" * 999),
    "huge": lambda path: os.truncate(path, 2**40),
    "a pickle": lambda path: path.write_bytes(sealed(pickle.dumps(Hostile(path.parent / "ran")))),
    "torch's own format": lambda path: torch.save({"decisions": Hostile(path.parent / "ran")}, path),
    "a pipe": replaced(os.mkfifo),
    "a device": replaced(lambda path: path.symlink_to("/dev/zero")),
    "a link out of the folder": replaced(lambda path: path.symlink_to("/etc/passwd")),
    "another seed": lambda path: path.write_bytes(sealed(saved_by(path, replace(RECIPE, seeds=(5,)), 5))),
    "another recipe": number("identity", "recipe 0 seed 4"),
    "no numbers": lambda path: path.write_bytes(sealed(save({"x": torch.zeros(1)}))),
    "other numbers": number("unknown", 1),
    "a header of words": lambda path: path.write_bytes(sealed(b"\xff" * 99)),
    "a tensor too few": rewritten(lambda tensors, _: tensors.pop(WEIGHT)),
    "a tensor too many": rewritten(lambda tensors, _: tensors.update(more=torch.zeros(1))),
    "another shape": tensor(WEIGHT, lambda value: value.T.contiguous()),
    "another type": tensor(WEIGHT, lambda value: value.double()),
    "weights that are not finite": tensor(WEIGHT, not_finite),
    "moments that are not finite": tensor("exp_avg levers.weight", not_finite),
    "moments below 0": tensor("exp_avg_sq levers.weight", lambda value: value - 1),
    "steps below 0": tensor("step levers.weight", lambda value: value - 99),
    "decisions that are no number": number("decisions", "32"),
    "decisions within a rollout": number("decisions", 17),
    "decisions below 0": number("decisions", -16),
    "decisions past the end": number("decisions", 48),
    "moments before the first step": number("decisions", 0),
    "torch's generator elsewhere": tensor("torch", lambda value: torch.full_like(value, 255)),
    "torch's generator short": tensor("torch", lambda value: value[:7].clone()),
    "numpy's generator outside": number("position", 625),
    "numpy's generator far outside": number("position", -(2**31)),
    "numpy's generator of text": number("position", "1"),
    "numpy's words short": tensor("numpy", lambda value: value[:9].clone()),
    "numpy's words too large": tensor("numpy", lambda value: value + 2**32),
    "numpy's gauss of no kind": number("has_gauss", True),
    "numpy's gauss of text": number("gauss", "1"),
    "courses of nothing": number("courses", None),
    "courses of another generator": courses(bit_generator="MT19937"),
    "courses below 0": courses(state={"state": -1, "inc": 1}),
    "courses of fractions": courses(state={"state": 1.5, "inc": 1}),
    "courses with more": courses(more=1),
    "courses of a list": number("courses", [1]),
}


def saved_by(path: Path, recipe: Recipe, seed: int) -> bytes:
    folder = path.parent / "other"
    folder.mkdir()
    train_until(folder, 2, recipe, seed)
    content = SeedFiles(folder=folder, seed=seed).checkpoint.read_bytes()[65:]
    shutil.rmtree(folder)
    return content


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings about saved files."""
    rooms = ("autotune.campaign.seed_files", "autotune.records.generations")
    return [record.getMessage() for record in caplog.records if record.name in rooms]


# ---------------------------------------------------------------------------------------------------------------- saves


def test_two_checkpoints_are_kept_one_rollout_apart(interrupted: SeedFiles) -> None:
    names = {path.name for path in interrupted.folder.iterdir()}
    assert names == {"seed-4.checkpoint", "seed-4.checkpoint.1", "seed-4.jsonl"}
    newest = taken_up(interrupted, RECIPE)
    assert newest is not None
    interrupted.checkpoint.unlink()
    before = taken_up(interrupted, RECIPE)
    assert before is not None
    assert (before.decisions, newest.decisions) == (ROLLOUT, 2 * ROLLOUT)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoint_is_named_once_and_the_previous_one_is_used(
    kind: str, interrupted: SeedFiles, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGE[kind](interrupted.checkpoint)
    saved = taken_up(interrupted, RECIPE)
    assert saved is not None
    assert saved.decisions == ROLLOUT
    (line,) = warnings_in(caplog)
    assert line.startswith(f"{interrupted.checkpoint}: ")
    assert line.endswith("; using the previous save")
    assert "\n" not in line
    # The lost checkpoint's rollout stays in the log; repeated, it gives the same result.
    assert [row["decisions"] for row in interrupted.rows()] == [ROLLOUT, 2 * ROLLOUT]
    caplog.clear()
    again = taken_up(interrupted, RECIPE)
    assert again is not None
    assert again.to_bytes("x") == saved.to_bytes("x")
    assert not warnings_in(caplog)
    assert not (interrupted.folder / "ran").exists()
    assert Path("/etc/passwd").stat().st_size > 0


@pytest.mark.parametrize("kind", ["a flipped bit", "a pipe", "weights that are not finite"])
def test_training_resumed_from_the_previous_checkpoint_ends_identically(
    kind: str, interrupted: SeedFiles, whole: SeedFiles
) -> None:
    DAMAGE[kind](interrupted.checkpoint)
    assert_same(train_on(interrupted.folder), whole)


def test_seed_restarts_and_ends_identically_if_both_checkpoints_are_damaged(
    interrupted: SeedFiles, whole: SeedFiles, caplog: pytest.LogCaptureFixture
) -> None:
    flip(interrupted.checkpoint)
    flip(interrupted.checkpoint_before)
    found = train_on(interrupted.folder)
    (line,) = warnings_in(caplog)
    said = "SHA-256 differs from the recorded one, and the previous save is not intact either; seed 4 starts again"
    assert said in line
    assert_same(found, whole)


def test_training_repeatedly_stopped_and_damaged_ends_identically(interrupted: SeedFiles, whole: SeedFiles) -> None:
    for _ in range(2):
        flip(interrupted.checkpoint)
        train_until(interrupted.folder, 1)
    assert_same(train_on(interrupted.folder), whole)


def test_folder_in_place_of_a_checkpoint_is_one_line(interrupted: SeedFiles) -> None:
    interrupted.checkpoint.unlink()
    interrupted.checkpoint.mkdir()
    with pytest.raises(RunDirectoryError, match=r"seed-4.checkpoint: is damaged and cannot be removed"):
        taken_up(interrupted, RECIPE)


def test_checkpoint_with_modified_bytes_is_rejected_or_loads_identically(interrupted: SeedFiles) -> None:
    payload = interrupted.checkpoint.read_bytes()[65:]
    generator, header = random.Random(0), 8 + int.from_bytes(payload[:8], "little")
    refused = 0
    for number in range(400):
        changed = bytearray(payload)
        # Half of the changes are in names, shapes and numbers, without the checksum's protection.
        for _ in range(generator.randint(1, 4)):
            changed[generator.randrange(header if number % 2 else len(payload))] = generator.randrange(256)
        try:
            found = SavedTraining.from_bytes(
                bytes(changed), identity=identity(interrupted, RECIPE), recipe=RECIPE.ppo, rollout=ROLLOUT
            )
        except InputError:
            refused += 1
        else:
            assert len(found.to_bytes("x")) > 0
    assert refused > 100


def test_every_truncated_file_is_detected(tmp_path: Path) -> None:
    newest, before = tmp_path / "newest", tmp_path / "before"
    for saved in (b"one", b"two"):
        Generations(newest, before).write(saved)
    content = newest.read_bytes()
    before.write_bytes(sealed(b"one"))
    for size in range(len(content)):
        newest.write_bytes(content[:size])
        before.write_bytes(sealed(b"one"))
        assert Generations(newest, before).read(bytes, begins_anew="") == b"one"


WRITES = """
import sys
from pathlib import Path
from autotune.records.generations import Generations
folder = Path(sys.argv[1])
saves = Generations(folder / "newest", folder / "before")
number = int(saves.read(bytes, begins_anew="") or b"0")
while True:
    number += 1
    saves.write(b"%d" % number)
    print(number, flush=True)
"""


def test_process_killed_while_saving_loses_no_reported_checkpoint(tmp_path: Path) -> None:
    generator, told = random.Random(0), 0
    for _ in range(12):
        command = [sys.executable, "-c", WRITES, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            told = int(process.stdout.readline())
            time.sleep(generator.uniform(0, 0.05))
            process.kill()
            told = max([told, *(int(line) for line in process.stdout if line.endswith("\n"))])
        found = Generations(tmp_path / "newest", tmp_path / "before").read(bytes, begins_anew="")
        assert found is not None
        assert int(found) in (told, told + 1)
    # Either of the two alone is enough.
    (tmp_path / "newest").write_bytes(b"torn")
    found = Generations(tmp_path / "newest", tmp_path / "before").read(bytes, begins_anew="")
    assert found is not None
    assert int(found) in (told - 1, told)


# --------------------------------------------------------------------------------------------------- results, progress


def resealed(change: Callable[[dict[str, Any]], object]) -> Callable[[SeedFiles], object]:
    """Return a function that changes a result and its checksum."""

    def damage(files: SeedFiles) -> None:
        document = json.loads(files.result.read_text())
        change(document)
        document.pop("sha256", None)
        digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
        files.result.write_text(json.dumps({**document, "sha256": digest}))

    return damage


RESULTS: dict[str, Callable[[SeedFiles], object]] = {
    "empty": lambda files: files.result.write_text(""),
    "truncated": lambda files: os.truncate(files.result, 400),
    "no JSON": lambda files: files.result.write_bytes(b"\xff{"),
    "a list": lambda files: files.result.write_text("[]"),
    "nothing in it": lambda files: files.result.write_text("{}"),
    "huge": lambda files: os.truncate(files.result, 2**40),
    "a pipe": lambda files: replaced(os.mkfifo)(files.result),
    "a link": lambda files: replaced(lambda path: path.symlink_to("/etc/passwd"))(files.result),
    "a link to nothing": lambda files: replaced(lambda path: path.symlink_to("nowhere"))(files.result),
    "another number": lambda files: files.result.write_text(files.result.read_text().replace("0.", "1.", 1)),
    "another seed": resealed(lambda document: document.update(seed=5)),
    "another recipe": resealed(lambda document: document.update(recipe_sha256="0")),
    "another version": resealed(lambda document: document.update(version=2)),
    "an unknown key": resealed(lambda document: document.update(more=1)),
    "a missing key": resealed(lambda document: document.pop("job")),
    "lanes too few": resealed(lambda document: document["won_percent"].pop()),
    "lanes of text": resealed(lambda document: document["won_percent"].__setitem__(0, "1")),
    "lanes of truth": resealed(lambda document: document["won_percent"].__setitem__(0, True)),
    "lanes beyond numbers": resealed(lambda document: document["won_percent"].__setitem__(0, 10**400)),
    "lanes that are nested": resealed(lambda document: document.update(won_percent=[[1]] * 512)),
    "jobs that are none": resealed(lambda document: document["job"].__setitem__(0, 7)),
    "jobs below 0": resealed(lambda document: document["job"].__setitem__(0, -1)),
    "ranges too few": resealed(lambda document: document["lowest"].pop()),
    "a hash of no kind": resealed(lambda document: document.update(weights_sha256=None)),
    "weights cut short": lambda files: os.truncate(files.weights, 40),
    "weights flipped": lambda files: flip(files.weights),
    "weights missing": lambda files: files.weights.unlink(),
    "weights of a pipe": lambda files: replaced(os.mkfifo)(files.weights),
    "weights huge": lambda files: os.truncate(files.weights, 2**40),
}


@pytest.fixture
def done(whole: SeedFiles, tmp_path: Path) -> SeedFiles:
    shutil.copytree(whole.folder, tmp_path / "done")
    return SeedFiles(folder=tmp_path / "done", seed=SEED)


@pytest.mark.parametrize("kind", RESULTS)
def test_damaged_result_is_named_once_and_ignored(kind: str, done: SeedFiles, caplog: pytest.LogCaptureFixture) -> None:
    assert finished(done, RECIPE) is not None
    RESULTS[kind](done)
    assert finished(done, RECIPE) is None
    (line,) = warnings_in(caplog)
    assert line.startswith(str(done.folder))
    assert line.endswith("; seed 4 is trained again")
    assert "\n" not in line
    caplog.clear()
    assert finished(done, RECIPE) is None
    assert not warnings_in(caplog)


def test_result_with_modified_bytes_is_rejected_or_reads_identically(done: SeedFiles) -> None:
    content, generator = done.result.read_bytes(), random.Random(0)
    wanted, same = read_result(done, RECIPE), 0
    for _ in range(500):
        changed = bytearray(content)
        changed[generator.randrange(len(content))] = generator.randrange(256)
        done.result.write_bytes(changed)
        try:
            found = read_result(done, RECIPE)
        except InputError:
            continue
        same += 1
        assert np.array_equal(found.won, wanted.won)
        assert np.array_equal(found.job, wanted.job)
    assert same < 250


@pytest.mark.slow
def test_seeds_with_damaged_results_are_trained_again_and_end_identically(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = replace(RECIPE, seeds=(4, 9))
    run = RunDirectory.create(tmp_path, "train", "simulated", {"recipe": recipe.to_json()})
    run.close()
    for seed in recipe.seeds:
        train_on(run.path, recipe, seed)
    document = autotune.commands.train(TrainRequest(resume=run.path))
    damaged, kept = (SeedFiles(folder=run.path, seed=seed) for seed in recipe.seeds)
    before = kept.result.stat().st_mtime_ns
    wanted = damaged.weights.read_bytes()
    flip(damaged.weights)
    with damaged.progress.open("ab") as file:
        file.write(b'{"decisions": "many"}\n\xff\n[]\n')
    with kept.progress.open("ab") as file:
        file.write(b'nonsense\n{"decisions": 99999')
    again = autotune.commands.train(TrainRequest(resume=run.path, processes=1))
    assert [line.partition(": ")[2] for line in warnings_in(caplog)] == [
        "is not the file that the result names; seed 4 is trained again",
        "1 damaged lines are skipped",
        "3 damaged lines are skipped",
    ]
    assert damaged.weights.read_bytes() == wanted
    assert kept.result.stat().st_mtime_ns == before
    assert again["won_percent"] == document["won_percent"]
    for files in (damaged, kept):
        assert [row["decisions"] for row in files.rows()] == [ROLLOUT, 2 * ROLLOUT, 3 * ROLLOUT]
        assert len(files.progress.read_bytes().splitlines()) == 3


def test_policy_is_not_written_through_a_link_outside_the_run(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs", "train", "simulated", {"recipe": RECIPE.to_json()})
    run.close()
    train_on(run.path)
    (tmp_path / "elsewhere").mkdir()
    (run.path / "policy").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirectoryError, match="policy: is a link"):
        autotune.commands.train(TrainRequest(resume=run.path))
    assert not list((tmp_path / "elsewhere").iterdir())


# ----------------------------------------------------------------------------------------------------------- elsewhere


def stand_still(recipe: dict[str, Any], seed: int, folder: str, parent: int) -> None:
    """Train nothing."""


@pytest.mark.slow
def test_only_the_files_of_a_seed_are_transferred(interrupted: SeedFiles) -> None:
    secret = interrupted.folder.parent / "secret"
    secret.write_text("key")
    (interrupted.folder / "seed-4.more").write_text("more")
    interrupted.weights.symlink_to(secret)
    os.mkfifo(interrupted.result)
    assert set(interrupted.contents()) == {"seed-4.checkpoint", "seed-4.checkpoint.1", "seed-4.jsonl"}
    sent = {**interrupted.contents(), "../outside": b"x", "seed-9.json": b"x", "/tmp/outside": b"x"}
    host = SeedHost(stand_still, RECIPE.to_json(), SEED, sent)
    with host._folder:
        code = None
        while code is None:
            code, _ = host.news()
        assert code == 0
        # Next to the lock of the scratch folder.
        assert {path.name for path in host._path.glob("seed-*")} == set(interrupted.contents())
        assert not list(host._path.parent.glob("outside"))
        (host._path / "seed-4.more").write_text("more")
        interrupted.checkpoint.replace(host._path / "seed-4.json")
        (host._path / "seed-4.checkpoint").unlink()
        code, changed = host.news()
    assert changed.keys() == {"seed-4.json", "seed-4.checkpoint"}
    assert changed["seed-4.checkpoint"] is None


# -------------------------------------------------------------------------------------------------------------- search


def test_search_without_its_study_finds_its_trained_trials(tmp_path: Path) -> None:
    run = folder_of(tmp_path / "run")
    whole = searched(run, 3)
    (run.path / "optuna.db").write_bytes(b"?" * 4096)
    with pytest.raises(RunDirectoryError, match="or no file; the search then starts over"):
        searched(run, 3)
    (run.path / "optuna.db").unlink()
    trained: list[str] = []

    def noted(recipe: Recipe, files: SeedFiles) -> Any:
        trained.append(files.folder.name)
        return pretend(recipe, files)

    assert searched(run, 3, noted)["trials"] == whole["trials"]
    assert not trained
    # A recorded trial with a damaged result keeps its value; an unrecorded one is trained again.
    flip(run.path / "trials" / "0000" / "seed-4.json")
    document = searched(run, 3, noted)
    assert document["trials"] == whole["trials"]
    assert document["ahead_of_own"] is None
    (run.path / "optuna.db").unlink()
    assert searched(run, 3, noted)["ahead_of_own"] == whole["ahead_of_own"]
    assert trained == ["0000"]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/etc/passwd"), os.mkdir])
def test_irregular_file_in_place_of_a_study_is_one_line(make: Callable[[Path], object], tmp_path: Path) -> None:
    run = folder_of(tmp_path / "run")
    make(run.path / "optuna.db")
    with pytest.raises(RunDirectoryError, match=r"optuna.db: is a (pipe|link|folder)"):
        searched(run, 1)


def test_trials_are_not_trained_in_a_folder_outside_the_run(tmp_path: Path) -> None:
    run = folder_of(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (run.path / "trials").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirectoryError, match="trials: is a link"):
        searched(run, 1)
    assert not list((tmp_path / "elsewhere").iterdir())
