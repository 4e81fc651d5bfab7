"""An engine in a process of its own: the same training, and whatever becomes of the process is a value."""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import failing_job
import pytest

from autotune import EngineOptions, TorchEngine, load_job
from autotune.engines.isolated_engine import IsolatedEngine, Patience
from autotune.engines.wire import GarbledError, Wire
from autotune.errors import EngineError, JobError, PlanError
from autotune.measurement import Failure
from autotune.plan import Plan, Storage

JOB = str(Path(failing_job.__file__))
OPTIONS = EngineOptions(discard_steps=1)
SHORT = Patience(opening_s=60.0, first_s=4.0, grace_s=4.0)
EXPECTED = {
    "hang": (Failure.TIMEOUT, "no answer within "),
    "segfault": (Failure.CRASHED, "ended by SIGSEGV"),
    "kill": (Failure.CRASHED, "ended by SIGKILL"),
    "exit": (Failure.CRASHED, "ended with exit code 7: goodbye from the job"),
    "garbage": (Failure.CRASHED, "what arrived is no document"),
    "out_of_memory": (Failure.OUT_OF_MEMORY, "can't allocate memory"),
    "nan": (Failure.NON_FINITE, "loss nan"),
    "exception": (Failure.CRASHED, "KeyError"),
}


# What the processes of one test have in their environment: other tests run at the same time.
MARK = "AUTOTUNE_TEST_MARK"


def processes(mark: str) -> set[int]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if marked and state != "Z":
            found.add(int(folder.name))
    return found


def abandoned() -> set[Path]:
    """Return shared memory of torch's whose process is gone."""
    shared = Path("/dev/shm").glob("torch_*")
    return {path for path in shared if not (Path("/proc") / path.name.split("_")[1]).exists()}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Mark what a test starts, and see that nothing of it is left."""
    name = secrets.token_hex(8)
    monkeypatch.setenv(MARK, name)
    # A folder of its own for temporary files, with a short name: sockets lie in it.
    temporary = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    open_before, shared = descriptors(), abandoned()
    yield name
    assert not processes(name)
    assert descriptors() <= open_before
    assert abandoned() <= shared
    gc.collect()
    # torch keeps what it compiled for the next process.
    assert not [path for path in temporary.iterdir() if not path.name.startswith("torchinductor")]


def test_a_child_trains_as_this_process_would() -> None:
    here = TorchEngine(load_job("digits"), seed=3, options=OPTIONS)
    there = IsolatedEngine("digits", seed=3, options=OPTIONS, threads=1)
    try:
        assert there.space == here.space
        assert there.locks.keys() == here.locks.keys()
        lean = here.space.leanest()
        for plan in (here.space.baseline(), lean):
            here.apply(plan)
            there.apply(plan)
            one, two = here.run(3), there.run(3)
            assert (one.loss, one.samples, one.peak_bytes) == (two.loss, two.samples, two.peak_bytes)
            assert one.gradient == two.gradient
        assert here.evaluate() == there.evaluate()
    finally:
        there.close()


@pytest.mark.parametrize("kind", failing_job.KINDS)
def test_what_becomes_of_the_child_is_a_value_and_the_next_window_runs(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TorchEngine(load_job(JOB), options=OPTIONS)
    monkeypatch.setenv(failing_job.FAILURE, kind)
    # The first call inspects the job; windows follow.
    monkeypatch.setenv(failing_job.AT, "6")
    engine = IsolatedEngine(JOB, options=OPTIONS, patience=SHORT, threads=1)
    try:
        assert engine.run(3).failure is None
        failure, said = EXPECTED[kind]
        broken = engine.run(3)
        assert broken.failure is failure
        assert said in broken.failure_detail
        monkeypatch.delenv(failing_job.FAILURE)
        lives_on = kind in ("out_of_memory", "nan", "exception")
        assert engine.children == 1
        after = engine.run(3)
        assert after.failure is None
        assert engine.children == (1 if lives_on else 2)
        # A new child begins where the job does.
        if not lives_on:
            assert after.loss == plain.run(3).loss
    finally:
        engine.close()


@pytest.mark.slow
def test_nothing_piles_up_over_200_trials(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def held() -> dict[str, int]:
        gc.collect()
        return {
            "descriptors": descriptors(),
            "threads": threading.active_count(),
            "processes": len(processes(mark)),
            "shared": len(abandoned()),
            "files": len(list(Path(tempfile.gettempdir()).rglob("*"))),
        }

    threads = threading.active_count()
    turns = tmp_path / "turns"
    turns.write_text(f"{0:<9}")
    engine = IsolatedEngine(JOB, options=OPTIONS, patience=SHORT, threads=1)
    try:
        engine.run(3)
        engine.restore(engine.snapshot())
        before = held()
        monkeypatch.setenv(failing_job.TURNS, str(turns))
        monkeypatch.setenv(failing_job.TIMES, "10000")
        monkeypatch.setenv(failing_job.AT, "20")
        child = engine._child
        assert child is not None
        # The next one finds in its environment how it fails.
        os.kill(child.process.pid, signal.SIGKILL)
        met = Counter(engine.run(3).failure for _ in range(200))
        assert met[None] > 100
        assert all(met[failure] >= 2 for failure, _ in EXPECTED.values())
        assert engine.children > 10
        after = held()
        assert after == before
    finally:
        engine.close()
    assert threading.active_count() <= threads


def test_a_new_child_goes_on_from_the_last_snapshot() -> None:
    engine = IsolatedEngine("digits", options=OPTIONS, threads=1)
    try:
        engine.run(4)
        kept = engine.snapshot()
        expected = [engine.run(2).loss for _ in range(2)]
        child = engine._child
        assert child is not None
        os.kill(child.process.pid, signal.SIGKILL)
        assert engine.run(2).failure is Failure.CRASHED
        assert [engine.run(2).loss for _ in range(2)] == expected
        engine.restore(kept)
        assert [engine.run(2).loss for _ in range(2)] == expected
    finally:
        engine.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.run(1)


def test_what_the_job_started_ends_with_the_child(tmp_path: Path) -> None:
    job = tmp_path / "starts.py"
    job.write_text(
        f"import subprocess, sys\nsys.path.insert(0, {str(Path(JOB).parent)!r})\nfrom failing_job import job\n"
        f"started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(started.pid))\n"
    )
    engine = IsolatedEngine(str(job), options=OPTIONS)
    assert engine.run(1).failure is None
    started = int((tmp_path / "pid").read_text())
    os.kill(started, 0)
    engine.close()
    for _ in range(50):
        if not Path(f"/proc/{started}").exists() or "Z" in Path(f"/proc/{started}/stat").read_text().split()[2]:
            break
        time.sleep(0.1)
    else:
        pytest.fail("a process that the job started lives on")


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\nfrom autotune.engines.isolated_engine import IsolatedEngine\n"
        f"engine = IsolatedEngine({JOB!r})\nprint(engine._child.process.pid, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child lives on")
    # Nobody is left to remove what the two told each other.
    for left in Path(tempfile.gettempdir()).iterdir():
        shutil.rmtree(left, ignore_errors=True)


def test_a_job_that_cannot_be_built_is_refused_in_one_line(tmp_path: Path) -> None:
    dies = tmp_path / "dies.py"
    dies.write_text("import os\nprint('no data here')\nos._exit(3)\n")
    for reference, said in (
        ("nothing", "no job has the name 'nothing'"),
        (str(dies), "building it ends with crashed: ended with exit code 3: no data here"),
    ):
        with pytest.raises(JobError, match=said) as caught:
            IsolatedEngine(reference)
        assert "\n" not in str(caught.value)
    with pytest.raises(JobError, match="a job's name"):
        IsolatedEngine(failing_job.job)  # type: ignore[arg-type]


def test_a_plan_outside_the_space_is_refused_and_the_child_lives_on() -> None:
    engine = IsolatedEngine(JOB, options=OPTIONS)
    try:
        with pytest.raises(PlanError, match="accumulation_steps is 3"):
            engine.apply(Plan(accumulation_steps=3))
        engine.apply(Plan(storage={"blocks.0": Storage.RECOMPUTE}))
        assert engine.plan.storage_of("blocks.0") is Storage.RECOMPUTE
        assert engine.run(2).failure is None
        assert engine.children == 1
    finally:
        engine.close()


def test_the_wire_tells_documents_from_everything_else() -> None:
    import socket

    for sent, said in (
        (b"x" * 64, GarbledError),
        (b"ATN1" + (10**12).to_bytes(8, "big"), GarbledError),
        (b"ATN1" + (3).to_bytes(8, "big") + b"{]}", GarbledError),
        (b"ATN1" + (2).to_bytes(8, "big") + b"[]", GarbledError),
        (b"ATN1" + (9).to_bytes(8, "big") + b"{", EOFError),
        (b"", EOFError),
    ):
        ours, theirs = socket.socketpair()
        wire = Wire(ours)
        theirs.sendall(sent)
        theirs.close()
        with pytest.raises(said):
            wire.receive(5.0)
        wire.close()
    ours, theirs = socket.socketpair()
    one, two = Wire(ours), Wire(theirs)
    with pytest.raises(TimeoutError):
        one.receive(0.05)
    two.send({"answer": [1, None, float("inf")]})
    assert one.receive(5.0) == {"answer": [1, None, float("inf")]}
    one.close()
    two.close()
