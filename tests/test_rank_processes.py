"""Tests of rank processes: they connect over loopback only, end together and report the first failure."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from leftovers import MARK, descendants, listening, processes, wait_until

from autotune.engines.rank_processes import RanksError, run_on_ranks
from autotune.errors import JobError
from autotune.measurement import Failure

TESTS = Path(__file__).parent
SEARCHED = os.pathsep.join([str(TESTS.parent), str(TESTS)])


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Mark the processes that a test starts, and check that none is left."""
    monkeypatch.setenv(MARK, tmp_path.name)
    monkeypatch.setenv("PYTHONPATH", SEARCHED)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path.name
    assert not processes(tmp_path.name)
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3))])
def test_ranks_connect_only_over_loopback(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    done: list[float] = []
    found = run_on_ranks("gloo_rank", {}, ranks=ranks, on_progress=done.append)
    assert found["sum"] == sum(range(1, ranks + 1))
    assert found["listening"] == ["127.0.0.1"]
    assert (found["threads"], found["master"]) == ("1", "127.0.0.1")
    assert done == [0.25]


@pytest.mark.parametrize(
    ("how", "ranks", "said"),
    [
        pytest.param("raise", 3, 'crashed: rank 2: KeyError: "the rank\'s own"', marks=pytest.mark.slow),
        pytest.param("exit 7", 2, "crashed: rank 1: ended with exit code 7", marks=pytest.mark.slow),
        ("exit 0", 3, "crashed: rank 2: ended with exit code 0"),
        ("kill", 2, "crashed: rank 1: ended by SIGKILL"),
    ],
)
def test_rank_that_failed_first_is_named_although_others_fail_in_consequence(how: str, ranks: int, said: str) -> None:
    with pytest.raises(RanksError, match=f"{ranks} ranks end with ") as caught:
        run_on_ranks("gloo_rank", {"rank": ranks - 1, "how": how}, ranks=ranks)
    assert said in str(caught.value)
    assert (caught.value.failure, caught.value.tried) == (Failure.CRASHED, "to add")


def test_refusal_by_any_rank_is_reported_in_its_words() -> None:
    with pytest.raises(JobError, match=r"job 'x': a batch has 1 sample \(allowed: 2 or more\)"):
        run_on_ranks("gloo_rank", {"rank": 1, "how": "refuse"}, ranks=2)


@pytest.mark.slow
def test_unresponsive_ranks_are_ended() -> None:
    with pytest.raises(RanksError, match="2 ranks reported nothing for 8 s") as caught:
        run_on_ranks("gloo_rank", {"rank": 1, "how": "hang"}, ranks=2, patience_s=8.0)
    assert caught.value.failure is Failure.TIMEOUT


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_parent_process_however_it_ends(how: signal.Signals, mark: str) -> None:
    code = (
        "from autotune.engines.rank_processes import run_on_ranks; "
        "run_on_ranks('gloo_rank', {'rank': 1, 'how': 'hang'}, ranks=2)"
    )
    asker = subprocess.Popen([sys.executable, "-P", "-c", code], start_new_session=True)
    # The parent, the supervisor and two connected ranks, which listen on the store and two gloo devices.
    wait_until(lambda: len(processes(mark)) == 4 and len(listening(descendants(asker.pid))) == 1, "the ranks never met")
    asker.send_signal(how)
    asker.wait()
    wait_until(lambda: not processes(mark), "a rank lives on")


def test_all_ranks_end_with_their_supervisor(mark: str) -> None:
    code = (
        "from autotune.engines.rank_processes import run_on_ranks; "
        "run_on_ranks('gloo_rank', {'rank': 1, 'how': 'hang'}, ranks=2)"
    )
    asker = subprocess.Popen([sys.executable, "-P", "-c", code], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(processes(mark)) == 4, "the ranks were never started")
    os.kill(min(descendants(asker.pid)), signal.SIGKILL)
    said = asker.communicate()[1].splitlines()[-1]
    assert "2 ranks end with crashed: ended by SIGKILL" in said
    wait_until(lambda: not processes(mark), "a rank lives on")
