"""Real commands in separate processes that are killed at random instants and resumed."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from leftovers import MARK, abandoned, processes, wait_until

logger = logging.getLogger(__name__)

JOB = Path(__file__).parent / "tiny_job.py"
PROGRAM = [sys.executable, "-m", "autotune.cli.main"]
# Allowed exit codes of a killed process: those of the command line or, before it has started, of Python.
CODES = {
    signal.SIGKILL: {-signal.SIGKILL},
    signal.SIGTERM: {143, -signal.SIGTERM},
    signal.SIGINT: {130, -signal.SIGINT},
}


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Time and way of killing a command.

    Attributes:
        after_s: seconds after its start.
        how: the signal.
        whom: ``process`` (the started process), ``group`` (its process group), or ``all`` (all its descendants).
    """

    after_s: float
    how: signal.Signals
    whom: str

    @classmethod
    def drawn(cls, generator: random.Random, first_s: float, last_s: float) -> Kill:
        """Return a kill at a random instant within a range."""
        how, whom = generator.choice(
            [
                (signal.SIGKILL, "process"),
                (signal.SIGKILL, "group"),
                (signal.SIGKILL, "all"),
                (signal.SIGTERM, "process"),
                (signal.SIGTERM, "group"),
                (signal.SIGINT, "group"),
            ]
        )
        return cls(after_s=generator.uniform(first_s, last_s), how=how, whom=whom)

    def strike(self, process: subprocess.Popen[bytes], mark: str) -> None:
        """Kill the processes that a kill names."""
        if self.whom == "process":
            process.send_signal(self.how)
        elif self.whom == "group":
            os.killpg(process.pid, self.how)
        else:
            while found := processes(mark):
                for one in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one, self.how)


def killed(command: list[str], folder: Path, kill: Kill | None, codes: set[int] | None = None) -> tuple[int, bool]:
    """Run a command, kill it, and check that it leaves no temporary files and no processes.

    Args:
        command: the command.
        folder: a folder for its temporary files only; it is created if it is missing.
        kill: when and how; ``None`` lets it end.
        codes: allowed exit codes after the kill; ``None`` for those of our command line.

    Returns:
        The exit code, and whether the command was killed before it had ended.
    """
    mark, shared = secrets.token_hex(8), abandoned()
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(JOB.parent.parent), str(JOB.parent)]),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
        MARK: mark,
    }
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    )
    struck = False
    try:
        process.wait(kill.after_s if kill is not None else 280)
    except subprocess.TimeoutExpired:
        assert kill is not None, "it does not end"
        struck = True
        kill.strike(process, mark)
    said, code = process.communicate(timeout=120)[1].decode(), process.returncode
    if struck and kill is not None and code != 0:
        assert code in (CODES[kill.how] if codes is None else codes), said
        if code == 143:
            assert said.splitlines()[-1].startswith("autotune: ended by SIGTERM")
            assert "Traceback" not in said
    wait_until(lambda: not processes(mark), f"a process lives on after {kill}", timeout_s=90)
    assert abandoned() <= shared, kill
    # torch keeps compiled code for the next process.
    left = [path for path in folder.iterdir() if not path.name.startswith("torchinductor")]
    assert not left, f"{left} after {kill}"
    logger.info("%s: %s", kill if struck else "not killed", code)
    return code, struck and code != 0


def kill_campaigns(
    asked: list[str], root: Path, few: int, seed: int, look: Callable[[Path, bool], None], *, last_s: float = 7.0
) -> None:
    """Tune or compare ``tiny_job``, kill it at random instants, and check the files after each kill.

    The environment variable ``KILLS`` sets the number of kills, spread over campaigns of at most ten kills each.

    Args:
        asked: the command and its options, without the job.
        root: an empty folder.
        few: the number of kills without ``KILLS``.
        seed: random seed of the instants.
        look: function called with the folder of a campaign and whether the campaign has finished.
        last_s: latest time of a kill, in seconds after the start of a command.
    """
    generator, wanted, kills = random.Random(seed), int(os.environ.get("KILLS", str(few))), 0
    campaigns = 0
    while kills < wanted:
        folder = root / str(campaigns)
        folder.mkdir()
        campaigns += 1
        kills += _killed(asked, folder, generator, min(wanted - kills, 10), look, last_s)


def _killed(
    asked: list[str], runs: Path, generator: random.Random, most: int, look: Callable[[Path, bool], None], last_s: float
) -> int:
    command = [*PROGRAM, asked[0], str(JOB), *asked[1:], "--runs-dir", str(runs)]
    kills, done = 0, False
    while not done:
        # Most of the time is start-up; later commands may finish.
        kill = Kill.drawn(generator, 2.0, last_s) if kills < most else None
        code, struck = killed(command, runs.parent / f"{runs.name}-tmp", kill)
        kills += struck
        done = code == 0
        for folder in [path for path in runs.iterdir() if (path / "config.json").is_file()]:
            command = [*PROGRAM, "resume", str(folder), "--job", str(JOB), *_again(asked)]
            look(folder, done)
    return kills


def _again(asked: list[str]) -> list[str]:
    """Return the options that must be given again, because a run's own files never open connections."""
    return ["--storage", asked[asked.index("--storage") + 1]] if "--storage" in asked else []
