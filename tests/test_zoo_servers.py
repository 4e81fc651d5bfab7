"""Tests of failing tracking servers: they do not affect how or when a followed run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from leftovers import MARK, processes, wait_until
from test_tracking import dead_server

from autotune.live.following_process import OUTPUT
from autotune.records.tracking_spool import SPOOL

TESTS = Path(__file__).parent

SCRIPT = """
import os, signal, sys
import autotune
from pathlib import Path
from test_live import RESTLESS, Wanders
from test_zoo import assert_same, loop_of, trained
from zoo import Run

class Lost(Run):
    def finish(self):
        # Nobody detaches.
        tuner, self.tuner = self.tuner, None
        super().finish()
        self.tuner = tuner
        return self

loop = loop_of("gpt")
alone = trained(loop, Run(steps=12))
attaching = dict(policy=Wanders(), memory_budget_bytes=10**9, limits=RESTLESS, runs_dir=sys.argv[1])
attaching["settings"] = autotune.Settings(report_to="mlflow")
attached = trained(loop, Lost(attaching, steps=12))
assert_same(alone, attached)
(child,) = (child for path in Path("/proc/self/task").glob("*/children") for child in path.read_text().split())
os.kill(int(child), signal.SIGSTOP)
if sys.argv[2] == "detached":
    attached.tuner.detach()
    sys.exit(7)
if sys.argv[2] == "raised":
    raise ValueError("somebody's own")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "end", "code"),
    [("absent", "raised", 1), ("hanging", "detached", 7), ("answering 500", "killed", -signal.SIGKILL)],
)
def test_dead_server_changes_neither_a_run_nor_its_end(server: str, end: str, code: int, tmp_path: Path) -> None:
    mark = f"{os.getpid()}-{server}"
    with dead_server(server) as uri:
        paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        environment = {**os.environ, "PYTHONPATH": paths, "MLFLOW_TRACKING_URI": uri, MARK: mark}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path), end],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == code, done.stderr
        # Neither the run nor the reader of its output waited for the sender, which was stopped.
        (follower,) = processes(mark)
        os.kill(follower, signal.SIGCONT)
        wait_until(lambda: not processes(mark), "what follows the run goes on without it", 200.0)
    (folder,) = tmp_path.iterdir()
    assert '"begin"' in (folder / SPOOL).read_text()
    assert "does not answer" in (folder / OUTPUT).read_text()
