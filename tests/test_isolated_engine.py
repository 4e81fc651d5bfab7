"""Tests of an engine in a separate process: it trains identically, and failures of the process are returned."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import failing_job
import pytest
from leftovers import MARK, abandoned, descendants, processes, wait_until

from autotune import EngineOptions, TorchEngine, load_job
from autotune.engines.isolated_engine import IsolatedEngine, Patience
from autotune.engines.wire import GarbledError, Wire
from autotune.errors import EngineError, JobError, PlanError
from autotune.measurement import Failure
from autotune.mechanics import known_precisions
from autotune.mechanics.precision import useful_precisions
from autotune.plan import Plan, Precision, Storage

JOB = str(Path(failing_job.__file__))
OPTIONS = EngineOptions(discard_steps=1)
SHORT = Patience(opening_s=60.0, first_s=4.0, grace_s=4.0)
EXPECTED = {
    "hang": (Failure.TIMEOUT, "no answer within "),
    "segfault": (Failure.CRASHED, "ended by SIGSEGV"),
    "kill": (Failure.CRASHED, "ended by SIGKILL"),
    "exit": (Failure.CRASHED, "ended with exit code 7: goodbye from the job"),
    "garbage": (Failure.CRASHED, "received something that is not a document"),
    "out_of_memory": (Failure.OUT_OF_MEMORY, "can't allocate memory"),
    "nan": (Failure.NON_FINITE, "loss nan"),
    "exception": (Failure.CRASHED, "KeyError"),
}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Mark the processes that a test starts, and check that none is left."""
    name = secrets.token_hex(8)
    monkeypatch.setenv(MARK, name)
    temporary = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    open_before, shared = descriptors(), abandoned()
    yield name
    assert not processes(name)
    assert descriptors() <= open_before
    assert abandoned() <= shared
    gc.collect()
    # torch keeps compiled code for the next process.
    assert not [path for path in temporary.iterdir() if not path.name.startswith("torchinductor")]


def trainer(engine: IsolatedEngine) -> int:
    """Return the process that trains."""
    assert engine._child is not None
    (found,) = descendants(engine._child.process.pid)
    return found


@pytest.mark.slow
def test_child_process_trains_as_this_process_would() -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", failing_job.KINDS)
def test_end_of_the_child_process_is_returned_and_the_next_window_runs(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TorchEngine(load_job(JOB), options=OPTIONS)
    monkeypatch.setenv(failing_job.FAILURE, kind)
    # The first call inspects the job; the later ones are windows.
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
        # A new child process starts at the beginning of the job.
        if not lives_on:
            assert after.loss == plain.run(3).loss
    finally:
        engine.close()


@pytest.mark.slow
def test_200_trials_leak_no_resources(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        # The environment tells the next child process how to fail.
        os.kill(trainer(engine), signal.SIGKILL)
        met = Counter(engine.run(3).failure for _ in range(200))
        assert met[None] > 100
        assert all(met[failure] >= 2 for failure, _ in EXPECTED.values())
        assert engine.children > 10
        after = held()
        assert after == before
    finally:
        engine.close()
    assert threading.active_count() <= threads


@pytest.mark.slow
def test_new_child_process_continues_from_the_last_snapshot() -> None:
    engine = IsolatedEngine("digits", options=OPTIONS, threads=1)
    try:
        engine.run(4)
        kept = engine.snapshot()
        expected = [engine.run(2).loss for _ in range(2)]
        os.kill(trainer(engine), signal.SIGKILL)
        assert engine.run(2).failure is Failure.CRASHED
        assert [engine.run(2).loss for _ in range(2)] == expected
        engine.restore(kept)
        assert [engine.run(2).loss for _ in range(2)] == expected
    finally:
        engine.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.run(1)


STARTS = """
import os, subprocess, sys
sys.path.append(%r)
from failing_job import job

sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
started = subprocess.Popen(sleep)
# In a session of its own, and nobody's child.
if not (middle := os.fork()):
    subprocess.Popen(sleep, start_new_session=True)
    os._exit(0)
os.waitpid(middle, 0)
open(f"/dev/shm/torch_{os.getpid()}_{os.environ['%s']}", "w").close()
"""


def starting_job(folder: Path) -> str:
    """Return a job that starts its own processes, and leaves a shared memory file if it is killed."""
    job = folder / "starts.py"
    job.write_text(STARTS % (str(Path(JOB).parent), MARK))
    return str(job)


def test_processes_started_by_the_job_end_with_the_child_in_any_session(mark: str, tmp_path: Path) -> None:
    engine = IsolatedEngine(starting_job(tmp_path), options=OPTIONS)
    assert engine.run(1).failure is None
    # Marked processes: the supervisor, the trainer and those that the job started, but not this one.
    assert len(processes(mark)) == 4
    assert len(list(Path("/dev/shm").glob(f"torch_*_{mark}"))) == 1
    engine.close()
    wait_until(lambda: not processes(mark), "a process that the job started lives on")
    assert not list(Path("/dev/shm").glob(f"torch_*_{mark}"))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_of_the_child_remains_after_its_parent_was_ended(
    how: signal.Signals, mark: str, tmp_path: Path
) -> None:
    script = (
        "import time\nfrom autotune.engines.isolated_engine import IsolatedEngine\n"
        f"engine = IsolatedEngine({starting_job(tmp_path)!r})\nengine.run(2)\nkept = engine.snapshot()\n"
        "print('ready', flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    assert len(processes(mark)) == 5
    parent.send_signal(how)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not processes(mark), "a process lives on")
    assert not list(Path("/dev/shm").glob(f"torch_*_{mark}"))
    assert not [path for path in Path(tempfile.gettempdir()).iterdir() if "torchinductor" not in path.name]


def test_job_that_cannot_be_built_is_rejected_in_one_line(tmp_path: Path) -> None:
    dies = tmp_path / "dies.py"
    dies.write_text("import os\nprint('no data here')\nos._exit(3)\n")
    for reference, said in (
        ("nothing", "no job has the name 'nothing'"),
        (str(dies), r"the model could not be built \(crashed: ended with exit code 3: no data here\)"),
    ):
        with pytest.raises(JobError, match=said) as caught:
            IsolatedEngine(reference)
        assert "\n" not in str(caught.value)
    with pytest.raises(JobError, match="a job's name"):
        IsolatedEngine(failing_job.job)  # type: ignore[arg-type]


def test_child_that_is_killed_while_it_builds_the_model_costs_a_start_or_a_window(tmp_path: Path) -> None:
    doomed, dying = tmp_path / "doomed.py", tmp_path / "dying"
    doomed.write_text(
        "import os, signal\nfrom pathlib import Path\nimport failing_job\njob = failing_job.job\n"
        f"if Path({str(dying)!r}).exists():\n"
        f"    Path({str(dying)!r}).unlink()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    dying.touch()
    engine = IsolatedEngine(str(doomed), options=OPTIONS)
    try:
        assert engine.children == 2
        dying.touch()
        engine._end()
        failed = engine.run(1)
        assert failed.failure is Failure.CRASHED
        assert failed.failure_detail == "ended by SIGKILL"
        assert engine.run(1).failure is None
    finally:
        engine.close()


def test_plan_outside_the_space_is_rejected_and_the_child_survives() -> None:
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


@pytest.mark.slow
def test_processes_share_what_they_know_of_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    known_precisions.forget()
    monkeypatch.setenv(known_precisions.PRECISIONS_VARIABLE, "fp16")
    engine = IsolatedEngine(JOB, options=OPTIONS)
    try:
        assert engine.space.precisions == (Precision.FP32, Precision.FP16)
        # The answer of the first child counts here and in the next one.
        monkeypatch.setenv(known_precisions.PRECISIONS_VARIABLE, "fp32")
        assert useful_precisions("cpu") == engine.space.precisions
        engine._end()
        engine.apply(engine.space.plan(accumulation_steps=1, precision=Precision.FP16))
        assert engine.run(1).failure is None
        assert engine.children == 2
    finally:
        engine.close()
        known_precisions.forget()


def test_wire_rejects_everything_but_complete_documents() -> None:
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
    assert not one.ready(0.01)
    two.send({})
    assert one.ready(5.0)
    assert one.receive(5.0) == {}
    with tempfile.TemporaryFile() as kept:
        two.send_file(kept.fileno())
        with os.fdopen(one.receive_file(), "r+b") as same:
            same.write(b"kept")
        assert os.pread(kept.fileno(), 9, 0) == b"kept"
    two.send({"no": "file"})
    with pytest.raises(GarbledError, match="not a file"):
        one.receive_file()
    two.close()
    # The end of the stream is received, too.
    assert one.ready(5.0)
    one.close()
