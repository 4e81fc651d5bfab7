"""Tests of signals to the command line: one line, the signal's exit code, and the end of all child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kills import JOB, PROGRAM
from leftovers import MARK, processes, wait_until

from autotune.cli.signals import EndedError, end_in_order


def started(runs: Path, *before: str) -> subprocess.Popen[str]:
    """Return a running tuning that measures plans in a child process."""
    process = subprocess.Popen(
        [
            *before,
            *PROGRAM,
            "tune",
            str(JOB),
            "--method",
            "random",
            "--steps",
            "9000",
            "--isolate",
            "--report-to",
            "none",
            "--runs-dir",
            str(runs),
        ],
        env={**os.environ, "PYTHONPATH": str(JOB.parent.parent), "OMP_NUM_THREADS": "1", MARK: str(runs)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: bool(list(runs.glob("*-tune-*/trials.jsonl"))), "it measures nothing")
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_command_ends_with_one_line_and_the_signal_exit_code_even_if_signalled_twice(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = started(tmp_path)
    process.send_signal(number)
    # As ``timeout`` does.
    os.killpg(process.pid, number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number
    last = said.splitlines()[-1]
    assert last.startswith(
        f"autotune: ended by {number.name}; everything measured so far is kept, finish with: autotune resume "
    )
    assert "Traceback" not in said
    wait_until(lambda: not processes(str(tmp_path)), "a process lives on")


@pytest.mark.slow
def test_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    process = started(tmp_path, "nohup")
    process.send_signal(signal.SIGHUP)
    trials = next(iter(tmp_path.glob("*-tune-*/trials.jsonl")))
    count = len(trials.read_text().splitlines())
    wait_until(lambda: len(trials.read_text().splitlines()) > count + 3, "it has stopped")
    process.send_signal(signal.SIGTERM)
    assert "ended by SIGTERM" in process.communicate(timeout=60)[1]
    assert process.returncode == 143


FORKED = """
import os, signal, time
from autotune.cli.signals import end_in_order

end_in_order()
if not (child := os.fork()):
    time.sleep(600)
time.sleep(0.5)
os.kill(child, signal.SIGTERM)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGTERM)
"""


def test_process_forked_by_a_job_keeps_the_default_signal_handling() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_signal_raises_an_exception_once() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    hook = sys.unraisablehook
    try:
        end_in_order()
        with pytest.raises(EndedError, match="ended by SIGTERM") as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.code == 143
        # The same signal again.
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


LOST = """
import signal, sys, time, weakref
from autotune.cli.signals import EndedError, end_in_order, interruptible

class Thing:
    pass

@interruptible
def work():
    thing = Thing()
    # Python drops what this raises.
    kept = weakref.ref(thing, lambda _: signal.raise_signal({number}))
    del thing
    print("goes on", flush=True)
    time.sleep(60)

# Whatever the test's own process ignores.
signal.signal({number}, signal.default_int_handler if {number} == signal.SIGINT else signal.SIG_DFL)
end_in_order()
try:
    work()
except EndedError as error:
    raise SystemExit(error.code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_within_a_callback_whose_errors_python_drops_still_ends_the_command(number: signal.Signals) -> None:
    script = LOST.format(number=int(number))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "goes on\n", "")
