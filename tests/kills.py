"""Real commands in processes of their own that are killed at random instants and taken up again."""

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
# What a killed process may end with: as the command line ends it, or, before that has begun, as Python does.
CODES = {
    signal.SIGKILL: {-signal.SIGKILL},
    signal.SIGTERM: {143, -signal.SIGTERM},
    signal.SIGINT: {130, -signal.SIGINT},
}


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When and how a command is killed.

    Attributes:
        after_s: seconds after its start.
        how: the signal.
        whom: the ``process`` that was started, its ``group``, or ``all`` that it started, whatever group they are in.
    """

    after_s: float
    how: signal.Signals
    whom: str

    @classmethod
    def drawn(cls, generator: random.Random, first_s: float, last_s: float) -> Kill:
        """Return one at a random instant between two."""
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
        """Kill a process, or more."""
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
    """Run a command, kill it, and see that nothing of it is left in temporary folders or among the processes.

    Args:
        command: the command.
        folder: a folder for its temporary files alone; it is made if it is not there.
        kill: when and how; ``None`` lets it end.
        codes: what it may end with where it was killed; ``None`` for what our command line ends with.

    Returns:
        Its exit code, and whether it was killed before it had ended.
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
            assert said.splitlines()[-1] == "autotune: ended by SIGTERM"
            assert "Traceback" not in said
    wait_until(lambda: not processes(mark), f"a process lives on after {kill}", timeout_s=90)
    assert abandoned() <= shared, kill
    # torch keeps what it compiled for the next process.
    left = [path for path in folder.iterdir() if not path.name.startswith("torchinductor")]
    assert not left, f"{left} after {kill}"
    logger.info("%s: %s", kill if struck else "not killed", code)
    return code, struck and code != 0


def kill_campaigns(
    asked: list[str], root: Path, few: int, seed: int, look: Callable[[Path, bool], None], *, last_s: float = 7.0
) -> None:
    """Tune or compare ``tiny_job``, killed at random instants, and look at what is left each time.

    With ``KILLS`` in the environment, so many kills: campaigns one after another, each killed ten times at most.

    Args:
        asked: the command and its options, the job left out.
        root: an empty folder.
        few: the number of kills without ``KILLS``.
        seed: of the instants.
        look: what is called with a campaign's folder and whether it is done.
        last_s: seconds after its start at which a command is killed at the latest.
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
        # Most of it is start-up; the later ones are left to finish.
        kill = Kill.drawn(generator, 2.0, last_s) if kills < most else None
        code, struck = killed(command, runs.parent / f"{runs.name}-tmp", kill)
        kills += struck
        done = code == 0
        for folder in [path for path in runs.iterdir() if (path / "config.json").is_file()]:
            command = [*PROGRAM, "resume", str(folder), "--job", str(JOB), *_again(asked)]
            look(folder, done)
    return kills


def _again(asked: list[str]) -> list[str]:
    """Return the options that must be given again: nothing is connected to on the word of a run's own files."""
    return ["--storage", asked[asked.index("--storage") + 1]] if "--storage" in asked else []
