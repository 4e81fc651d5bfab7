"""Tests of a stranger's run folder: it runs nothing, connects to nothing and leads to no file outside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_job

import autotune
from autotune import InputError, RunDirectoryError, commands
from autotune.cli.main import run as run_command
from autotune.errors import RunLockedError
from autotune.io.run_folder import WriterLock
from autotune.plan import Plan
from autotune.records.run_directory import RunDirectory
from autotune.records.to_mlflow import DATABASE
from autotune.records.tracking import send_pending
from autotune.records.tracking_spool import CURSOR, SPOOL

JOB = Path(tiny_job.__file__)
# Code that leaves a mark when it is loaded.
HOSTILE = """
from pathlib import Path
Path(__file__).with_name("it-ran").write_text("x")
job = None
"""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of a tuning without its last document, as a kill leaves it."""
    runs = tmp_path_factory.mktemp("interrupted")
    folder = Path(autotune.tune(str(JOB), "random", steps=48, memory_budget="90%", runs_dir=runs)["run"])
    (folder / "tuned.json").unlink()
    return folder


@pytest.fixture
def run(interrupted: Path, tmp_path: Path) -> Path:
    """Return a copy of that run in its own runs folder."""
    return Path(shutil.copytree(interrupted, tmp_path / "runs" / interrupted.name))


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


@contextlib.contextmanager
def listening() -> Iterator[tuple[int, list[bytes]]]:
    """Yield a port of this machine, and the data received there."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        over = threading.Event()

        def accept() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError), server.accept()[0] as connection:
                    heard.append(connection.recv(1024))

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield server.getsockname()[1], heard
        finally:
            over.set()
            thread.join()


# -------------------------------------------------------------------------------------------------- what resume loads


def in_jobs(reference: str) -> Callable[[dict[str, Any]], object]:
    """Return the changes that turn a tuning's configuration into one of several jobs."""

    def edit(config: dict[str, Any]) -> None:
        config.clear()
        config.update(version=1, verb="compare", job="jobs", jobs=[reference, "digits"], arms=["paper"], settings={})

    return edit


@pytest.mark.parametrize(
    "reference", ["{folder}/notes.py:job", "notes:job", "os:abort", "charlm:main", "{folder}/notes.py"]
)
@pytest.mark.parametrize("several", [False, True])
def test_foreign_run_folder_loads_no_code(
    run: Path, reference: str, several: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "notes.py").write_text(HOSTILE)
    monkeypatch.chdir(run)
    monkeypatch.syspath_prepend(run)
    named = reference.format(folder=run)
    edit = in_jobs(named) if several else lambda config: config["asked"].update(job=named)
    change(run / "config.json", edit)
    before = set(sys.modules)
    assert run_command(["resume", str(run)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "is code, which is not loaded because only the run's own files request it" in said or "charlm" in reference
    assert not (run / "it-ran").exists()
    assert "notes" not in set(sys.modules) - before


def test_code_named_by_the_caller_is_loaded(run: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is code"):
        commands.resume(run)
    found = commands.resume(run, job=str(JOB))
    assert found["run"] == str(run)
    # A finished run is only a document, for which nothing is loaded.
    assert commands.resume(run) == found


def test_foreign_run_folder_opens_no_database_or_cluster_connection(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PGPASSWORD", "not for strangers")
    with listening() as (port, heard):
        for asked, option in (
            ({"storage": f"postgresql://x@127.0.0.1:{port}/db"}, "--storage"),
            ({"cluster": {"address": f"ray://127.0.0.1:{port}", "cores": 1}, "isolate": True}, "--cluster"),
            ({"ranks": {"count": 2, "zero_stage": 0, "config": "0" * 64}, "isolate": True}, "--ds-config"),
        ):
            folder = Path(shutil.copytree(run, run.parent / option))
            change(folder / "config.json", lambda config, asked=asked: config["asked"].update(asked))
            assert run_command(["resume", str(folder), "--job", str(JOB)]) == 2
            assert f"{option} with the value of the original command" in capsys.readouterr().err
            assert run_command(["report", str(folder)]) == 2
            capsys.readouterr()
    assert heard == []


def test_foreign_run_folder_opens_no_outside_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)

    def compare_with(arm: str, **asked: Any) -> Callable[[dict[str, Any]], None]:
        def edit(config: dict[str, Any]) -> None:
            arms = {"arms": ["baseline", arm], "seeds": [1, 2]}
            del config["method"]
            for key in ("method", "knobs", "tolerant", "launch_choices"):
                del config["asked"][key]
            config.update(verb="compare", **arms)
            config["asked"].update(arms, **asked)

        return edit

    for number, (edit, said) in enumerate(
        (
            (compare_with(str(pipe)), "is a file or a folder, which is not opened"),
            (compare_with("/etc"), "is a file or a folder, which is not opened"),
            (
                compare_with("paper", carbon_intensity=str(pipe)),
                "--carbon-intensity with the value of the original command",
            ),
        )
    ):
        folder = Path(shutil.copytree(run, run.parent / str(number)))
        change(folder / "config.json", edit)
        # Opening the pipe would block until a writer opens it.
        assert run_command(["resume", str(folder), "--job", str(JOB)]) == 2
        assert said in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ what leads out of it


@pytest.mark.some(10)
@pytest.mark.parametrize(
    "name", ["journal.jsonl", "plan.json", "report.html", "policy", "figures", "tuned.json", "x/y"]
)
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_folder_with_links_or_pipes_is_rejected_before_anything_is_read_or_written(
    run: Path, name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("kept")
    path = run / name
    path.parent.mkdir(exist_ok=True)
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(kept / "file" if kind == "link" else kept / "new")
    for command in (
        ["resume", str(run), "--job", str(JOB)],
        ["report", str(run)],
        ["explain", str(run), "--job", str(JOB)],
    ):
        assert run_command(command) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "regular files and folders in a run's folder" in said
    assert [entry.name for entry in kept.iterdir()] == ["file"]
    assert (kept / "file").read_text() == "kept"


# ------------------------------------------------------------------------------------------------------- what is sent


def spooled(runs: Path, artifact: str) -> Path:
    """Return a run directory whose records name a file to be sent."""
    folder = runs / "20260101T000000Z-tune-foreign-abcdef"
    folder.mkdir(parents=True)
    (folder / "own.txt").write_text("own")
    rows = [
        {"kind": "begin", "run": "run-1", "values": {"name": "foreign", "parent": None}, "step": 0},
        {"kind": "artifact", "run": "run-1", "values": {"path": artifact}, "step": 0},
        {"kind": "artifact", "run": "run-1", "values": {"path": "own.txt"}, "step": 0},
        {"kind": "end", "run": "run-1", "values": {"status": "FINISHED"}, "step": 0},
    ]
    (folder / SPOOL).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("form", ["absolute", "relative", "linked folder"])
def test_foreign_folder_sends_only_its_own_files(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    key = tmp_path / "id_rsa"
    key.write_text("private")
    runs = tmp_path / "runs"
    folder = spooled(runs, {"absolute": str(key), "relative": "../../id_rsa", "linked folder": "linked"}[form])
    if form == "linked folder":
        (folder / "linked").mkdir()
        (folder / "linked" / "key").symlink_to(key)
    sent = send_pending(runs)
    arrived = [path.name for path in (runs / "artifacts").rglob("*") if path.is_file()]
    if form == "linked folder":
        # No command writes a folder with a link in it.
        assert (sent, arrived) == (0, [])
        assert "is a link" in caplog.text
    else:
        assert (sent, arrived) == (4, ["own.txt"])
        assert "lies outside" in caplog.text


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda folder: (folder / CURSOR).write_text(""), marks=pytest.mark.slow),
        lambda folder: (folder / CURSOR).write_text('{"sent": "all", "ids": {}}'),
        pytest.param(lambda folder: os.mkfifo(folder / CURSOR), marks=pytest.mark.slow),
        pytest.param(lambda folder: ((folder / SPOOL).unlink(), os.mkfifo(folder / SPOOL)), marks=pytest.mark.slow),
        pytest.param(lambda folder: (folder / "x").symlink_to("/"), marks=pytest.mark.slow),
    ],
)
def test_damaged_neighbour_folder_is_reported_once_and_blocks_no_command(
    damage: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(spooled(tmp_path, "own.txt"))
    for _ in range(2):
        found = autotune.tune(str(JOB), "random", steps=48, runs_dir=tmp_path)
        assert Path(found["run"], "plan.json").is_file()
    named = [line for line in caplog.messages if "tune-foreign" in line]
    assert len(named) == 1
    assert (tmp_path / DATABASE).is_file()


def test_damaged_record_is_skipped_and_the_others_are_sent(tmp_path: Path) -> None:
    folder = spooled(tmp_path, "own.txt")
    rows = (folder / SPOOL).read_text().splitlines()
    odd = ['{"kind": "begin"}', "[]", "null", '{"kind": "end", "run": 3, "values": {}}', "\x00", '{"kind": ["end"]}']
    of_nobody = '{"kind": "metrics", "run": "run-9", "values": {"x": 1}, "step": 0}'
    (folder / SPOOL).write_text("\n".join([*odd, rows[0], of_nobody, *rows[1:], ""]))
    assert send_pending(tmp_path) == len(rows) + len(odd) + 1
    assert [path.name for path in (tmp_path / "artifacts").rglob("*.txt")] == ["own.txt"]


# --------------------------------------------------------------------------------------------------------- one writer


def test_run_has_one_writer_and_errors_name_it(run: Path) -> None:
    with WriterLock(run):
        with pytest.raises(RunLockedError, match=rf"is being written by process {os.getpid()} on "):
            commands.resume(run, job=str(JOB))
        with pytest.raises(RunLockedError):
            RunDirectory.take_up(run)
    with RunDirectory.take_up(run):
        pass


def test_lock_ends_with_its_holder_even_after_a_fork(tmp_path: Path) -> None:
    code = f"""
import os, time
from pathlib import Path
from autotune.io.run_folder import WriterLock
lock = WriterLock(Path({str(tmp_path)!r}))
# One write each: a line's end that comes by itself might stand after the other's word.
os.write(1, b"held\\n" if os.fork() else b"forked\\n")
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as holder:
        assert holder.stdout is not None
        # Both have begun.
        assert {holder.stdout.readline() for _ in range(2)} == {b"held\n", b"forked\n"}
        with pytest.raises(RunLockedError, match=f"process {holder.pid}"):
            WriterLock(tmp_path)
        (tmp_path / ".autotune-0123456789abcdef.tmp").write_text("half")
        holder.kill()
        holder.wait()
        with WriterLock(tmp_path):
            # The half-written file of the killed writer is gone.
            assert [path.name for path in tmp_path.iterdir()] == [".writer"]
        os.killpg(holder.pid, 9)


@pytest.mark.slow
@pytest.mark.parametrize("pair", range(int(os.environ.get("PAIRS", "3"))))
def test_one_of_two_concurrent_resumes_is_rejected(run: Path, pair: int) -> None:
    rows = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    # Some windows remain to be measured, so that both are busy at the same time.
    (run / "journal.jsonl").write_bytes(b"".join(rows[: len(rows) // 2]))
    trials = (run / "trials.jsonl").read_bytes().splitlines(keepends=True)
    (run / "trials.jsonl").write_bytes(b"".join(trials[: max(len(rows) // 2 - 2, 0)]))
    command = [sys.executable, "-m", "autotune.cli.main", "resume", str(run), "--job", str(JOB), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(JOB.parent.parent), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=250) for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    refused = next(err for process, (_, err) in zip(both, said, strict=True) if process.returncode == 2)
    (line,) = [line for line in refused.splitlines() if line.startswith("autotune: ")]
    assert "is being written by process" in line
    found = RunDirectory.open(run).lines("trials.jsonl")
    assert [trial["number"] for trial in found] == list(range(len(found)))
    assert (run / "tuned.json").is_file()


# ------------------------------------------------------------------------------------------------- limits and speed


def test_oversized_plan_is_rejected_before_parsing(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with path.open("w") as file:
        file.write('{"version": 1, "accumulation_steps": 1, "precision": {')
        file.write(",".join(f'"unit{number}": "fp32"' for number in range(400_000)))
        file.write("}}")
    with pytest.raises(InputError, match="the file is larger than 4194304 bytes"):
        Plan.load(path)
