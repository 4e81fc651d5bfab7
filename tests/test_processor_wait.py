"""Tests that a busy machine is noticed: disturbed runs are repeated, and no arm is called the fastest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_job
from leftovers import wait_until

import autotune
from autotune.campaign import comparison
from autotune.errors import InputError
from autotune.mechanics import processor_wait
from autotune.mechanics.processor_wait import (
    BUSY_VARIABLE,
    ProcessorWait,
    Repetitions,
    busy_frac,
    is_disturbed,
    mean_wait,
)
from autotune.report.campaign_run import read_campaign
from autotune.report.terminal_tables import verdict_line
from autotune.report.writing import page_for

counted = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not count waiting")


@pytest.fixture
def load() -> Iterator[None]:
    """Run two programs per core that never rest and are no children of this one."""
    count = 2 * len(os.sched_getaffinity(0))
    start = f"for i in $(seq {count}); do {sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!; done"
    found = subprocess.run(["sh", "-c", start], capture_output=True, text=True, check=True)
    yield
    for process in found.stdout.split():
        os.kill(int(process), signal.SIGKILL)


def work(seconds: float) -> float | None:
    watch, end = ProcessorWait(), time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return watch.frac()


@counted
@pytest.mark.usefixtures("load")
def test_waiting_for_processors_that_other_programs_have_is_measured() -> None:
    found = work(1.0)
    assert found is not None
    assert 0.2 < found < 1
    assert is_disturbed(found) == (found > busy_frac())


@counted
@pytest.mark.usefixtures("load")
def test_a_process_that_sleeps_is_not_disturbed() -> None:
    watch = ProcessorWait()
    time.sleep(0.5)
    found = watch.frac()
    assert found is not None
    assert found < 0.2


@counted
@pytest.mark.usefixtures("load")
def test_what_the_process_and_its_children_take_from_each_other_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if nothing else ran on this machine.
    monkeypatch.setattr(processor_wait, "_used_s", processor_wait._own_s)
    assert work(0.5) == pytest.approx(0.0, abs=0.02)


@counted
def test_processor_time_of_children_is_that_of_the_process() -> None:
    before = processor_wait._own_s()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    wait_until(lambda: processor_wait._own_s() - before > 0.2, "the child's time does not count")
    child.kill()
    child.wait()
    # Other clocks count those that have ended.
    assert processor_wait._own_s() - before > 0.1


@counted
def test_threads_that_end_are_left_out_and_only_the_oldest_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    threads = [threading.Thread(target=ends.wait) for _ in range(100)]
    for thread in threads:
        thread.start()
    found = processor_wait._threads()
    assert found is not None
    assert str(os.getpid()) in found
    assert len(found) == processor_wait._MOST_THREADS
    gone = [path.name for path in Path("/proc/self/task").iterdir()]
    ends.set()
    for thread in threads:
        thread.join()
    monkeypatch.setattr(os, "listdir", lambda _: gone)
    assert set(processor_wait._threads() or ()) < set(found)


def test_main_thread_is_read_though_later_threads_have_lower_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = [str(number) for number in range(2, 2 + processor_wait._MOST_THREADS)]
    monkeypatch.setattr(os, "listdir", lambda _: [*lower, str(os.getpid())])
    assert str(os.getpid()) in (processor_wait._threads() or ())


def test_windows_are_weighted_by_their_time_and_one_that_is_unknown_makes_the_whole_unknown() -> None:
    assert mean_wait([(1.0, 0.0), (3.0, 0.4)]) == pytest.approx(0.3)
    assert mean_wait([(1.0, 0.0), (3.0, None)]) is None
    assert mean_wait([]) is None
    assert not is_disturbed(None)


def test_after_three_vain_repetitions_no_more_are_made_until_a_measurement_is_undisturbed() -> None:
    repetitions = Repetitions()
    busy, quiet = busy_frac() + 0.01, 0.0
    assert not repetitions.is_due(quiet)
    assert not repetitions.is_due(None)
    for _ in range(3):
        assert repetitions.is_due(busy)
        repetitions.made(busy)
    assert not repetitions.is_due(busy)
    assert not repetitions.is_due(quiet)
    for waited in (busy, busy, quiet, busy, busy, busy):
        assert repetitions.is_due(busy)
        repetitions.made(waited)
    assert not repetitions.is_due(busy)


def tune_for(runs: Path) -> Callable[[], dict[str, Any]]:
    return lambda: autotune.tune(tiny_job.make(), "random", steps=45, runs_dir=runs)


@pytest.mark.slow
@counted
@pytest.mark.usefixtures("load")
def test_a_disturbed_window_is_repeated_once_and_a_search_resumes_under_another_threshold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BUSY_VARIABLE, "0")
    found = tune_for(tmp_path)()
    folder = Path(found["run"])
    rows = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    windows = [row for row in rows if "window" in row["what"]]
    repeated = [row for row in windows if row["result"]["steps"] == 2 * row["what"]["steps"]]
    assert repeated
    for name in ("tuned.json", "plan.json"):
        (folder / name).unlink()
    monkeypatch.setenv(BUSY_VARIABLE, "1")
    again = autotune.resume(folder, job=tiny_job.make())
    assert again["plan"] == found["plan"]
    assert again["tuning_steps"] == found["tuning_steps"]


@pytest.mark.parametrize("text", ["much", "-0.1", "1.5", "nan"])
def test_a_wrong_threshold_is_refused_before_anything_is_written(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BUSY_VARIABLE, text)
    for command in (lambda: autotune.compare(tiny_job.make(), ["sqrt"], runs_dir=tmp_path), tune_for(tmp_path)):
        with pytest.raises(InputError, match=f"{BUSY_VARIABLE}: is '{text}'"):
            command()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@counted
@pytest.mark.usefixtures("load")
def test_a_comparison_on_a_busy_machine_repeats_its_runs_once_says_so_and_names_no_fastest_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BUSY_VARIABLE, "0.02")
    ran = []
    run_arm = comparison._run_arm

    def counting(*args: object) -> object:
        record = run_arm(*args)
        ran.append(record.waited_frac)
        return record

    monkeypatch.setattr(comparison, "_run_arm", counting)
    job = tiny_job.make(target=None, max_steps=60, evaluate_every=30)
    found = autotune.compare(job, ["sqrt"], seeds=2, runs_dir=tmp_path)
    # After three repetitions that were disturbed too, the fourth run was not repeated.
    assert len(ran) == 7
    assert found["busy"]["runs"] == found["busy"]["of"] == 4
    assert [entry["verdict"] for entry in found["against_baseline"]] == ["not comparable"]
    assert verdict_line(found).startswith("Nothing can be compared: the machine was busy: 4 of 4 runs waited")
    kept = [run["waited_frac"] for arm in found["arms"] for run in arm["runs"]]
    assert sorted(kept) == sorted([*(min(pair) for pair in zip(ran[:6:2], ran[1:6:2], strict=True)), ran[6]])
    assert page_for(read_campaign(Path(found["run"]))).verdict.startswith(
        "Nothing can be compared: the machine was busy"
    )
