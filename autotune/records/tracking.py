"""Logging to MLflow that neither stops nor slows down the command.

Every record is first appended to ``tracking.jsonl`` in the run directory; a background thread sends it to the server. A
server that does not answer costs one short timeout: later records are only written to the file, and the next command
sends them. No other file imports mlflow.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

from autotune.errors import InputError, RunDirectoryError, RunLockedError, one_line
from autotune.io.addresses import scrubbed, sqlite_address, without_secrets
from autotune.io.files import append_json_line, open_for_appending, require_plain, write_json
from autotune.io.run_folder import TRACKING, WriterLock
from autotune.io.sqlite_files import BESIDE, require_own
from autotune.records.tracking_spool import CURSOR, SPOOL, Cursor, Row, artifact_of, read_cursor, read_rows

logger = logging.getLogger(__name__)

EXPERIMENT, DATABASE, ARTIFACTS = "autotune", "mlflow.db", "artifacts"
# By this tag, MLflow's pages show what belongs to the training of models, not to language models in use.
_TAGS = {"mlflow.experimentKind": "custom_model_development"}
# Error codes of a server for records that it will never accept.
_REFUSALS = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")
# Seconds within which a running server answers, and the longest wait at the end of a command.
_REQUEST_TIMEOUT_S = 2
_CLOSE_TIMEOUT_S = 30.0
Kind = Literal["begin", "params", "metrics", "tags", "artifact", "end"]


def tracking_uri(runs: Path) -> str:
    """Return ``MLFLOW_TRACKING_URI``, or the address of the SQLite database in the runs folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or sqlite_address(runs / DATABASE)


class Tracker:
    """Log of one command, as an MLflow run with nested runs.

    Args:
        runs: the runs folder, which contains the default database and the artifacts.
        folder: the command's run directory.
        name: name of the parent run.
    """

    def __init__(self, runs: Path, folder: Path, name: str) -> None:
        self._folder = folder
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._sender = _Sender(tracking_uri(runs), runs, folder)
        self._lock: WriterLock | None = None
        try:
            self._lock = WriterLock(folder, TRACKING)
        except RunDirectoryError as error:
            self._sender.broken = error.problem
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
        """Record metrics of a run at a step, without those that are ``None``."""
        known = {key: value for key, value in values.items() if value is not None}
        self._put("metrics", run, known, step=step, at_s=at_s)

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
                without_secrets(self._sender.uri),
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


def _make_database(path: Path) -> None:
    """Create MLflow's database atomically, since an incomplete one is unusable."""
    import fcntl

    # With fixed names, the next command removes the files of a killed one; a lock ends with its process.
    making, lock = path.with_name(f".{path.name}.making"), path.with_name(f".{path.name}.lock")
    with open_for_appending(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        _remove(making)
        # Another process may have created it.
        if not path.exists():
            _make_tables(making)
        if not path.exists():
            making.rename(path)
        _remove(making)
        lock.unlink(missing_ok=True)


def _make_tables(database: Path) -> None:
    """Create MLflow's tables, which takes seconds."""
    from mlflow import MlflowClient

    MlflowClient(tracking_uri=sqlite_address(database)).search_experiments(max_results=1)


def _remove(database: Path) -> None:
    """Remove a database and the files that SQLite keeps next to it."""
    for suffix in ("", *BESIDE):
        database.with_name(database.name + suffix).unlink(missing_ok=True)


def _begun(rows: Sequence[Row | None]) -> tuple[list[str], list[str]]:
    """Return the names of all runs that an earlier command began, and the keys of those that it did not end."""
    whole = [row for row in rows if row is not None]
    names = [row["values"]["name"] for row in whole if row["kind"] == "begin"]
    begun = [row["run"] for row in whole if row["kind"] == "begin"]
    ended = {row["run"] for row in whole if row["kind"] == "end"}
    return names, [key for key in reversed(begun) if key not in ended]


def _key(name: str) -> str:
    """Replace characters of a name that MLflow does not accept."""
    return re.sub(r"[^\w\-. :/]", "-", name)


def send_pending(runs: Path) -> int:
    """Send the records that earlier commands could not send, and return their number.

    Runs that are being written are skipped; a damaged run is logged once and skipped. Sending stops when the server
    fails.
    """
    sent = 0
    for spool in sorted(runs.glob(f"*/{SPOOL}")):
        folder = spool.parent
        try:
            count, broken = _send_folder(runs, folder)
        except RunLockedError:
            continue
        except InputError as error:
            if folder not in _NAMED:
                _NAMED.add(folder)
                logger.warning("%s; its records are not sent", error)
            continue
        sent += count
        if broken:
            break
    return sent


# Damaged run directories that were already logged.
_NAMED: set[Path] = set()


def _send_folder(runs: Path, folder: Path) -> tuple[int, str]:
    """Send the unsent records of one run directory; return the number sent, and why sending stopped."""
    if folder.is_symlink():
        return 0, ""
    require_plain(folder)
    rows = read_rows(folder)
    if read_cursor(folder).sent >= len(rows):
        return 0, ""
    with WriterLock(folder, TRACKING):
        sender = _Sender(tracking_uri(runs), runs, folder)
        before = sender.sent
        for row in rows[before:]:
            sender.send(row)
        sender.finish()
    return sender.sent - before, sender.broken


class _LeftOutError(Exception):
    """A record that must not be sent."""


class _Sender:
    """Sender of records to one server, in order, until the server fails."""

    def __init__(self, uri: str, runs: Path, folder: Path) -> None:
        self.uri = uri
        self.broken = ""
        self._runs = runs
        self._folder = folder
        self._client: Any = None
        self._experiment: str | None = None
        try:
            state = read_cursor(folder)
        except RunDirectoryError as error:
            # It is unknown which records were sent: send none rather than some twice.
            self.broken, state = str(error), Cursor(sent=0, ids={})
        self.sent = state.sent
        self._ids = dict(state.ids)

    def send(self, record: Mapping[str, Any] | None) -> None:
        if self.broken:
            return
        if record is None:
            self.sent += 1
            return
        try:
            if self._client is None:
                self._connect()
            self._dispatch(record)
        except _LeftOutError as error:
            logger.warning("%s; it is not sent", error)
        except Exception as error:  # noqa: BLE001 - errors of a tracking server must not reach training
            if self._refused(record, error):
                self.sent += 1
                return
            self.broken = scrubbed(one_line(error), self.uri)[:200]
            self.finish()
            return
        self.sent += 1
        if record["kind"] == "begin":
            # Save the position, since a run that is begun twice would be two runs; other records may be sent twice.
            self.finish()

    def _refused(self, record: Mapping[str, Any], error: Exception) -> bool:
        """Return whether a working server refuses one record, such as a second value of a parameter.

        Sending such a record again would block all later records, including those of other runs.
        """
        known = self._experiment is not None if record["kind"] == "begin" else record["run"] in self._ids
        if not known or getattr(error, "error_code", None) not in _REFUSALS:
            return False
        logger.warning("%s: %s of %s was refused and is skipped", self._folder, record["kind"], record["run"])
        return True

    def finish(self) -> None:
        """Save the number of records that the server has."""
        if self._client is None:
            return
        try:
            write_json(self._folder / CURSOR, {"sent": self.sent, "ids": self._ids})
        except OSError as error:
            logger.warning("tracking position not written: %s", error)

    def _connect(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_REQUEST_TIMEOUT_S))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        # mlflow reads this level when it is imported; its migrations would otherwise log many lines.
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "CRITICAL")
        logging.getLogger("alembic").setLevel(logging.ERROR)
        # This sender reports failures itself, in one line.
        for name in ("mlflow", "sqlalchemy.pool"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        from mlflow import MlflowClient

        own = self._runs / DATABASE
        if self.uri == sqlite_address(own):
            require_own(own)
            if not own.exists():
                _make_database(own)
        self._client = MlflowClient(tracking_uri=self.uri)
        found = self._client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            self._experiment = found.experiment_id
        elif not self.uri.startswith(("http://", "https://")):
            # A database stores no files; by default, MLflow would write them to the working directory.
            location = (self._runs / ARTIFACTS).absolute().as_uri()
            self._experiment = self._client.create_experiment(EXPERIMENT, artifact_location=location, tags=_TAGS)
        else:
            self._experiment = self._client.create_experiment(EXPERIMENT, tags=_TAGS)

    def _dispatch(self, record: Mapping[str, Any]) -> None:
        values, step = record["values"], record["step"]
        if record["kind"] == "begin":
            self._begin(record["run"], values, record.get("time_ms"))
            return
        run = self._ids.get(record["run"])
        if run is None:
            raise _LeftOutError(f"{self._folder}: a record belongs to run {record['run']!r}, which was never begun")
        if record["kind"] == "artifact":
            path = self._artifact(record)
            self._require_own_place(run)
            send = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
            send(run, str(path), *([path.name] if path.is_dir() else []))
        elif record["kind"] == "end":
            self._client.set_terminated(run, status=values["status"], end_time=record.get("time_ms"))
        else:
            self._batch(run, record["kind"], values, step, record.get("time_ms"))

    def _artifact(self, record: Row) -> Path:
        try:
            return artifact_of(self._folder, record)
        except (InputError, OSError) as error:
            raise _LeftOutError(one_line(error)) from error

    def _require_own_place(self, run: str) -> None:
        """Refuse artifact locations outside the runs folder, if the database is the one in that folder."""
        if self.uri != sqlite_address(self._runs / DATABASE):
            return
        place = self._client.get_run(run).info.artifact_uri
        found, folder = urlsplit(place), self._runs / ARTIFACTS / run / "artifacts"
        own = (
            run.isalnum()
            and found.scheme in ("", "file")
            and not found.netloc
            and Path(url2pathname(found.path)).resolve() == folder.resolve()
            and not folder.parent.is_symlink()
            and not folder.is_symlink()
        )
        if not own:
            raise _LeftOutError(f"{self._runs / DATABASE}: artifacts would go to {without_secrets(place)}")
        if folder.is_dir():
            try:
                require_plain(folder)
            except InputError as error:
                raise _LeftOutError(one_line(error)) from error

    def _begin(self, key: str, values: Mapping[str, Any], time_ms: int | None) -> None:
        parent = self._ids.get(values["parent"] or "")
        tags = {"mlflow.parentRunId": parent} if parent else {}
        run = self._client.create_run(self._experiment, start_time=time_ms, run_name=values["name"], tags=tags)
        self._ids[key] = run.info.run_id

    def _batch(self, run: str, kind: Kind, values: Mapping[str, Any], step: int, time_ms: int | None) -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.utils.time import get_current_time_millis

        now = get_current_time_millis() if time_ms is None else time_ms
        if kind == "metrics":
            self._client.log_batch(run, metrics=[Metric(_key(key), float(v), now, step) for key, v in values.items()])
        elif kind == "params":
            self._client.log_batch(run, params=[Param(_key(key), value) for key, value in values.items()])
        else:
            self._client.log_batch(run, tags=[RunTag(_key(key), value) for key, value in values.items()])
