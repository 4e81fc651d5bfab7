"""Find what a command leaves behind, and the addresses on which its processes listen."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

# Environment variable that marks the processes of one test, because other tests run at the same time.
MARK = "AUTOTUNE_TEST_MARK"


def processes(mark: str) -> set[int]:
    """Return the processes that were started under a mark, without zombies."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if marked and state != "Z":
            found.add(int(folder.name))
    return found


def descendants(process: int) -> set[int]:
    """Return all descendants of a process."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = {process}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process}


def abandoned() -> set[Path]:
    """Return torch's shared memory files whose process is gone."""
    shared = Path("/dev/shm").glob("torch_*")
    return {path for path in shared if not (Path("/proc") / path.name.split("_")[1]).exists()}


def listening(among: set[int]) -> set[str]:
    """Return the TCP addresses on which processes listen."""
    addresses = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            columns = row.split()
            if columns[3] == "0A":
                raw = bytes.fromhex(columns[1].partition(":")[0])
                # Four-byte words, each in the byte order of this machine.
                raw = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
                addresses[columns[9]] = socket.inet_ntop(family, raw).removeprefix("::ffff:")
    found = set()
    for process in among:
        with contextlib.suppress(OSError):
            for entry in (Path("/proc") / str(process) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    number = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
                    if number is not None and number[1] in addresses:
                        found.add(addresses[number[1]])
    return found


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait until a condition holds, and fail if it never does."""
    until = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.05)
