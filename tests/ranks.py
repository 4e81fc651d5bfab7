"""Run a script of the tests on several ranks, as a user would, with a time limit; and end its ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import distributed

TESTS = Path(__file__).parent


def run_on_ranks(file: str, *arguments: object, ranks: int = 2, timeout_s: float = 290) -> None:
    """Run a file of this folder with torchrun, one thread per rank; fail with its output if a rank fails.

    Args:
        file: name of the file.
        arguments: command line of the file.
        ranks: number of ranks.
        timeout_s: time limit in seconds.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        # DeepSpeed needs ninja on the path.
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


def end_rank(folder: Path, found: Mapping[str, Any]) -> NoReturn:
    """End the process of a rank, after it has written what it found to ``rank<number>.json``.

    Threads that torch leaves behind now and then abort a process as the interpreter ends.
    """
    (folder / f"rank{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)
