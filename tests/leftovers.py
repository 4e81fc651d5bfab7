"""Look at what a command leaves behind, and at what its processes listen on while it runs."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

# What the processes of one test have in their environment: other tests run at the same time.
MARK = "AUTOTUNE_TEST_MARK"


def processes(mark: str) -> set[int]:
    """Return the processes that were started under a mark, corpses left out."""
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
    """Return the processes that a process has started, and those that they have."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = {process}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process}


def abandoned() -> set[Path]:
    """Return shared memory of torch's whose process is gone."""
    shared = Path("/dev/shm").glob("torch_*")
    return {path for path in shared if not (Path("/proc") / path.name.split("_")[1]).exists()}


def listening(among: set[int]) -> set[str]:
    """Return the addresses on which some processes listen, by TCP."""
    addresses = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            columns = row.split()
            if columns[3] == "0A":
                raw = bytes.fromhex(columns[1].partition(":")[0])
                # Words of four bytes, each in this machine's order.
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
    """Wait until something holds, and fail where it never does."""
    until = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.05)
