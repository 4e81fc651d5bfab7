"""Log to MLflow without ever stopping or slowing what is logged.

Every record is appended to ``tracking.jsonl`` in the run directory first; one background thread sends it on. A server
that does not answer costs one short time-out: from then on records are only kept, and the next command sends them.

The only file that knows mlflow.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from autotune.errors import one_line
from autotune.files import append_json_line, write_json

logger = logging.getLogger(__name__)

SPOOL, CURSOR = "tracking.jsonl", "tracking-sent.json"
EXPERIMENT = "autotune"
# A server that is there answers within this; a command waits for at most this long at its end.
_REQUEST_TIMEOUT_S = 2
_CLOSE_TIMEOUT_S = 30.0
Kind = Literal["begin", "params", "metrics", "tags", "artifact", "end"]


def tracking_uri(runs: Path) -> str:
    """Return ``MLFLOW_TRACKING_URI``, or SQLite in the runs folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(runs / 'mlflow.db').absolute()}"


class Tracker:
    """Record one command as an MLflow run with nested runs.

    Args:
        runs: the runs folder: home of the default database and of artifacts.
        folder: the command's run directory.
        name: the parent run's name.
    """

    def __init__(self, runs: Path, folder: Path, name: str) -> None:
        self._folder = folder
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._sender = _Sender(tracking_uri(runs), runs, folder)
        self._thread = threading.Thread(target=self._work, name="autotune-tracking", daemon=True)
        for row in _rows(folder / SPOOL)[self._sender.sent :]:
            # What a command that is taken up again did not get sent goes before all else.
            self._queue.put(row or {"kind": "damaged"})
        self._names, left = _begun(folder / SPOOL)
        for key in left:
            # A command that is taken up again was killed: what it left open is over.
            self._put("end", key, {"status": "KILLED"})
        self.parent = self._begin(name, None)
        self._thread.start()

    def knows(self, name: str) -> bool:
        """Tell whether a run of this name was begun, by this command or by one that it takes up."""
        return name in self._names

    def begin(self, name: str) -> str:
        """Begin a nested run and return its key."""
        return self._begin(name, self.parent)

    def params(self, values: Mapping[str, object], run: str | None = None) -> None:
        """Record parameters of a run (the parent's by default)."""
        self._put("params", run, {key: str(value)[:500] for key, value in values.items()})

    def metrics(self, values: Mapping[str, float | None], *, step: int = 0, run: str | None = None) -> None:
        """Record metrics of a run at a step; what is ``None`` is left out."""
        self._put("metrics", run, {key: value for key, value in values.items() if value is not None}, step=step)

    def tags(self, values: Mapping[str, object], run: str | None = None) -> None:
        """Record tags of a run."""
        self._put("tags", run, {key: str(value)[:500] for key, value in values.items()})

    def artifact(self, path: Path, run: str | None = None) -> None:
        """Record a file or a folder of the run directory."""
        self._put("artifact", run, {"path": str(path.absolute())})

    def end(self, run: str | None = None, *, failed: bool = False) -> None:
        """End a run."""
        self._put("end", run, {"status": "FAILED" if failed else "FINISHED"})

    def settle(self, timeout_s: float = 1.0) -> None:
        """Let the background thread catch up, so that it does not run while something is timed.

        Returns at once if the server does not answer.
        """
        done = threading.Event()
        self._queue.put({"kind": "event", "event": done})
        if not self._sender.broken:
            done.wait(timeout_s)

    def close(self, *, failed: bool = False) -> None:
        """End the parent run and wait for what is queued, but never long."""
        self.end(failed=failed)
        self._queue.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._sender.broken or self._thread.is_alive():
            logger.warning(
                "tracking at %s does not answer (%s); its records are kept in %s and the next command sends them",
                self._sender.uri,
                self._sender.broken or "too slow",
                self._folder / SPOOL,
            )

    def _begin(self, name: str, parent: str | None) -> str:
        self._names.append(name)
        key = f"run-{len(self._names)}"
        self._put("begin", key, {"name": name, "parent": parent})
        return key

    def _put(self, kind: Kind, run: str | None, values: Mapping[str, Any], *, step: int = 0) -> None:
        record = {"kind": kind, "run": self.parent if run is None else run, "values": dict(values), "step": step}
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
    """Make MLflow's database whole or not at all: one whose making was cut off is of no use any more."""
    from mlflow import MlflowClient

    making = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        MlflowClient(tracking_uri=f"sqlite:///{making}").search_experiments(max_results=1)
        # Another process may have been faster.
        with contextlib.suppress(FileExistsError):
            os.link(making, path)
    finally:
        making.unlink(missing_ok=True)


def _begun(spool: Path) -> tuple[list[str], list[str]]:
    """Return the names of the runs that an earlier command began in a run directory, and keys of those left open."""
    rows = [row for row in _rows(spool) if row is not None]
    names = [row["values"]["name"] for row in rows if row["kind"] == "begin"]
    begun = [row["run"] for row in rows if row["kind"] == "begin"]
    ended = {row["run"] for row in rows if row["kind"] == "end"}
    return names, [key for key in reversed(begun) if key not in ended]


def _key(name: str) -> str:
    """Return a name as MLflow takes it; an arm may be called otherwise."""
    return re.sub(r"[^\w\-. :/]", "-", name)


def _rows(spool: Path) -> list[dict[str, Any] | None]:
    """Return the records of a spool; ``None`` for one that is damaged."""
    if not spool.is_file():
        return []
    rows: list[dict[str, Any] | None] = []
    for line in spool.read_bytes().split(b"\n")[:-1]:
        try:
            rows.append(json.loads(line))
        except ValueError:
            rows.append(None)
    return rows


def send_pending(runs: Path) -> int:
    """Send what earlier commands could not, and return how many records that were.

    Stops at the first run that the server does not take.
    """
    sent = 0
    for spool in sorted(runs.glob(f"*/{SPOOL}")):
        rows = _rows(spool)
        sender = _Sender(tracking_uri(runs), runs, spool.parent)
        if sender.sent >= len(rows):
            continue
        before = sender.sent
        for row in rows[before:]:
            sender.send(row)
        sender.finish()
        sent += sender.sent - before
        if sender.broken:
            break
    return sent


class _Sender:
    """Send records in order to one server; give up on the first that it does not take."""

    def __init__(self, uri: str, runs: Path, folder: Path) -> None:
        self.uri = uri
        self.broken = ""
        self._runs = runs
        self._cursor = folder / CURSOR
        self._client: Any = None
        state: dict[str, Any] = (
            json.loads(self._cursor.read_text()) if self._cursor.is_file() else {"sent": 0, "ids": {}}
        )
        self.sent: int = state["sent"]
        self._ids: dict[str, str] = state["ids"]

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
        except Exception as error:  # noqa: BLE001 - whatever a tracking server does must not reach training
            self.broken = one_line(error)[:200]
            self.finish()
            return
        self.sent += 1
        if record["kind"] == "begin":
            # Whatever else is sent twice is the same; a run that is begun twice is two.
            self.finish()

    def finish(self) -> None:
        """Remember how far the server has got."""
        try:
            write_json(self._cursor, {"sent": self.sent, "ids": self._ids})
        except OSError as error:
            logger.warning("tracking position not written: %s", error)

    def _connect(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_REQUEST_TIMEOUT_S))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        # Read when mlflow is imported: its migrations would announce themselves line by line.
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "CRITICAL")
        logging.getLogger("alembic").setLevel(logging.ERROR)
        # What fails is told by this sender, in one line.
        for name in ("mlflow", "sqlalchemy.pool"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        from mlflow import MlflowClient

        path = Path(self.uri.removeprefix("sqlite:///"))
        if self.uri.startswith("sqlite:///") and not path.exists():
            _make_database(path)
        self._client = MlflowClient(tracking_uri=self.uri)
        found = self._client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            self._experiment = found.experiment_id
        elif not self.uri.startswith(("http://", "https://")):
            # A database keeps no files: they would go to wherever the command was called.
            location = (self._runs / "artifacts").absolute().as_uri()
            self._experiment = self._client.create_experiment(EXPERIMENT, artifact_location=location)
        else:
            self._experiment = self._client.create_experiment(EXPERIMENT)

    def _dispatch(self, record: Mapping[str, Any]) -> None:
        values, step = record["values"], record["step"]
        if record["kind"] == "begin":
            self._begin(record["run"], values)
            return
        run = self._ids[record["run"]]
        if record["kind"] == "artifact":
            path = Path(values["path"])
            send = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
            send(run, str(path), *([path.name] if path.is_dir() else []))
        elif record["kind"] == "end":
            self._client.set_terminated(run, status=values["status"])
        else:
            self._batch(run, record["kind"], values, step)

    def _begin(self, key: str, values: Mapping[str, Any]) -> None:
        parent = values["parent"]
        tags = {"mlflow.parentRunId": self._ids[parent]} if parent else {}
        run = self._client.create_run(self._experiment, run_name=values["name"], tags=tags)
        self._ids[key] = run.info.run_id

    def _batch(self, run: str, kind: Kind, values: Mapping[str, Any], step: int) -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.utils.time import get_current_time_millis

        now = get_current_time_millis()
        if kind == "metrics":
            self._client.log_batch(run, metrics=[Metric(_key(key), float(v), now, step) for key, v in values.items()])
        elif kind == "params":
            self._client.log_batch(run, params=[Param(_key(key), value) for key, value in values.items()])
        else:
            self._client.log_batch(run, tags=[RunTag(_key(key), value) for key, value in values.items()])
