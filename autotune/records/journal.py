"""Do what is expensive once: a campaign that was killed is taken up by running it again with its journal.

A campaign is the same program with the same seed, so that it asks for the same things in the same order. What it asked
for before is answered from the journal; then it goes on for real.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.engines.engine import Engine, EngineProxy
from autotune.errors import RunDirectoryError
from autotune.io.documents import Count, Seconds, document, validated
from autotune.io.files import append_json_line, open_for_appending, parse_line, read_bytes
from autotune.measurement import Measurement
from autotune.plan import Plan
from autotune.records.run_directory import BEGUN_WITH, LARGEST_LOG_BYTES, as_run_error, writing

JOURNAL = "journal.jsonl"


class Journal:
    """Remember what a campaign asked for and what came of it, in order; on disk once it has a file.

    Attributes:
        replayed_s: seconds that what was answered from the journal took when it was done.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._records: list[dict[str, Any]] = []
        self._next = 0
        self.replayed_s = 0.0

    @classmethod
    def opened(cls, folder: Path) -> Journal:
        """Return the journal of a run directory, to be answered from; a torn last line, left by a kill, is dropped.

        A campaign that was killed before it wrote anything but what it was asked for has an empty one.

        Raises:
            RunDirectoryError: if the run has results but no journal, or one of its records is damaged.
        """
        journal = cls()
        path = folder / JOURNAL
        if not path.is_file():
            if any(child.name not in BEGUN_WITH and child.name[0] != "." for child in folder.iterdir()):
                raise RunDirectoryError("holds no journal", where=str(folder), allowed="the run of a tune or a compare")
            open_for_appending(path).close()
        with as_run_error():
            rows = read_bytes(path, limit_bytes=LARGEST_LOG_BYTES, follow=False).split(b"\n")[:-1]
        for number, row in enumerate(rows, 1):
            journal._records.append(_checked(row, where=f"{path}, line {number}"))
        journal._path = path
        return journal

    @property
    def left(self) -> int:
        """Return how many more things are answered from the journal."""
        return len(self._records) - self._next

    @property
    def replaying(self) -> bool:
        """Tell whether the next thing is answered from the journal."""
        return self.left > 0

    @property
    def place(self) -> str:
        """Return where the last answer stands."""
        return f"{self._path}, line {self._next}, result"

    def keep_in(self, folder: Path) -> None:
        """Write to a run directory from now on, and what came before.

        Raises:
            RunDirectoryError: if it cannot be written.
        """
        if self._path is None:
            self._path = folder / JOURNAL
            for record in self._records:
                self._write(record)

    def once(self, what: dict[str, Any], do: Callable[[], Any], kind: Any = Any) -> Any:
        """Return what came of something that is asked for; do it, if it was not done before.

        Args:
            what: names it, as a JSON object.
            do: does it and returns a JSON value.
            kind: the type of that value, to which one from the journal is held; see :mod:`autotune.io.documents`.

        Raises:
            RunDirectoryError: if the journal says that the campaign asked for something else here, has something else
                for an answer, or cannot be written.
        """
        asked = json.loads(json.dumps(what))
        if self.replaying:
            record = self._records[self._next]
            if record["what"] != asked:
                raise RunDirectoryError(
                    f"record {self._next + 1} is of {_shown(record['what'])}, and {_shown(asked)} is asked for",
                    where=str(self._path),
                    allowed="the run of this version of the job and of autotune",
                )
            self._next += 1
            self.replayed_s += record["seconds"]
            validated(kind, record["result"], where=self.place, error=RunDirectoryError)
            return record["result"]
        began = time.perf_counter()
        result = do()
        record = {"what": asked, "result": result, "seconds": time.perf_counter() - began}
        self._records.append(record)
        self._next += 1
        if self._path is not None:
            self._write(record)
        return result

    def clock(self) -> float:
        """Return a clock's seconds on which what was replayed took its time."""
        return time.perf_counter() + self.replayed_s

    def _write(self, record: dict[str, Any]) -> None:
        assert self._path is not None
        with writing(self._path):
            append_json_line(self._path, {**record, "crc32": _sum(record)})


class JournaledEngine(EngineProxy):
    """An engine that answers windows from a journal while it has any, and then trains for real.

    Args:
        engine: the engine that trains, at the job's beginning.
        journal: the campaign's journal.
    """

    def __init__(self, engine: Engine, journal: Journal) -> None:
        super().__init__(engine)
        self._journal = journal
        self._prepared = 0

    def prepare(self, plan: Plan, steps: int) -> None:
        """Begin a window that will be asked for, unless the journal will answer it."""
        ahead, self._prepared = self._prepared, self._prepared + 1
        if ahead >= self._journal.left:
            super().prepare(plan, steps)

    def run(self, steps: int) -> Measurement:
        """Return a window, from the journal if it has it.

        Raises:
            EngineError: if the engine was closed.
        """
        self.require_open()
        self._prepared = max(self._prepared - 1, 0)
        asked = {"window": self.plan.to_json(), "steps": steps, "memory_budget_bytes": self.memory_budget_bytes}
        seen = self._journal.once(asked, lambda: _finite(super(JournaledEngine, self).run(steps).to_json()))
        return Measurement.from_json(seen, where=self._journal.place)


def _finite(document: dict[str, Any]) -> dict[str, Any]:
    """Return a window whose gradient can be written as JSON: one that overflowed is left out."""
    gradient = document["gradient"]
    if gradient is not None:
        with contextlib.suppress(ValueError):
            json.dumps(gradient, allow_nan=False)
            return document
    return {**document, "gradient": None}


@document
class Record:
    """A line of ``journal.jsonl``: what was asked for, what came of it, and a checksum of both."""

    what: dict[str, Any]
    result: Any
    seconds: Seconds
    crc32: Count


def _checked(row: bytes, *, where: str) -> dict[str, Any]:
    with as_run_error():
        record = parse_line(row, where=where)
        validated(Record, record, where=where)
    if record.pop("crc32") != _sum(record):
        raise RunDirectoryError("is damaged: its checksum differs", where=where, allowed="a record as it was written")
    return record


def _sum(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _shown(what: dict[str, Any]) -> str:
    text = json.dumps(what)
    return text if len(text) <= 120 else f"{text[:117]}..."
