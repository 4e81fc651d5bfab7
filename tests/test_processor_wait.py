"""Tests that a busy machine is noticed: disturbed runs are repeated, and no arm is called the fastest."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_job

import autotune
from autotune.campaign import comparison
from autotune.errors import InputError
from autotune.mechanics.processor_wait import BUSY_VARIABLE, ProcessorWait, busy_frac, is_disturbed, mean_wait
from autotune.report.campaign_run import read_campaign
from autotune.report.terminal_tables import verdict_line
from autotune.report.writing import page_for

counted = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not count waiting")


@pytest.fixture
def load() -> Iterator[None]:
    """Run two programs per core that never rest."""
    programs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * len(os.sched_getaffinity(0)))
    ]
    yield
    for program in programs:
        program.kill()
        program.wait()


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


def test_windows_are_weighted_by_their_time_and_one_that_is_unknown_makes_the_whole_unknown() -> None:
    assert mean_wait([(1.0, 0.0), (3.0, 0.4)]) == pytest.approx(0.3)
    assert mean_wait([(1.0, 0.0), (3.0, None)]) is None
    assert mean_wait([]) is None
    assert not is_disturbed(None)


@pytest.mark.parametrize("text", ["much", "-0.1", "1.5", "nan"])
def test_a_wrong_threshold_is_refused_before_anything_is_written(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BUSY_VARIABLE, text)
    with pytest.raises(InputError, match=f"{BUSY_VARIABLE}: is '{text}'"):
        autotune.compare(tiny_job.make(), ["sqrt"], seeds=2, runs_dir=tmp_path)
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
    job = tiny_job.make(target=None, max_steps=12, evaluate_every=6)
    found = autotune.compare(job, ["sqrt"], seeds=2, runs_dir=tmp_path)
    assert len(ran) == 8
    assert found["busy"]["runs"] == found["busy"]["of"] == 4
    assert [entry["verdict"] for entry in found["against_baseline"]] == ["not comparable"]
    assert verdict_line(found).startswith("Nothing can be compared: the machine was busy: 4 of 4 runs waited")
    kept = [run["waited_frac"] for arm in found["arms"] for run in arm["runs"]]
    assert sorted(kept) == sorted(min(pair) for pair in zip(ran[::2], ran[1::2], strict=True))
    assert page_for(read_campaign(Path(found["run"]))).verdict.startswith(
        "Nothing can be compared: the machine was busy"
    )
