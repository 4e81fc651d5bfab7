"""Logging to an experiment tracker that neither stops nor slows down the command.

Every record is first appended to ``tracking.jsonl`` in the run directory; a background thread sends it to MLflow,
TensorBoard or Weights & Biases. A server that does not answer costs one short timeout: later records are only written
to the file, and the next command sends them.
"""

from __future__ import annotations

import hashlib
import logging
import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from autotune.errors import InputError, RunDirectoryError, RunLockedError, one_line
from autotune.io.addresses import scrubbed, without_secrets
from autotune.io.files import append_json_line, require_plain, write_json
from autotune.io.run_folder import TRACKING, WriterLock
from autotune.records.destinations import LeftOutError, destination
from autotune.records.tracking_spool import CURSOR, SPOOL, Cursor, Row, artifact_of, read_cursor, read_rows
from autotune.report_to import Name, chosen

logger = logging.getLogger(__name__)

# The longest wait at the end of a command, in seconds.
_CLOSE_TIMEOUT_S = 30.0
Kind = Literal["begin", "params", "metrics", "tags", "artifact", "end"]


class Tracker:
    """Log of one command, as a run of an experiment tracker with nested runs.

    Args:
        runs: the runs folder, which contains the default database and the artifacts.
        folder: the command's run directory.
        name: name of the parent run.
        report_to: name of the tracker; ``None`` for that in ``AUTOTUNE_REPORT_TO``, or ``mlflow``. A resumed command
            goes on with the tracker with which it began.

    Raises:
        InputError: if there is no such tracker, or its library is not installed.
    """

    def __init__(self, runs: Path, folder: Path, name: str, report_to: str | None = None) -> None:
        self._folder = folder
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._sender = _Sender(runs, folder, chosen(report_to))
        self._lock: WriterLock | None = None
        try:
            self._lock = WriterLock(folder, TRACKING)
        except RunDirectoryError as error:
            self._sender.broken = error.problem
        if not self._sender.broken:
            self._sender.keep()
        self._thread = threading.Thread(target=self._work, name="autotune-tracking", daemon=True)
        rows = read_rows(folder)
        for row in rows[self._sender.sent :]:
            # Send the unsent records of a resumed command first.
            self._queue.put({"kind": "damaged"} if row is None else dict(row))
        self._names, left = _begun(rows)
        for key in left:
            # A resumed command was killed before: end the runs that it left open.
            self._put("end", key, {"status": "KILLED"})
        self.parent = self._begin(name, None)
        self._thread.start()

    def knows(self, name: str) -> bool:
        """Return whether this command, or the one that it resumes, began a run of this name."""
        return name in self._names

    def begin(self, name: str, *, at_s: float | None = None) -> str:
        """Begin a nested run and return its key.

        Args:
            name: name of the run.
            at_s: POSIX time at which it began, here and below; ``None`` for now.
        """
        return self._begin(name, self.parent, at_s)

    def params(self, values: Mapping[str, object], run: str | None = None) -> None:
        """Record parameters of a run, by default of the parent."""
        self._put("params", run, {key: str(value)[:500] for key, value in values.items()})

    def metrics(
        self,
        values: Mapping[str, float | None],
        *,
        step: int = 0,
        run: str | None = None,
        at_s: float | None = None,
    ) -> None:
        """Record metrics of a run at a step, without those that are ``None``; those that are not finite become tags."""
        known = {key: value for key, value in values.items() if value is not None}
        finite = {key: value for key, value in known.items() if math.isfinite(value)}
        self._put("metrics", run, finite, step=step, at_s=at_s)
        if len(finite) < len(known):
            # JSON has no such numbers.
            self.tags({key: value for key, value in known.items() if key not in finite}, run)

    def tags(self, values: Mapping[str, object], run: str | None = None) -> None:
        """Record tags of a run."""
        self._put("tags", run, {key: str(value)[:500] for key, value in values.items()})

    def artifact(self, path: Path, run: str | None = None) -> None:
        """Record a file or a folder of the run directory."""
        self._put("artifact", run, {"path": str(path.absolute().relative_to(self._folder.absolute()))})

    def end(self, run: str | None = None, *, failed: bool = False, at_s: float | None = None) -> None:
        """End a run."""
        self._put("end", run, {"status": "FAILED" if failed else "FINISHED"}, at_s=at_s)

    def settle(self, timeout_s: float = 1.0) -> None:
        """Wait until the background thread is idle, so that it does not disturb a measurement.

        Return at once if the server does not answer.
        """
        done = threading.Event()
        self._queue.put({"kind": "event", "event": done})
        if not self._sender.broken:
            done.wait(timeout_s)

    def close(self, *, failed: bool = False) -> None:
        """End the parent run, and wait a short time for queued records."""
        self.end(failed=failed)
        self._queue.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._lock is not None and not self._thread.is_alive():
            self._lock.close()
        if self._sender.broken or self._thread.is_alive():
            logger.warning(
                "tracking at %s does not answer (%s); its records are kept in %s and the next command sends them",
                self._sender.address,
                self._sender.broken or "too slow",
                self._folder / SPOOL,
            )

    def _begin(self, name: str, parent: str | None, at_s: float | None = None) -> str:
        self._names.append(name)
        key = f"run-{len(self._names)}"
        self._put("begin", key, {"name": name, "parent": parent}, at_s=at_s)
        return key

    def _put(
        self, kind: Kind, run: str | None, values: Mapping[str, Any], *, step: int = 0, at_s: float | None = None
    ) -> None:
        key, time_ms = self.parent if run is None else run, int((at_s or time.time()) * 1e3)
        record = {"kind": kind, "run": key, "values": dict(values), "step": step, "time_ms": time_ms}
        try:
            append_json_line(self._folder / SPOOL, record)
        except (OSError, ValueError) as error:
            logger.warning("tracking record dropped: %s", error)
            return
        self._queue.put(record)

    def _work(self) -> None:
        while (record := self._queue.get()) is not None:
            if record["kind"] == "event":
                record["event"].set()
            else:
                self._sender.send(None if record["kind"] == "damaged" else record)
                if self._queue.empty():
                    self._sender.finish()
        self._sender.finish()


def _begun(rows: Sequence[Row | None]) -> tuple[list[str], list[str]]:
    """Return the names of all runs that an earlier command began, and the keys of those that it did not end."""
    whole = [row for row in rows if row is not None]
    names = [row["values"]["name"] for row in whole if row["kind"] == "begin"]
    begun = [row["run"] for row in whole if row["kind"] == "begin"]
    ended = {row["run"] for row in whole if row["kind"] == "end"}
    return names, [key for key in reversed(begun) if key not in ended]


def send_pending(runs: Path) -> int:
    """Send the records that earlier commands could not send, and return their number.

    Runs that are being written are skipped; a damaged run is logged once and skipped. Nothing more is sent to a tracker
    that fails.
    """
    sent, broken = 0, set[str]()
    for spool in sorted(runs.glob(f"*/{SPOOL}")):
        folder = spool.parent
        try:
            sent += _send_folder(runs, folder, broken)
        except RunLockedError:
            continue
        except InputError as error:
            if folder not in _NAMED:
                _NAMED.add(folder)
                logger.warning("%s; its records are not sent", error)
            continue
    return sent


# Damaged run directories that were already logged.
_NAMED: set[Path] = set()


def _send_folder(runs: Path, folder: Path, broken: set[str]) -> int:
    """Send the unsent records of one run directory, and return their number.

    Args:
        runs: the runs folder.
        folder: the run directory.
        broken: names of the trackers that have failed, to which this one's is added if it fails.
    """
    if folder.is_symlink():
        return 0
    require_plain(folder)
    rows = read_rows(folder)
    cursor = read_cursor(folder)
    report_to = "mlflow" if cursor is None else cursor.report_to
    if report_to in broken or (cursor is not None and cursor.sent >= len(rows)):
        return 0
    with WriterLock(folder, TRACKING):
        sender = _Sender(runs, folder)
        before = sender.sent
        for row in rows[before:]:
            sender.send(row)
        sender.finish()
    if sender.broken:
        broken.add(report_to)
    return sender.sent - before


class _Sender:
    """Sender of a run directory's records to one tracker, in order, until the tracker fails.

    Args:
        runs: the runs folder.
        folder: the run directory.
        report_to: name of the tracker, for a run directory whose records were not sent anywhere yet.
    """

    def __init__(self, runs: Path, folder: Path, report_to: Name = "mlflow") -> None:
        self.broken = ""
        self._folder = folder
        self._is_connected = False
        try:
            self._cursor = read_cursor(folder) or Cursor(sent=0, ids={}, report_to=report_to)
        except RunDirectoryError as error:
            # It is unknown which records were sent: send none rather than some twice.
            self.broken, self._cursor = str(error), Cursor(sent=0, ids={}, report_to="none")
        self._to = destination(self._cursor.report_to, runs, folder)

    @property
    def sent(self) -> int:
        """Return the number of records that the tracker has."""
        return self._cursor.sent

    @property
    def address(self) -> str:
        """Return where the records go, without a password."""
        return without_secrets(self._to.address)

    def send(self, record: Row | None) -> None:
        """Send a record; skip it if it is ``None``, which stands for a damaged one."""
        if self.broken:
            return
        try:
            if record is not None:
                if not self._is_connected:
                    self._to.connect()
                    self._is_connected = True
                self._dispatch(record)
        except LeftOutError as error:
            logger.warning("%s; it is not sent", error)
        except Exception as error:  # noqa: BLE001 - errors of a tracking server must not reach training
            if record is None or not self._refuses(record, error):
                self.broken = scrubbed(one_line(error), self._to.address)[:200]
                self.finish()
                return
        self._cursor = replace(self._cursor, sent=self.sent + 1)
        if record is not None and record["kind"] == "begin":
            # Save the position, since a run that is begun twice would be two runs; other records may be sent twice.
            self.finish()

    def finish(self) -> None:
        """Write what the tracker buffers, and save the number of records that it has."""
        if not self._is_connected:
            return
        try:
            self._to.flush()
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning("%s: %s", self.address, scrubbed(one_line(error), self._to.address)[:200])
        self.keep()

    def keep(self) -> None:
        """Save to which tracker the records go, and how many it has."""
        try:
            write_json(self._folder / CURSOR, asdict(self._cursor))
        except OSError as error:
            logger.warning("tracking position not written: %s", error)

    def _refuses(self, record: Row, error: Exception) -> bool:
        """Return whether a working tracker refuses one record, such as a second value of a parameter.

        Sending such a record again would block all later records, including those of other runs.
        """
        begins = record["kind"] == "begin"
        if not self._to.refuses(error) or not (begins or record["run"] in self._cursor.ids):
            return False
        logger.warning("%s: %s of %s was refused and is skipped", self._folder, record["kind"], record["run"])
        return True

    def _dispatch(self, record: Row) -> None:
        kind, values, at_ms = record["kind"], record["values"], record.get("time_ms")
        if kind == "begin":
            own = f"{self._folder.name}/{record['run']}/{at_ms}"
            key = hashlib.sha256(own.encode(errors="surrogateescape")).hexdigest()[:32]
            run = self._to.begin(values["name"], self._cursor.ids.get(values["parent"] or ""), at_ms, key)
            self._cursor = replace(self._cursor, ids={**self._cursor.ids, record["run"]: run})
            return
        found = self._cursor.ids.get(record["run"])
        if found is None:
            raise LeftOutError(f"{self._folder}: a record belongs to run {record['run']!r}, which was never begun")
        if kind == "artifact":
            self._to.artifact(found, self._artifact(record))
        elif kind == "end":
            self._to.end(found, values["status"], at_ms)
        elif kind == "metrics":
            self._to.metrics(found, values, record["step"], at_ms)
        elif kind == "params":
            self._to.params(found, values)
        else:
            self._to.tags(found, values)

    def _artifact(self, record: Row) -> Path:
        try:
            return artifact_of(self._folder, record)
        except (InputError, OSError) as error:
            raise LeftOutError(one_line(error)) from error
