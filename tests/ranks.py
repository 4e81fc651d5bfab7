"""Start a test's file on several ranks, as its user would, and give it up where it hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run_on_ranks(file: str, *arguments: object, ranks: int = 2, timeout_s: float = 290) -> None:
    """Run a file of this folder through torchrun, one thread a rank; fail with its last words if a rank does.

    Args:
        file: its name.
        arguments: for it.
        ranks: how many.
        timeout_s: seconds that it may take.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        # DeepSpeed looks for ninja.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launcher, str(TESTS / file), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
