"""Start ranks with ``torchrun``, tell them what to do through a folder, and read what rank 0 answers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.engines.processes import (
    RAISED,
    command,
    die_with_parent,
    kills,
    last_words,
    leave,
    python_path,
    rank_that_raised,
)
from autotune.errors import EngineError, InputError, one_line
from autotune.files import read_json, write_json
from autotune.measurement import Failure

_ASKED, _DONE, _FOUND, _REFUSED = "asked.json", "done.json", "found.json", "refused.json"
_TRIED = "tried.json"
# Seconds between two looks at how far the ranks are, and those in which they may end by themselves.
_POLL_S, _GRACE_S = 0.5, 5.0


class RanksError(EngineError):
    """Say that ranks ended before they answered.

    Args:
        message: one line about it.
        failure: its class, where it is known.
        tried: what they said last that they would try; ``None`` if nothing.
    """

    def __init__(self, message: str, failure: Failure | None, tried: str | None) -> None:
        super().__init__(message)
        self.failure = failure
        self.tried = tried


@dataclass(frozen=True, slots=True)
class Report:
    """Tell whoever asked ranks how far they are; rank 0 speaks for all.

    Attributes:
        folder: what both look into; ``None`` on the other ranks.
    """

    folder: Path | None

    def done(self, share: float) -> None:
        """Tell which share is done."""
        self._write(_DONE, share)

    def tries(self, what: str) -> None:
        """Tell what is tried next, in case that it ends the ranks."""
        self._write(_TRIED, {"what": what})

    def _write(self, name: str, value: float | dict[str, str]) -> None:
        if self.folder is not None:
            write_json(self.folder / name, value)


def run_on_ranks(
    module: str,
    asked: Mapping[str, Any],
    *,
    ranks: int,
    threads: int | None = 1,
    patience_s: float = math.inf,
    on_progress: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Run a module as so many ranks on this machine, and return what rank 0 answers.

    Args:
        module: the module; run, it calls :func:`be_rank`.
        asked: what the ranks are told.
        ranks: how many.
        threads: of each rank, where the environment does not say; one rank alone has one as well, or ranks would not be
            what scales. ``None`` for the launcher's default.
        patience_s: seconds without news from the ranks after which they are ended.
        on_progress: is told of the share that is done.

    Raises:
        InputError: if a rank refuses what it was asked.
        RanksError: if a rank fails; what it raised is quoted; or if there is no news from them for too long.
    """
    with tempfile.TemporaryDirectory(prefix="autotune-ranks-") as name:
        folder = Path(name)
        write_json(folder / _ASKED, {**asked, "path": [entry for entry in sys.path if entry]})
        output, killed = folder / "output.txt", kills()
        own = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        environment = {**own, **os.environ, "PYTHONPATH": python_path()}
        started = command(module, folder, ranks)
        code = _run(started, environment, output, on_progress or (lambda _: None), patience_s)
        tried = read_json(folder / _TRIED)["what"] if (folder / _TRIED).exists() else None
        if code is None:
            raise RanksError(f"{ranks} ranks have no news for {patience_s:.0f} s", Failure.TIMEOUT, tried)
        if (folder / _REFUSED).exists():
            raise InputError.from_json(read_json(folder / _REFUSED))
        if code or not (folder / _FOUND).exists():
            raised = rank_that_raised(output)
            if None not in (killed, kills()) and killed != kills():
                raised = Failure.OUT_OF_MEMORY, "the system ended one for want of memory"
            how = f"exit code {code}{last_words(output)}" if raised is None else f"{raised[0]}: {raised[1]}"
            raise RanksError(f"{ranks} ranks end with {how}", None if raised is None else raised[0], tried)
        return read_json(folder / _FOUND)


def _run(
    started: list[str],
    environment: Mapping[str, str],
    output: Path,
    on_progress: Callable[[float], None],
    patience_s: float,
) -> int | None:
    """Run the ranks to their end, and return the launcher's exit code; ``None`` if they had to be ended."""
    with output.open("wb") as sink:
        process = subprocess.Popen(
            started,
            # Held open as long as this process lives: the ranks end with it, however it ends.
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    heard, silent_since = _heard(output), time.monotonic()
    try:
        while time.monotonic() - silent_since < patience_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_S)
            former, heard = heard, _heard(output)
            if heard != former:
                silent_since = time.monotonic()
            with contextlib.suppress(OSError, ValueError):
                on_progress(float(json.loads((output.parent / _DONE).read_text())))
        return None
    finally:
        # The ranks lead groups of their own, and end with their launcher.
        for end in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, end)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        assert process.stdin is not None
        process.stdin.close()


def _heard(output: Path) -> list[int]:
    """Return what differs once the ranks have told or printed anything."""
    found = (output, output.parent / _DONE, output.parent / _TRIED)
    return [path.stat().st_mtime_ns for path in found if path.exists()]


def be_rank(work: Callable[[dict[str, Any], Report], Mapping[str, Any]]) -> None:
    """Be one of the ranks that :func:`run_on_ranks` starts, and end.

    Args:
        work: does what is asked, and returns the answer; it may tell how far it is.
    """
    die_with_parent()
    threading.Thread(target=_end_with_asker, name="autotune-asker", daemon=True).start()
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    try:
        asked = read_json(folder / _ASKED)
        # Jobs are found where the program that asks finds them.
        sys.path[:0] = [entry for entry in asked["path"] if entry not in sys.path]
        found = work(asked, Report(folder if rank == 0 else None))
        if rank == 0:
            write_json(folder / _FOUND, found)
    except Exception as error:  # noqa: BLE001 - whatever the job raises, whoever asked names
        if isinstance(error, InputError):
            write_json(folder / _REFUSED, error.to_json())
        _say(rank, error)
        leave(1)
    leave(0)


def _end_with_asker() -> None:
    """End this rank when whoever asked is gone: nothing is ever written to the pipe that both hold."""
    with contextlib.suppress(OSError):
        os.read(0, 1)
    leave(1)


def _say(rank: int, error: Exception) -> None:
    from autotune.engines.inspection import classify

    print(f"{RAISED} {rank}: {classify(error)}: {one_line(error)}", file=sys.stderr)  # noqa: T201 - whoever asked reads it
