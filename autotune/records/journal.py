"""Journal of a campaign: an interrupted campaign is resumed by running it again with its journal.

With the same seed, a campaign requests the same expensive operations in the same order. Operations in the journal are
not repeated: their recorded results are returned.
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
from autotune.errors import InputError, RunDirectoryError, raised_as
from autotune.io.documents import Count, Seconds, document, validated
from autotune.io.files import append_json_line, open_for_appending, parse_line, read_bytes
from autotune.measurement import Measurement, quieter_window
from autotune.mechanics.processor_wait import Repetitions
from autotune.plan import Plan
from autotune.records.run_directory import BEGUN_WITH, LARGEST_LOG_BYTES, writing

JOURNAL = "journal.jsonl"
_KEPT = "a whole record; without this line and all after it, the records above are kept and the rest is measured again"


class Journal:
    """Operations of a campaign and their results, in order; on disk once the journal has a file.

    Attributes:
        replayed_s: seconds that the replayed operations took originally.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._records: list[dict[str, Any]] = []
        self._next = 0
        self.replayed_s = 0.0

    @classmethod
    def opened(cls, folder: Path) -> Journal:
        """Return the journal of a run directory for replay, without an incomplete last line of a killed process.

        The journal is empty if the campaign was killed before its first operation.

        Raises:
            RunDirectoryError: if the run has results but no journal, or a record is damaged.
        """
        journal = cls()
        path = folder / JOURNAL
        if not path.is_file():
            if any(child.name not in BEGUN_WITH and child.name[0] != "." for child in folder.iterdir()):
                raise RunDirectoryError("has no journal", where=str(folder), allowed="a run of tune or compare")
            open_for_appending(path).close()
        with raised_as(RunDirectoryError):
            rows = read_bytes(path, limit_bytes=LARGEST_LOG_BYTES, follow=False).split(b"\n")[:-1]
        for number, row in enumerate(rows, 1):
            journal._records.append(_checked(row, where=f"{path}, line {number}"))
        journal._path = path
        return journal

    @property
    def left(self) -> int:
        """Return the number of operations that are still to be replayed."""
        return len(self._records) - self._next

    @property
    def replaying(self) -> bool:
        """Return whether the next operation is replayed."""
        return self.left > 0

    @property
    def place(self) -> str:
        """Return the location of the last result, for error messages."""
        return f"{self._path}, line {self._next}, result"

    def keep_in(self, folder: Path) -> None:
        """Write all records, past and future, to a run directory.

        Raises:
            RunDirectoryError: if it cannot be written.
        """
        if self._path is None:
            self._path = folder / JOURNAL
            for record in self._records:
                self._write(record)

    def once(self, what: dict[str, Any], do: Callable[[], Any], kind: Any = Any) -> Any:
        """Return the recorded result of an operation; if there is none, perform the operation and record its result.

        Args:
            what: description of the operation, a JSON object.
            do: performs the operation and returns a JSON value.
            kind: type of the value, to check a recorded result; see :mod:`autotune.io.documents`.

        Raises:
            RunDirectoryError: if the journal has another operation here or a result of another type, or cannot be
                written.
        """
        operation = json.loads(json.dumps(what))
        if self.replaying:
            record = self._records[self._next]
            if record["what"] != operation:
                raise RunDirectoryError(
                    f"record {self._next + 1} is for {_shown(record['what'])}, "
                    f"but the campaign requests {_shown(operation)}",
                    where=str(self._path),
                    allowed="a run of the same version of the job and of autotune",
                )
            self._next += 1
            self.replayed_s += record["seconds"]
            validated(kind, record["result"], where=self.place, error=RunDirectoryError)
            return record["result"]
        began = time.perf_counter()
        result = do()
        record = {"what": operation, "result": result, "seconds": time.perf_counter() - began}
        self._records.append(record)
        self._next += 1
        if self._path is not None:
            self._write(record)
        return result

    def clock(self) -> float:
        """Return the seconds of a clock that includes the original time of replayed operations."""
        return time.perf_counter() + self.replayed_s

    def _write(self, record: dict[str, Any]) -> None:
        assert self._path is not None
        with writing(self._path):
            append_json_line(self._path, {**record, "crc32": _sum(record)})


class JournaledEngine(EngineProxy):
    """Engine that replays the windows of a journal, and then trains.

    Args:
        engine: the engine that trains; it begins at the start of the job.
        journal: the campaign's journal.
    """

    def __init__(self, engine: Engine, journal: Journal) -> None:
        super().__init__(engine)
        self._journal = journal
        self._prepared = 0
        self._repetitions = Repetitions()

    def prepare(self, plan: Plan, steps: int) -> None:
        """Start a window that will be requested, unless the journal has its result."""
        ahead, self._prepared = self._prepared, self._prepared + 1
        if ahead >= self._journal.left:
            super().prepare(plan, steps)

    def run(self, steps: int) -> Measurement:
        """Return the next window, from the journal if it is recorded there.

        A window that was disturbed by other programs is repeated once, unless repetitions prove vain; the steps of both
        count.

        Raises:
            EngineError: if the engine was closed.
        """
        self.require_open()
        self._prepared = max(self._prepared - 1, 0)
        asked = {"window": self.plan.to_json(), "steps": steps, "memory_budget_bytes": self.memory_budget_bytes}
        seen = self._journal.once(asked, lambda: _finite(self._undisturbed(steps).to_json()))
        return Measurement.from_json(seen, where=self._journal.place)

    def _undisturbed(self, steps: int) -> Measurement:
        window = super().run(steps)
        if window.failure is not None or not self._repetitions.is_due(window.waited_frac):
            return window
        again = super().run(steps)
        self._repetitions.made(again.waited_frac)
        return quieter_window(window, again)


def _finite(document: dict[str, Any]) -> dict[str, Any]:
    """Return a window without its gradient statistics if they are not finite, which JSON cannot express."""
    gradient = document["gradient"]
    if gradient is not None:
        with contextlib.suppress(ValueError):
            json.dumps(gradient, allow_nan=False)
            return document
    return {**document, "gradient": None}


@document
class Record:
    """A line of ``journal.jsonl``: an operation, its result, and a checksum of both."""

    what: dict[str, Any]
    result: Any
    seconds: Seconds
    crc32: Count


def _checked(row: bytes, *, where: str) -> dict[str, Any]:
    try:
        record = parse_line(row, where=where)
        validated(Record, record, where=where)
    except InputError as error:
        raise RunDirectoryError(error.problem, where=where, allowed=_KEPT) from error
    if record.pop("crc32") != _sum(record):
        raise RunDirectoryError("is damaged: its checksum differs", where=where, allowed=_KEPT)
    return record


def _sum(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _shown(what: dict[str, Any]) -> str:
    text = json.dumps(what)
    return text if len(text) <= 120 else f"{text[:117]}..."
