"""Run one command line in a sandboxed process and check what it did.

Expensive work is cut off at its beginning: a process that computes many gradients, starts another process, solves a
large integer program or has used up its CPU time has accepted its command line.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import resource
import select
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import guard
import hostile

# Exit code of a process that begins expensive work.
WORKING = 77
CPU_S, WALL_S = 1.0, 60.0
# A process still running after `WALL_S` was waiting, not working, if it used less CPU time than this.
IDLE_S = 0.5
MEMORY_BYTES = 6 * 2**30
LARGEST_FILE_BYTES = 2**28
# Number of columns of an integer program above which the solver's time limit decides.
LARGE_PROGRAM = 2000
# Inspecting a job before training computes a few gradients.
GRADIENTS = 20
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# Allowed on stderr before the one line: stages, under --json, and log messages.
_BESIDE = re.compile(r"Training .* for real inside |.* \.\.\.$|(INFO|WARNING): |warning: ")
# Options that name a folder to write to, or one that is made.
_FOLDERS = {"--runs-dir", "--figures", "--csv", "--parquet", "--out", "--folder"}
_Entry = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one command line.

    Attributes:
        arguments: the command line.
        ended: exit code, ``working`` if it was cut off, or ``hang``.
        seconds: duration.
        wrong: forbidden actions; empty if there were none.
        foreign: the class of the exception that reached the user as a traceback; empty for none.
        shown: the end of its output.
    """

    arguments: list[str]
    ended: str
    seconds: float
    wrong: list[str] = field(default_factory=list)
    foreign: str = ""
    shown: str = ""


def run_apart(arguments: list[str], root: Path, unreadable: Sequence[Path]) -> Result:
    """Run one command line in ``root/work``, in a process that can write only below ``root``.

    Args:
        arguments: the command line.
        root: the folder.
        unreadable: paths below it that must not be read, even by a privileged process.
    """
    before = _entries(root)
    streams = {name: os.memfd_create(name) for name in ("out", "err", "breaches")}
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        _be_child(arguments, root, unreadable, streams)
    status, cpu_s = _wait(child)
    seconds = time.perf_counter() - began
    out, err, breaches = (_content(handle) for handle in streams.values())
    ended = _ended(status, cpu_s)
    wrong = [
        *_wrongly_changed(before, _entries(root), ended),
        *sorted(set(breaches.splitlines())),
        *_wrongly_told(out, err, ended),
    ]
    return Result(
        arguments=arguments,
        ended=ended,
        seconds=round(seconds, 3),
        wrong=wrong,
        foreign=_foreign(err),
        shown=f"{out[-600:]}\n---\n{err[-1500:]}" if wrong else err[-300:],
    )


def _be_child(arguments: list[str], root: Path, unreadable: Sequence[Path], streams: dict[str, int]) -> None:
    """Run the command line, and end this process."""
    code = 70
    try:
        os.setsid()
        os.chdir(root / "work")
        for handle, target in ((os.open(os.devnull, os.O_RDONLY), 0), (streams["out"], 1), (streams["err"], 2)):
            os.dup2(handle, target)
        _limit()
        _cut_off()
        reads_all = guard.drop_rights()
        asked = _asked_to_write(arguments, root)

        def report(line: str) -> None:
            # What the guard prevents there is what its user asked for.
            if not any(f" for writing outside: {begin}" in line for begin in asked):
                os.write(streams["breaches"], f"{line}\n".encode("utf-8", "replace"))

        guard.install(
            [*guard.installation(), *guard.SYSTEM, *_named_elsewhere(arguments, root)],
            [root],
            report=report,
            unreadable=unreadable if reads_all else (),
        )
        code = _main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _named_elsewhere(arguments: Sequence[str], root: Path) -> list[str]:
    """Return paths outside the folder that the command line names: its user may have any file read."""
    words = [*arguments, *(word.partition("=")[2] for word in arguments)]
    named = [guard.real_path(root / "work" / word) for word in words if word]
    return [path for path in named if path is not None and not path.startswith(str(root))]


def _asked_to_write(arguments: Sequence[str], root: Path) -> list[str]:
    """Return how paths begin in the folders that the command line is to write to, and of probes where one is to be."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    named = [guard.real_path(root / "work" / then) for word, then in pairwise(words) if word in _FOLDERS and then]
    paths = [Path(path) for path in named if path is not None]
    nearest = [next(parent for parent in (path, *path.parents) if os.access(parent, os.F_OK)) for path in paths]
    return [*(f"{path}/" for path in paths), *(str(parent / ".autotune-") for parent in nearest)]


def _main(arguments: list[str]) -> int:
    """Run the program and return its exit code; an exception is shown as Python shows it."""
    from autotune.cli.main import main

    sys.argv = ["autotune", *arguments]
    try:
        main()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _leave(code: int) -> None:
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _limit() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, LARGEST_FILE_BYTES),
        (resource.RLIMIT_AS, used + MEMORY_BYTES),
    ):
        resource.setrlimit(limit, (value, value))


def _cut_off() -> None:
    """End this process when expensive work begins."""
    import multiprocessing.util

    import torch

    from autotune.cost_model import choice_program
    from autotune.io import scratch

    def few(real: Callable[..., Any], times: int) -> Callable[..., Any]:
        left = itertools.count(times, -1)
        return lambda *given, **named: real(*given, **named) if next(left) > 0 else _leave(WORKING)

    def small(solve: Callable[..., Any]) -> Callable[..., Any]:
        return lambda costs, *given, **named: (
            solve(costs, *given, **named) if len(costs) <= LARGE_PROGRAM else _leave(WORKING)
        )

    torch.autograd.backward = few(torch.autograd.backward, GRADIENTS)
    torch.autograd.grad = few(torch.autograd.grad, GRADIENTS)
    multiprocessing.util.spawnv_passfds = few(multiprocessing.util.spawnv_passfds, 0)
    scratch.ScratchFolder.__init__ = few(scratch.ScratchFolder.__init__, 0)
    choice_program.milp, choice_program.linprog = small(choice_program.milp), small(choice_program.linprog)
    starts = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec")
    sys.addaudithook(lambda event, _: _leave(WORKING) if event in starts else None)


def _wait(child: int) -> tuple[int | None, float]:
    """Wait for a process and end its group; return its status, or ``None`` if it hung, and its CPU time."""
    handle = os.pidfd_open(child)
    done, _, _ = select.select([handle], [], [], WALL_S)
    os.close(handle)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    return status if done else None, used.ru_utime + used.ru_stime


def _ended(status: int | None, cpu_s: float) -> str:
    if status is None:
        return "hang" if cpu_s < IDLE_S else "working"
    if os.WIFSIGNALED(status):
        return "working" if os.WTERMSIG(status) == signal.SIGPROF else f"signal {os.WTERMSIG(status)}"
    code = os.WEXITSTATUS(status)
    return "working" if code == WORKING else str(code)


def _content(handle: int) -> str:
    data = os.pread(handle, os.fstat(handle).st_size, 0)
    os.close(handle)
    return data.decode("utf-8", "surrogateescape")


def _foreign(err: str) -> str:
    """Return the class of the uncaught exception; one that --verbose logged does not count."""
    if "Traceback (most recent call last)" not in err or "INFO: what was being done:" in err:
        return ""
    named = re.findall(r"^([A-Za-z_][\w.]*)(?::|$)", err[err.rindex("Traceback") :], re.MULTILINE)
    return named[-1] if named else "unknown"


def _wrongly_told(out: str, err: str, ended: str) -> Iterator[str]:
    """Yield what is wrong with the output."""
    if ended not in ("0", "1", "2", "working"):
        yield f"ended with {ended}"
    if "Traceback" in out or _foreign(err):
        yield f"traceback of {_foreign(err) or 'something'}"
    for name, text in (("stdout", out), ("stderr", err)):
        found = _CONTROLS.search(text)
        if found:
            yield f"{found.group()!r} on {name}"
        if hostile.SECRET in text:
            yield f"password on {name}"
    lines = err.strip("\n").split("\n")
    said = [line for line in lines if line.startswith("autotune: ")]
    if ended in ("1", "2") and len(said) != 1 and "Usage: autotune" not in err:
        yield f"{len(said)} lines say what is wrong"
    beside = [line for line in lines if line not in said and not _BESIDE.match(line)]
    if ended == "2" and said and beside:
        yield f"{beside[0][:80]!r} beside the error"


def _entries(root: Path) -> dict[str, _Entry]:
    """Return the entries of a folder: kind and number of each entry, and size and time of the files."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = f"{folder}/{name}"
            known = os.lstat(path)
            kind = stat.S_IFMT(known.st_mode)
            same = (known.st_size, known.st_mtime_ns) if kind == stat.S_IFREG else ()
            found[path] = (kind, known.st_ino, *same)
    return found


def _wrongly_changed(before: dict[str, _Entry], after: dict[str, _Entry], ended: str) -> Iterator[str]:
    """Yield files that were written or replaced although they must not be."""
    for path, known in before.items():
        if known[0] not in (stat.S_IFREG, stat.S_IFDIR) and after.get(path) != known:
            yield f"replaced {path!r}"
    if ended == "2":
        for path in sorted(path for path in {**before, **after} if before.get(path) != after.get(path)):
            yield f"wrote {path!r}"
