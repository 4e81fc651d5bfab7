"""The decision log of a live tuner: an append-only file with one JSON object per line."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from autotune.errors import RunDirectoryError
from autotune.gym.observation import Observation
from autotune.io.files import open_for_appending, read_json_lines, write_json
from autotune.io.run_folder import WriterLock, new_run_folder
from autotune.live.log_events import check_log
from autotune.plan import Plan

LOG_VERSION = 1
LOG_NAME = "decisions.jsonl"
# A decision takes about two kilobytes.
_LARGEST_BYTES = 2**28


class DecisionLog:
    """Log of events, kept in memory and, if there is a file, appended to it.

    If a write fails, writing ends but the run goes on. Until the log is closed, no other process may write to the run's
    folder.

    Attributes:
        path: the file; ``None`` for none.
        events: the events so far.
        problem: why writing ended; ``None`` if it did not.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.events: list[dict[str, Any]] = []
        self.problem: str | None = None
        self._file: BinaryIO | None = None
        self._lock = None if path is None else WriterLock(path.parent)

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append an event.

        Args:
            event: name of the event.
            step: number of optimizer steps before it.
            **values: further entries; numbers that are not finite are written as ``null``.
        """
        record = {"event": event, "step": step, **_plain(values)}
        self.events.append(record)
        if self.path is None or self.problem is not None:
            return
        try:
            if self._file is None:
                self._file = open_for_appending(self.path)
            self._file.write((json.dumps(record, allow_nan=False) + "\n").encode())
            self._file.flush()
        except (OSError, ValueError) as error:
            self.problem = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Close the file, and unlock the run's folder for other writers."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                # On a full disk, flushing the rest of the buffer fails again.
                file.close()
        if self._lock is not None:
            self._lock.close()


def make_run_folder(runs: Path, model: str, config: Mapping[str, Any]) -> Path:
    """Make ``<runs>/<utc time>-attach-<model>-<id>/`` with its ``config.json``.

    Raises:
        RunDirectoryError: if it cannot be written.
    """
    path = new_run_folder(runs, "attach", model)
    try:
        path.mkdir(parents=True)
        write_json(path / "config.json", {"version": 1, "verb": "attach", "job": model, **_plain(config)})
    except OSError as error:
        raise RunDirectoryError(
            f"cannot be written ({error.strerror})",
            where=f"runs_dir {runs}",
            allowed="a writable folder, or None to write nothing",
        ) from error
    return path


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read a decision log; an incomplete last line, left by a killed process, is dropped.

    Args:
        path: the file, or the run directory that contains it.

    Raises:
        InputError: if it is missing or damaged.
    """
    file = path / LOG_NAME if path.is_dir() else path
    events = read_json_lines(file, limit_bytes=_LARGEST_BYTES, follow=not path.is_dir())
    check_log(events, version=LOG_VERSION, where=str(file))
    return events


def schedule_of(events: list[dict[str, Any]], where: str) -> list[tuple[int, Plan]]:
    """Return the plans that a run switched to, each with the step at which it took effect, ascending."""
    return [
        (event["step"], Plan.from_json(event["plan"], where=f"{where} line {number}"))
        for number, event in enumerate(events, 1)
        if event["event"] == "switched"
    ]


def digest_of(observation: Observation) -> str:
    """Return a SHA-256 of the features that a policy may look at."""
    arrays = observation.arrays()
    return hashlib.sha256(b"".join(np.ascontiguousarray(arrays[name]).tobytes() for name in sorted(arrays))).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Plan):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
