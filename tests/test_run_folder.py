"""Tests of run folders: their names, and the lock for their one writer."""

import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import tiny_job
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import RunLockedError
from autotune.io.run_folder import WriterLock, new_run_folder
from autotune.live.decision_log import make_run_folder
from autotune.records.run_directory import RunDirectory

NAMES = [
    "../../..",
    "/etc",
    "org/model",
    "..",
    "...",
    "",
    "A" * 300,
    "ж" * 300,
    "a\0b",
    "a\nb",
    "\ud800",
    "\x1b[31m",
    "~",
    "C:\\x",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_run_is_created_in_the_runs_folder_whatever_its_name(name: str, tmp_path: Path) -> None:
    made = [
        make_run_folder(tmp_path / "runs", name, {}),
        RunDirectory.create(tmp_path / "runs", "tune", name, {}).path,
    ]
    assert sorted(made) == sorted((tmp_path / "runs").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_job_with_a_300_character_name_has_a_run(tmp_path: Path) -> None:
    job = tiny_job.make(name="n" * 300)
    run = RunDirectory.create(tmp_path, "tune", job, {})
    assert run.read("config.json")["job"] == job.name


@given(st.text())
def test_run_name_is_one_path_component_valid_on_any_file_system(name: str) -> None:
    path = new_run_folder(Path("runs"), "tune", name)
    assert path.parent == Path("runs")
    assert len(path.name.encode()) <= 255
    assert path.name.isprintable()


def test_letters_of_any_alphabet_are_kept() -> None:
    assert "-tune-größe_1-Модель-" in new_run_folder(Path("runs"), "tune", "größe_1 Модель").name


def test_two_runs_in_the_same_second_get_different_folders() -> None:
    assert new_run_folder(Path("runs"), "tune", "x") != new_run_folder(Path("runs"), "tune", "x")


def test_lock_leaves_no_trace_and_has_one_holder_at_a_time(tmp_path: Path) -> None:
    inside, most, taken = threading.Semaphore(1), [], Counter()

    def compete(name: int) -> None:
        for _ in range(200):
            try:
                with WriterLock(tmp_path):
                    # Another holder of the lock would have taken this.
                    most.append(inside.acquire(blocking=False))
                    taken[name] += 1
                    inside.release()
            except RunLockedError:
                continue

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(most)
    assert sum(taken.values()) > 10
    assert list(tmp_path.iterdir()) == []


def test_lock_that_a_script_leaves_is_released_at_its_end_without_a_word(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from autotune.io.run_folder import WriterLock; "
        f"sys.held = WriterLock(Path({str(tmp_path)!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert not list(tmp_path.iterdir())
