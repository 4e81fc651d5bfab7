"""Start worker processes that end together, and at the latest with the caller.

This file is run by its path, as ``python -P supervisor.py MODULE WIRES [STORE]``. It uses only the standard library, so
that it stays small and forks before any library starts threads. Every worker runs the module with two arguments: the
file descriptor of its wire, and its own number. WIRES are the workers' ends of their sockets. With STORE, the workers
are the ranks of a process group, and STORE is the socket on which its store listens.

Standard input is a socket to the caller. If that socket closes, or a worker ends before its work is done, all workers
end, and so do all processes that they started, in any group or session. The last message on the socket is the number
and the exit code of the worker that ended too early, or ``0 0`` if none did.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# The exit codes of a worker that raised, and of one that has done its work: with 0, a job may have ended the process.
RAISED, DONE = 1, 113
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    """Start the workers and end them, or, in a forked process, become one of them."""
    module, *numbers = sys.argv[1:]
    wires, *store = ([int(number) for number in part.split(",")] for part in numbers)
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    supervisor, caller, workers = os.getpid(), os.getppid(), dict[int, int]()
    for number in range(len(wires)):
        process = os.fork()
        if process == 0:
            die_with_parent(supervisor)
            _become_worker(number, wires, *store)
            sys.argv = [module, str(wires[number]), str(number)]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            return
        workers[process] = number
    for descriptor in (*wires, *(store[0] if store else ())):
        os.close(descriptor)
    first = _watch(workers, caller)
    _end(workers)
    if first is not None:
        with contextlib.suppress(OSError):
            os.write(0, f"{first[0]} {first[1]}".encode())
    os._exit(0)


def die_with_parent(parent: int) -> None:
    """Make this process end with its parent, if the system supports that; at once if the parent is already gone."""
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _control(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _become_worker(number: int, wires: list[int], store: list[int] | None = None) -> None:
    """Close all inherited sockets except this worker's own, and set its rank."""
    # Signals that a job sends to its own group must not reach the supervisor.
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    kept = [wires[number]]
    if store is not None:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(number)
        kept += store if number == 0 else []
    for descriptor in {nothing, *wires, *(store or ())}.difference(kept):
        os.close(descriptor)
    for descriptor in kept:
        os.set_inheritable(descriptor, False)


def _watch(workers: dict[int, int], caller: int) -> tuple[int, int] | None:
    """Wait until all workers have ended, one has failed, or the caller is gone.

    Returns:
        The first failed worker and its exit code (below 0 for a signal), 0 and 0 if none; ``None`` without a caller.
    """
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    for number in (signal.SIGCHLD, *_ENDING):
        signal.signal(number, lambda *_: None)
    # This shows the end of the caller even if a process that it forked keeps the socket open.
    _control(_PR_SET_PDEATHSIG, signal.SIGCHLD)
    running = set(workers)
    while True:
        ended = [(process, code) for process, code in _ended() if process in workers]
        # If several ended at once, one that was killed or exited caused the exceptions of the others.
        failed = sorted((code == RAISED, code, workers[process]) for process, code in ended if code != DONE)
        if failed:
            return failed[0][2], failed[0][1]
        running.difference_update(process for process, _ in ended)
        if not running:
            return 0, 0
        readable, _, _ = select.select([0, woken], [], [])
        if 0 in readable or os.getppid() != caller or set(os.read(woken, 64)).intersection(_ENDING):
            return None


def _ended() -> Iterator[tuple[int, int]]:
    """Yield the processes that have ended since the last call, and their exit codes, below 0 for signals."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def _end(workers: dict[int, int]) -> None:
    """End the workers and all processes that they started, and remove their shared memory."""
    gone = {*workers, *_descendants()}
    for worker in workers:
        # If the system does not make orphans of the workers children of this process, only their groups are known.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            for process in _children().get(os.getpid(), ()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
                gone.add(process)
            # Once a process is gone, the processes that it started become children of this process.
            os.waitpid(-1, 0)
    _remove_shared_memory(gone)


def _children() -> dict[int, list[int]]:
    """Return the children of every process, if the system lists them."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The fields after the name, which is in parentheses, are the state and the parent.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(entry.name))
    return found


def _descendants() -> set[int]:
    children, found, waiting = _children(), set[int](), [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), ())
        found.update(below)
        waiting.extend(below)
    return found


def _remove_shared_memory(processes: set[int]) -> None:
    """Remove the shared-memory files of killed processes; torch names its files by process."""
    for path in Path("/dev/shm").glob("torch_*"):  # noqa: S108 - where torch puts them
        with contextlib.suppress(OSError, ValueError):
            if int(path.name.split("_")[1]) in processes:
                path.unlink()


if __name__ == "__main__":
    main()
