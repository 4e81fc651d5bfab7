"""Tests of a full disk, of suspended processes and of recurring failures during long campaigns."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import failing_job
import pytest
import sqlalchemy

from autotune import commands
from autotune.cli.main import run
from autotune.engines import tuning_windows
from autotune.engines.isolated_engine import IsolatedEngine, Patience
from autotune.records.journal import JOURNAL
from autotune.records.run_directory import RunDirectory
from autotune.records.tracking import Tracker

JOB = Path(__file__).parent / "tiny_job.py"
PROGRAM = [sys.executable, "-m", "autotune.cli.main"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(JOB.parent.parent), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a disk of a given size, or resizes it."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def of_size(size: str) -> Path:
        remount = "remount," if os.path.ismount(folder) else ""
        command = ["mount", "-t", "tmpfs", "-o", f"{remount}size={size}", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a small disk cannot be mounted here")
        return folder

    yield of_size
    if os.path.ismount(folder):
        subprocess.run(["umount", "-l", str(folder)], check=True)


def tune(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["64k", "700k", "1100k", "1250k"])
def test_full_disk_is_one_line_and_nothing_is_lost(size: str, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk(size)
    done = tune("tune", str(JOB), "--method", "optuna", "--steps", "90", "--runs-dir", str(disk))
    said = [line for line in done.stderr.splitlines() if line.startswith("autotune: ")]
    assert done.returncode == 2, done.stderr
    assert len(said) == 1
    assert "cannot be written" in said[0]
    assert "Traceback" not in done.stderr
    (folder,) = [path for path in disk.iterdir() if (path / "config.json").is_file()]
    before = RunDirectory.open(folder).lines(JOURNAL)
    assert not (folder / "tuned.json").exists()
    small_disk("64m")
    done = tune("resume", str(folder), "--job", str(JOB), "--json")
    assert done.returncode == 0, done.stderr
    after = RunDirectory.open(folder).lines(JOURNAL)
    assert after[: len(before)] == before
    assert json.loads(done.stdout)["measured"]["peak_bytes"] > 0
    # The log is complete, too: every run of the command, including the one that the full disk ended.
    engine = sqlalchemy.create_engine(f"sqlite:///{disk / 'mlflow.db'}")
    with engine.connect() as connection:
        runs = connection.execute(sqlalchemy.text("select name, status from runs")).all()
    engine.dispose()
    assert ("tune tiny optuna", "FINISHED") in [tuple(run) for run in runs]
    assert not [status for _, status in runs if status == "RUNNING"]


@pytest.mark.slow
def test_suspended_tuning_continues(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "tune", str(JOB), "--method", "optuna", "--steps", "200", "--runs-dir", str(tmp_path), "--json"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(4.0)
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(60.0)
    os.killpg(process.pid, signal.SIGCONT)
    said, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    document = json.loads(said)
    trials = RunDirectory.open(Path(document["run"])).lines("trials.jsonl")
    assert [trial["number"] for trial in trials] == list(range(len(trials)))
    assert not [trial for trial in trials if trial["measurement"]["failure"]]


def test_unsent_records_of_an_earlier_command_are_sent_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    first = Tracker(tmp_path, folder, "killed")
    first.params({"seed": 1})
    first.close()
    # A kill also truncated a record.
    with (folder / "tracking.jsonl").open("a") as spool:
        spool.write('{"kind": "par')
        spool.write("\n")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    second = Tracker(tmp_path, folder, "taken up")
    second.metrics({"cost": 1.0})
    second.close()
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'mlflow.db'}")
    with engine.connect() as connection:
        runs = dict(tuple(run) for run in connection.execute(sqlalchemy.text("select name, status from runs")).all())
        assert connection.execute(sqlalchemy.text("select count(*) from params")).scalar() == 1
        assert connection.execute(sqlalchemy.text("select count(*) from metrics")).scalar() == 1
    engine.dispose()
    assert runs == {"killed": "FINISHED", "taken up": "FINISHED"}


@pytest.mark.slow
def test_job_that_dies_during_profiling_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The references take a few steps each in their own child processes; the profile's first steps reach this one.
    monkeypatch.setenv(failing_job.FAILURE, "segfault")
    monkeypatch.setenv(failing_job.AT, "9")
    command = ["tune", str(Path(failing_job.__file__)), "--method", "exact", "--isolate", "--lean"]
    assert run([*command, "--runs-dir", str(tmp_path)]) == 2
    assert "profiling ends with crashed: ended by SIGSEGV" in capsys.readouterr().err
    monkeypatch.delenv(failing_job.FAILURE)
    assert run([*command, "--runs-dir", str(tmp_path), "--json"]) == 0
    assert len(list((tmp_path / "profiles").glob("*-lean.json"))) == 1


EXPECTED = {
    "hang": "timeout",
    "segfault": "crashed",
    "kill": "crashed",
    "exit": "crashed",
    "garbage": "crashed",
    "out_of_memory": "out_of_memory",
    "nan": "non_finite",
    "exception": "crashed",
}


@pytest.mark.slow
def test_campaign_with_recurring_failures_completes_and_names_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = int(os.environ.get("FAILURES_EACH", "2"))
    turns = tmp_path / "turns"
    # The references do not fail.
    turns.write_text(f"{-3:<9}")
    monkeypatch.setenv(failing_job.TURNS, str(turns))
    # A window has 3, 6 or 12 micro-batches, so that under every plan some windows fail and most do not.
    monkeypatch.setenv(failing_job.AT, "27")
    # Steps take microseconds, so a process that takes five seconds hangs.
    patience = Patience(opening_s=60, first_s=5, factor=10, grace_s=3)
    monkeypatch.setattr(tuning_windows, "IsolatedEngine", functools.partial(IsolatedEngine, patience=patience))
    count = len(EXPECTED) * each
    # The final measurements do not fail, either.
    monkeypatch.setenv(failing_job.TIMES, str(count))
    document = commands.tune(
        f"{failing_job.__file__}:wide",
        "optuna",
        memory_budget="60%",
        isolate=True,
        steps=80 * count,
        trials=8 * count,
        runs_dir=tmp_path,
    )
    trials = RunDirectory.open(Path(document["run"])).lines("trials.jsonl")
    found = [trial["measurement"]["failure"] for trial in trials]
    met = [failure for failure in found if failure not in (None, "over_budget")]
    assert met == [EXPECTED[kind] for kind in failing_job.KINDS] * each
    assert document["measured"]["peak_bytes"] <= document["measured"]["memory_budget_bytes"]
    if each >= 10:
        searched = [trial["measurement"]["failure"] for trial in trials if not trial["final"]]
        halves = searched[: len(searched) // 2], searched[len(searched) // 2 :]
        assert halves[1].count("over_budget") < halves[0].count("over_budget")
