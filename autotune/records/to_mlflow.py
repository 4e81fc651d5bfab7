"""Records as runs of MLflow; no other file imports mlflow."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from autotune.errors import InputError, one_line
from autotune.io.addresses import sqlite_address, without_secrets
from autotune.io.files import open_for_appending, require_plain
from autotune.io.sqlite_files import BESIDE, require_own
from autotune.records.destinations import Destination, LeftOutError

EXPERIMENT, DATABASE, ARTIFACTS = "autotune", "mlflow.db", "artifacts"
# By this tag, MLflow's pages show what belongs to the training of models, not to language models in use.
_TAGS = {"mlflow.experimentKind": "custom_model_development"}
# The tag with a run's key.
_KEY = "autotune.key"
# Error codes of a server for records that it will never accept.
_REFUSALS = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")
# Seconds within which a running server answers.
_REQUEST_TIMEOUT_S = 2


def tracking_uri(runs: Path) -> str:
    """Return ``MLFLOW_TRACKING_URI``, or the address of the SQLite database in the runs folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or sqlite_address(runs / DATABASE)


class ToMLflow(Destination):
    """An MLflow server, or the SQLite database in the runs folder."""

    def __init__(self, runs: Path) -> None:
        self.address = tracking_uri(runs)
        self._runs = runs
        self._client: Any = None
        self._experiment: str | None = None
        # Only the first run of a process may have been begun before, by a process that was killed.
        self._has_begun = False

    def connect(self) -> None:
        """Import the library, and open or create what holds the runs."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_REQUEST_TIMEOUT_S))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        # mlflow reads this level when it is imported; its migrations would otherwise log many lines.
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "CRITICAL")
        logging.getLogger("alembic").setLevel(logging.ERROR)
        # The sender reports failures itself, in one line.
        for name in ("mlflow", "sqlalchemy.pool"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        from mlflow import MlflowClient

        own = self._runs / DATABASE
        if self.address == sqlite_address(own):
            require_own(own)
            if not own.exists():
                _make_database(own)
        self._client = MlflowClient(tracking_uri=self.address)
        found = self._client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            self._experiment = found.experiment_id
        elif not self.address.startswith(("http://", "https://")):
            # A database stores no files; by default, MLflow would write them to the working directory.
            location = (self._runs / ARTIFACTS).absolute().as_uri()
            self._experiment = self._client.create_experiment(EXPERIMENT, artifact_location=location, tags=_TAGS)
        else:
            self._experiment = self._client.create_experiment(EXPERIMENT, tags=_TAGS)

    def begin(self, name: str, parent: str | None, at_ms: int | None, key: str) -> str:
        """Begin a run and return its id."""
        found = [] if self._has_begun else self._client.search_runs([self._experiment], f"tags.`{_KEY}` = '{key}'")
        if not found:
            nested = {} if parent is None else {"mlflow.parentRunId": parent}
            tags = {_KEY: key, **nested}
            found = [self._client.create_run(self._experiment, start_time=at_ms, run_name=name, tags=tags)]
        self._has_begun = True
        return str(found[0].info.run_id)

    def params(self, run: str, values: Mapping[str, str]) -> None:
        """Log parameters."""
        from mlflow.entities import Param

        self._client.log_batch(run, params=[Param(_key(key), value) for key, value in values.items()])

    def tags(self, run: str, values: Mapping[str, str]) -> None:
        """Log tags."""
        from mlflow.entities import RunTag

        self._client.log_batch(run, tags=[RunTag(_key(key), value) for key, value in values.items()])

    def metrics(self, run: str, values: Mapping[str, float], step: int, at_ms: int | None) -> None:
        """Log metrics of one step."""
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        now = get_current_time_millis() if at_ms is None else at_ms
        self._client.log_batch(run, metrics=[Metric(_key(key), float(v), now, step) for key, v in values.items()])

    def artifact(self, run: str, path: Path) -> None:
        """Log a file or folder."""
        self._require_own_place(run)
        if path.is_dir():
            self._client.log_artifacts(run, str(path), path.name)
        else:
            self._client.log_artifact(run, str(path))

    def end(self, run: str, status: str, at_ms: int | None) -> None:
        """End a run."""
        self._client.set_terminated(run, status=status, end_time=at_ms)

    def refuses(self, error: Exception) -> bool:
        """Return whether a server that answers refuses the record, such as a second value of a parameter."""
        return getattr(error, "error_code", None) in _REFUSALS and self._experiment is not None

    def _require_own_place(self, run: str) -> None:
        """Refuse artifact locations outside the runs folder, if the database is the one in that folder."""
        if self.address != sqlite_address(self._runs / DATABASE):
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
            raise LeftOutError(f"{self._runs / DATABASE}: artifacts would go to {without_secrets(place)}")
        if folder.is_dir():
            try:
                require_plain(folder)
            except InputError as error:
                raise LeftOutError(one_line(error)) from error


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


def _key(name: str) -> str:
    """Replace characters of a name that MLflow does not accept."""
    return re.sub(r"[^\w\-. :/]", "-", name)
