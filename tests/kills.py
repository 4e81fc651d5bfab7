"""Real campaigns in processes of their own that are killed at random instants and taken up again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

JOB = Path(__file__).parent / "tiny_job.py"
PROGRAM = [sys.executable, "-m", "autotune.cli.main"]


def kill_campaigns(asked: list[str], root: Path, few: int, seed: int, look: Callable[[Path, bool], None]) -> None:
    """Tune or compare ``tiny_job``, killed at random instants, and look at what is left each time.

    With ``KILLS`` in the environment, so many kills: campaigns one after another, each killed ten times at most.

    Args:
        asked: the command and its options, the job left out.
        root: an empty folder.
        few: the number of kills without ``KILLS``.
        seed: of the instants.
        look: what is called with a campaign's folder and whether it is done.
    """
    generator, wanted, kills = random.Random(seed), int(os.environ.get("KILLS", str(few))), 0
    while kills < wanted:
        folder = root / str(kills)
        folder.mkdir()
        more = _killed(asked, folder, generator, min(wanted - kills, 10), look)
        assert more >= 1
        kills += more if wanted > 10 else wanted


def _killed(
    asked: list[str], runs: Path, generator: random.Random, most: int, look: Callable[[Path, bool], None]
) -> int:
    command = [*PROGRAM, asked[0], str(JOB), *asked[1:], "--runs-dir", str(runs)]
    environment = {**os.environ, "PYTHONPATH": str(JOB.parent.parent), "OMP_NUM_THREADS": "1"}
    kills, done = 0, False
    while not done:
        process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
        )
        try:
            # Most of it is start-up; the later ones are left to finish.
            process.wait(generator.uniform(2.0, 7.0) if kills < most else 120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        said = process.communicate()[1].decode()
        done = process.returncode == 0
        assert done or process.returncode == -signal.SIGKILL, said
        for folder in [path for path in runs.iterdir() if (path / "config.json").is_file()]:
            command = [*PROGRAM, "resume", str(folder)]
            look(folder, done)
    return kills
