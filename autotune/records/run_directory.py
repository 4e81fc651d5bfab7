"""Keep run directories: one folder per command, every document written atomically."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from autotune.errors import InputError, RunDirectoryError
from autotune.io.documents import validated
from autotune.io.files import append_json_line, read_json, read_json_lines, require_plain, write_json
from autotune.io.run_folder import WriterLock, new_run_folder
from autotune.job import Job
from autotune.mechanics.devices import device_kind, device_name, fp32_arithmetic, settings
from autotune.plan import Plan
from autotune.records.run_documents import Config, Environment, config_of

_PACKAGES = (
    "torch",
    "numpy",
    "gymnasium",
    "stable-baselines3",
    "sb3-contrib",
    "optuna",
    "mlflow-skinny",
    "scipy",
)
# What a run directory is made with.
BEGUN_WITH = ("environment.json", "config.json")
# The job's profile, as it was when the run was begun.
PROFILE = "profile.json"
# Files to which a record is added at every window, trial or step.
LARGEST_LOG_BYTES = 2**30
# A plan of ten thousand units has less than one megabyte.
_LARGEST_PLAN_BYTES = 4 * 2**20


class RunDirectory:
    """One run's folder, ``<runs>/<utc time>-<verb>-<job>-<id>/``.

    A folder may come from anybody. It is read as data: regular files and folders only, each document within a limit and
    checked by its kind. Whoever writes in it holds its lock, from :meth:`create` or :meth:`take_up` to :meth:`close`.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: WriterLock | None = None

    @classmethod
    def create(cls, runs: Path, verb: str, job: Job | str, config: Mapping[str, Any]) -> RunDirectory:
        """Make the folder, take its lock, and write ``config.json`` and ``environment.json``.

        Args:
            runs: the runs folder.
            verb: the command.
            job: the job, or what else the run is called after.
            config: what the command was asked for.

        Raises:
            RunDirectoryError: if it cannot be written.
        """
        called = job if isinstance(job, str) else job.name
        path = new_run_folder(runs, verb, called)
        try:
            path.mkdir(parents=True)
        except OSError as error:
            raise RunDirectoryError(
                f"cannot be written ({error.strerror})",
                where=f"--runs-dir {runs}",
                allowed="a writable folder",
            ) from error
        run = cls(path)
        run._lock = WriterLock(path)
        # What makes the folder a run comes last.
        run.write("environment.json", describe_environment(None if isinstance(job, str) else job))
        run.write("config.json", {"version": 1, "verb": verb, "job": called, **config})
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open an existing run to read it.

        Raises:
            RunDirectoryError: if the folder holds no ``config.json``, or holds links, pipes, sockets or devices.
        """
        with as_run_error():
            if not (path / "config.json").is_file():
                raise RunDirectoryError("is no run directory", where=str(path), allowed="a folder with config.json")
            require_plain(path)
        return cls(path)

    @classmethod
    def take_up(cls, path: Path) -> RunDirectory:
        """Open an existing run to write in it, and take its lock.

        Raises:
            RunDirectoryError: as :meth:`open`, or if another process writes in it.
        """
        run = cls.open(path)
        run._lock = WriterLock(path)
        return run

    def close(self) -> None:
        """Let others write in the folder."""
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def config(self) -> Config:
        """Return what the run was asked for.

        Raises:
            RunDirectoryError: if ``config.json`` is missing or damaged.
        """
        return config_of(self.read("config.json"), where=str(self.path / "config.json"))

    @property
    def environment(self) -> Environment:
        """Return the machine, the versions and the data of the run.

        Raises:
            RunDirectoryError: if ``environment.json`` is missing or damaged.
        """
        where = str(self.path / "environment.json")
        return validated(Environment, self.read("environment.json"), where=where, version=1, error=RunDirectoryError)

    def has(self, name: str) -> bool:
        """Tell whether the run holds a document."""
        return (self.path / name).is_file()

    def write(self, name: str, document: object) -> Path:
        """Write one JSON document atomically and return its path.

        Raises:
            RunDirectoryError: if it cannot be written.
        """
        path = self.path / name
        with writing(path):
            write_json(path, document)
        return path

    def append(self, name: str, record: object) -> None:
        """Append one record to a JSON-lines file; it is on the disk when this returns.

        Raises:
            RunDirectoryError: if it cannot be written.
        """
        with writing(self.path / name):
            append_json_line(self.path / name, record)

    def read(self, name: str) -> dict[str, Any]:
        """Return one of the run's documents, strict JSON whose kind is not checked.

        Raises:
            RunDirectoryError: if it is missing or damaged.
        """
        with as_run_error():
            return read_json(self.path / name, follow=False)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return a JSON-lines file's records; a torn last line, left by a kill, is dropped.

        Raises:
            RunDirectoryError: if the file or a line in it is damaged.
        """
        if not self.has(name):
            return []
        with as_run_error():
            return read_json_lines(self.path / name, limit_bytes=LARGEST_LOG_BYTES, follow=False)


@contextmanager
def as_run_error() -> Iterator[None]:
    """Turn wrong input into the error of a run directory, with the same text."""
    try:
        yield
    except InputError as error:
        raise RunDirectoryError(error.problem, where=error.where, allowed=error.allowed) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full disk, or whatever else keeps a run's file from being written, into one line."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f"cannot be written ({error.strerror}); what is there is kept, and autotune resume takes it up",
            where=str(path),
            allowed="room on the disk",
        ) from error


def require_writable(folder: Path, *, where: str = "") -> None:
    """Check that files and folders can be made in a folder, before anything expensive begins; nothing is left behind.

    Args:
        folder: the folder, which need not be there yet.
        where: how an error calls it; empty for the runs folder.

    Raises:
        RunDirectoryError: if they cannot.
    """
    try:
        nearest = folder.absolute()
        while not nearest.exists():
            # A link that leads nowhere would be no folder when it is needed.
            if nearest.is_symlink():
                raise NotADirectoryError
            nearest = nearest.parent
        fine = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    except OSError:
        fine = False
    if not fine:
        where = where or f"--runs-dir {folder}"
        raise RunDirectoryError("cannot be written", where=where, allowed="a writable folder")


def read_plan(path: Path) -> Plan:
    """Read a plan file, or the plan of a run directory, which may be no link out of it.

    Raises:
        InputError: naming the file, the key and what is allowed.
    """
    of_run = path.is_dir()
    file = path / "plan.json" if of_run else path
    return Plan.from_json(read_json(file, limit_bytes=_LARGEST_PLAN_BYTES, follow=not of_run), where=str(file))


def describe_environment(job: Job | None = None) -> dict[str, Any]:
    """Return what a run must say of the machine, the versions and the data to be repeated."""
    import torch

    sources = [] if job is None or job.data_sources is None else job.data_sources()
    return {
        "version": 1,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(),
        "fp32": fp32_arithmetic(device_kind()),
        "settings": settings(device_kind()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "packages": {name: _version(name) for name in ("autotune-rl", *_PACKAGES)},
        "data": [{"name": source.name, "size_bytes": source.size_bytes, "sha256": source.sha256} for source in sources],
    }


def benchmark_folder(runs: Path, device: str | None = None) -> Path:
    """Return where a device's benchmarks are written: ``<runs>/benchmarks/<device>/``.

    Args:
        runs: the runs folder.
        device: what the device is called; ``None`` for where jobs train on this machine.
    """
    words = re.sub(r"\((R|TM)\)|Processor|CPU", " ", device_name() if device is None else device)
    return runs / "benchmarks" / ("-".join(re.findall(r"[a-z0-9]+", words.lower())) or "unknown")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
