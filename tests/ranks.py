"""Run a script of the tests on several ranks, as a user would or forked, with a time limit; and end its ranks."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import distributed

TESTS = Path(__file__).parent


def environment() -> dict[str, str]:
    """Return the environment of ranks: each has one thread, and finds the modules of this folder."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        # DeepSpeed needs ninja on the path.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }


def run_on_ranks(file: str, *arguments: object, ranks: int = 2, timeout_s: float = 290) -> None:
    """Run a file of this folder with torchrun, one thread per rank; fail with its output if a rank fails.

    Args:
        file: name of the file.
        arguments: command line of the file.
        ranks: number of ranks.
        timeout_s: time limit in seconds.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launcher, str(TESTS / file), *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def fork_ranks(file: str, *arguments: object, ranks: int = 2, timeout_s: float = 290) -> None:
    """Do as :func:`run_on_ranks`, but fork the ranks from a process that has imported torch and this package before.

    Args:
        file: name of the file.
        arguments: command line of the file.
        ranks: number of ranks.
        timeout_s: time limit in seconds.
    """
    with tempfile.NamedTemporaryFile("r") as output:
        launch = {
            "file": str(TESTS / file),
            "arguments": [*map(str, arguments)],
            "environment": environment(),
            "output": output.name,
            "folder": str(Path.cwd()),
            "ranks": ranks,
        }
        code = _answer(json.dumps(launch), timeout_s)
        assert code == "0", f"{code}: {output.read()[-3000:]}"


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the process from which ranks are forked; it ends with this one, which closes its input."""
    command = [sys.executable, str(TESTS / "rank_server.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, env=environment(), start_new_session=True, **pipes)  # type: ignore[call-overload]
    atexit.register(_end_server, server)
    return server


def _end_server(server: subprocess.Popen[str]) -> None:
    """End the server with all ranks that it has forked."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
    server.communicate()
    _server.cache_clear()


def _answer(launch: str, timeout_s: float) -> str:
    """Return the exit code of a launch; whatever interrupts it ends the server."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        print(launch, file=server.stdin, flush=True)
        answered, _, _ = select.select([server.stdout], [], [], timeout_s)
        assert answered, f"ranks have not ended after {timeout_s} s"
        code = server.stdout.readline().strip()
        assert code, "the server of ranks has ended"
    except BaseException:
        _end_server(server)
        raise
    return code


def end_rank(folder: Path, found: Mapping[str, Any]) -> NoReturn:
    """End the process of a rank, after it has written what it found to ``rank<number>.json``.

    Threads that torch leaves behind now and then abort a process as the interpreter ends.
    """
    (folder / f"rank{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)
