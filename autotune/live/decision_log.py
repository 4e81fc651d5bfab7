"""Keep what a live tuner saw, proposed, was allowed and did: append-only, one JSON object per line."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from autotune.errors import InputError, RunDirectoryError
from autotune.files import parse_json, write_json
from autotune.gym.observation import Observation
from autotune.plan import Plan

LOG_VERSION = 1
LOG_NAME = "decisions.jsonl"


class DecisionLog:
    """Append events to a file, and keep them in memory; without a file, in memory alone.

    A write that fails ends the writing, never the run.

    Attributes:
        path: the file; ``None`` for none.
        events: the events so far.
        problem: why writing ended; ``None`` if it did not.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.events: list[dict[str, Any]] = []
        self.problem: str | None = None
        self._file: TextIO | None = None

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append an event.

        Args:
            event: what happened.
            step: optimizer steps done when it did.
            **values: what else there is to say; numbers that are not finite are written as ``null``.
        """
        record = {"event": event, "step": step, **_plain(values)}
        self.events.append(record)
        if self.path is None or self.problem is not None:
            return
        try:
            if self._file is None:
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:
            self.problem = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def make_run_folder(runs: Path, model: str, config: Mapping[str, Any]) -> Path:
    """Make ``<runs>/<utc time>-attach-<model>-<id>/`` with its ``config.json``.

    Raises:
        RunDirectoryError: if it cannot be written.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    path = runs / f"{stamp}-attach-{model}-{secrets.token_hex(3)}"
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
    """Read a decision log; a torn last line, left by a kill, is dropped.

    Args:
        path: the file, or the run directory that holds it.

    Raises:
        InputError: if it is missing or damaged.
    """
    file = path / LOG_NAME if path.is_dir() else path
    try:
        rows = file.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("cannot be read", where=str(file), allowed="a decision log") from error
    if rows and not rows[-1].endswith("\n"):
        rows.pop()
    events = [parse_json(row, where=f"{file} line {number}") for number, row in enumerate(rows, 1)]
    if not events or events[0].get("event") != "attached" or events[0].get("version") != LOG_VERSION:
        raise InputError("is no decision log of this version", where=str(file), allowed=f"version {LOG_VERSION}")
    return events


def schedule_of(events: list[dict[str, Any]], where: str) -> list[tuple[int, Plan]]:
    """Return the plans that a log's run decided on, by the step from which they held, ascending."""
    return list(_schedule(events, where))


def _schedule(events: list[dict[str, Any]], where: str) -> Iterator[tuple[int, Plan]]:
    for number, event in enumerate(events, 1):
        if event["event"] == "switched":
            step = event.get("step")
            if not isinstance(step, int) or "plan" not in event:
                raise InputError("a switch has no step or plan", where=f"{where} line {number}", allowed="both")
            yield step, Plan.from_json(event["plan"], where=f"{where} line {number}")


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
