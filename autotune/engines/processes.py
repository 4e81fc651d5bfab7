"""Start processes of this package, learn what became of them, and clear up after them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from autotune.measurement import Failure

# The folder of what launches ranks, beside theirs.
_LAUNCHER = "launcher"
# How a rank's last line begins.
RAISED = "autotune: rank"
_PACKAGE = Path(__file__).resolve().parents[2]
# Where the kernel counts the processes that it ended for want of memory.
_MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")
# Characters of what a process printed last that its failure quotes.
_QUOTED = 300
_PR_SET_PDEATHSIG = 1


def python_path() -> str:
    """Return a search path on which the child finds this package, also where it runs from a checkout."""
    return os.pathsep.join(filter(None, [str(_PACKAGE), os.environ.get("PYTHONPATH", "")]))


def kills() -> int | None:
    """Return how many processes the kernel ended for want of memory; ``None`` where it does not say."""
    try:
        rows = dict(row.split() for row in _MEMORY_EVENTS.read_text().splitlines())
        return int(rows["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def last_words(output: Path) -> str:
    """Return the last line that a child printed, to follow a colon."""
    try:
        # A line of one repeated character is a ruler.
        lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if len(set(line.strip())) > 1]
    except OSError:
        return ""
    return f": {lines[-1][-_QUOTED:]}" if lines else ""


def rank_that_raised(output: Path) -> tuple[Failure, str] | None:
    """Return the class of what a rank raised first, and its line; ``None`` if none said so."""
    with contextlib.suppress(OSError):
        for line in output.read_text(errors="replace").splitlines():
            rank, _, rest = line.removeprefix(RAISED).partition(": ")
            kind, _, what = rest.partition(": ")
            if line.startswith(RAISED) and kind in set(Failure):
                return Failure(kind), f"rank{rank}: {what[-_QUOTED:]}"
    return None


def command(module: str, folder: Path, ranks: int | None = None) -> list[str]:
    """Return the command that starts a module in a process, or in each of several ranks.

    Args:
        module: the module; a folder is its one argument.
        folder: the folder. The launcher of ranks writes in it, too, and not beside it, where nobody would clean up.
        ranks: how many; ``None`` for a process without a launcher.
    """
    shared = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--log-dir={folder / _LAUNCHER}"]
    return [sys.executable, "-m", *([*shared, "-m"] if ranks else []), module, str(folder)]


def signal_name(number: int) -> str:
    """Return a signal's name, or its number where it has none here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def members(group: int) -> set[int]:
    """Return the processes of a group, its leader included, where the system tells."""
    found = {group}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # After the name, which is in parentheses: state, parent, group.
            if int((entry / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                found.add(int(entry.name))
    return found


def remove_shared_memory(processes: set[int]) -> None:
    """Remove what killed processes left in shared memory: torch names its files by process."""
    folder = Path("/dev/shm")  # noqa: S108 - where torch puts them
    if folder.is_dir():
        for path in folder.glob("torch_*"):
            if path.name.split("_")[1] in map(str, processes):
                path.unlink(missing_ok=True)


def leave(code: int) -> None:
    """End without the interpreter's clean-up, which a job's own threads could hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent() -> None:
    """Ask the system to end this process with its parent, where it can."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
