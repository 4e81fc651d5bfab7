"""Fork ranks from a process that has imported torch and this package, which each rank alone would take seconds for.

Each line of the input is a launch; once all its ranks have ended, its exit code is written as a line.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

IMPORTS = ("torch._dynamo", "live_rank", "odd_rank", "spread_rank")


def main() -> None:
    """Serve one launch after another; return in each rank."""
    for name in IMPORTS:
        importlib.import_module(name)
    # Imported objects are left out of each garbage collection, so that their memory stays shared between ranks.
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        launcher = os.fork()
        if not launcher:
            launch(**json.loads(line))
            return
        _, status = os.waitpid(launcher, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def launch(file: str, arguments: list[str], environment: dict[str, str], output: str, folder: str, ranks: int) -> None:
    """Start ranks as torchrun does, and end with the code of the first that failed; return in each rank.

    Args:
        file: the script of the ranks.
        arguments: its command line.
        environment: all environment variables.
        output: file for what the ranks write.
        folder: working directory.
        ranks: number of ranks.
    """
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _redirect(output)
    sys.argv = [file, *arguments]
    # What the script imports is imported once for all its ranks.
    importlib.import_module(Path(file).stem)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(128)
    children = set()
    for rank in range(ranks):
        child = os.fork()
        if not child:
            os.environ.update(_variables(rank, ranks, listening.getsockname()[1]))
            listening.close()
            runpy.run_path(file, run_name="__main__")
            return
        children.add(child)
    os._exit(_first_failure(children, listening))


def _redirect(output: str) -> None:
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY), (2, output, os.O_WRONLY)):
        opened = os.open(path, flags | (os.O_CREAT | os.O_APPEND if number else 0))
        os.dup2(opened, number)
        os.close(opened)


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets and torch or this package read."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_RUN_ID": "none"}
    values: dict[str, Any] = {**numbers, **where, **agent}
    return {name: str(value) for name, value in values.items()}


def _first_failure(children: set[int], listening: socket.socket) -> int:
    """Return the exit code of the first rank that fails, and end the others; 0 if none fails."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # Threads do not survive a fork, so that the store is not there before.
    _store = TCPStore(
        "127.0.0.1",
        listening.getsockname()[1],
        None,
        is_master=True,
        timeout=timedelta(seconds=300),
        wait_for_workers=False,
        master_listen_fd=listening.fileno(),
    )
    first = 0
    while children:
        child, status = os.wait()
        children.discard(child)
        if status and not first:
            first = abs(os.waitstatus_to_exitcode(status))
            for other in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
    return first


if __name__ == "__main__":
    main()
