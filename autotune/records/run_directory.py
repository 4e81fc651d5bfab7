"""Run directories: one folder per command, in which every document is written atomically."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from autotune.choices import STORAGES_VARIABLE
from autotune.errors import RunDirectoryError, raised_as
from autotune.io.documents import validated
from autotune.io.files import append_json_line, read_json, read_json_lines, require_plain, write_json
from autotune.io.run_folder import WriterLock, new_run_folder
from autotune.job import Job
from autotune.mechanics import known_precisions
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
# Files that every run directory has from the start.
BEGUN_WITH = ("environment.json", "config.json")
# The job's profile at the start of the run.
PROFILE = "profile.json"
# What free knobs win on the job, if the run measured them.
LAUNCH_CHOICES = "launch_choices.json"
# Size limit of files to which a record is appended at every window, trial or step.
LARGEST_LOG_BYTES = 2**30


class RunDirectory:
    """One run's folder, ``<runs>/<utc time>-<verb>-<job>-<id>/``.

    A folder may come from anyone. It is read only as data: all files must be regular, and each document is limited in
    size and checked against its type. A writer holds the lock of the folder from :meth:`create` or :meth:`take_up` to
    :meth:`close`.

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
            verb: name of the command.
            job: the job, or another name for the run.
            config: keys of ``config.json`` that depend on the command.

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
        # Write ``config.json`` last, since it makes the folder a run directory.
        run.write("environment.json", describe_environment(None if isinstance(job, str) else job))
        run.write("config.json", {"version": 1, "verb": verb, "job": called, **config})
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open an existing run for reading.

        Raises:
            RunDirectoryError: if the folder has no ``config.json``, or has links, pipes, sockets or devices.
        """
        with raised_as(RunDirectoryError):
            if not (path / "config.json").is_file():
                raise RunDirectoryError("is not a run directory", where=str(path), allowed="a folder with config.json")
            require_plain(path)
        return cls(path)

    @classmethod
    def take_up(cls, path: Path) -> RunDirectory:
        """Open an existing run for writing, and take its lock.

        Raises:
            RunDirectoryError: as for :meth:`open`, or if another process is writing to it.
        """
        run = cls.open(path)
        run._lock = WriterLock(path)
        return run

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            # So that the report of an interruption can name the unfinished run; the outermost run adds the last note.
            error.add_note(str(self.path))
        self.close()

    @property
    def config(self) -> Config:
        """Return the configuration of the run.

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
        """Return whether the run has a document."""
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
        """Append one record to a JSON-lines file and wait until it is on disk.

        Raises:
            RunDirectoryError: if it cannot be written.
        """
        with writing(self.path / name):
            append_json_line(self.path / name, record)

    def read(self, name: str) -> dict[str, Any]:
        """Return one of the run's documents as strict JSON, without checking its type.

        Raises:
            RunDirectoryError: if it is missing or damaged.
        """
        with raised_as(RunDirectoryError):
            return read_json(self.path / name, follow=False)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the records of a JSON-lines file, without an incomplete last line of a killed process.

        Raises:
            RunDirectoryError: if the file or one of its lines is damaged.
        """
        if not self.has(name):
            return []
        with raised_as(RunDirectoryError):
            return read_json_lines(self.path / name, limit_bytes=LARGEST_LOG_BYTES, follow=False)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert a failure to write a run's file, such as a full disk, into an error of the run directory."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f"cannot be written ({error.strerror}); existing files are kept, and autotune resume continues the run",
            where=str(path),
            allowed="free space on the disk",
        ) from error


def require_writable(folder: Path, *, where: str = "") -> None:
    """Check that folders can be made in a folder, by making one in it or above it and removing it at once.

    Args:
        folder: the folder, which need not exist yet.
        where: name of the folder in error messages; empty for the runs folder.

    Raises:
        RunDirectoryError: if the folder is not writable.
    """
    try:
        nearest = folder.absolute()
        while not nearest.exists():
            # A dangling link cannot become a folder.
            if nearest.is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            nearest = nearest.parent
        # Permissions alone do not tell: nobody can make a folder in /proc.
        Path(tempfile.mkdtemp(prefix=".autotune-", dir=nearest)).rmdir()
    except OSError as error:
        where = where or f"--runs-dir {folder}"
        problem = f"cannot be written ({error.strerror})"
        raise RunDirectoryError(problem, where=where, allowed="a writable folder") from error


def describe_environment(job: Job | None = None) -> dict[str, Any]:
    """Return the machine, the versions and the data that are needed to repeat a run."""
    import torch

    from autotune.mechanics.devices import device_kind, device_name, fp32_arithmetic, settings

    sources = [] if job is None or job.data_sources is None else job.data_sources()
    return {
        "version": 1,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(),
        "fp32": fp32_arithmetic(device_kind()),
        "settings": settings(device_kind()),
        "precisions_excluded": known_precisions.to_json().get(device_kind()),
        "storages": os.environ.get(STORAGES_VARIABLE) or None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "packages": {name: _version(name) for name in ("autotune-rl", *_PACKAGES)},
        "data": [{"name": source.name, "size_bytes": source.size_bytes, "sha256": source.sha256} for source in sources],
    }


def benchmark_folder(runs: Path, device: str | None = None) -> Path:
    """Return the folder of a device's benchmarks: ``<runs>/benchmarks/<device>/``.

    Args:
        runs: the runs folder.
        device: name of the device; ``None`` for the device on which jobs train here.
    """
    from autotune.mechanics.devices import device_name

    words = re.sub(r"\((R|TM)\)|Processor|CPU", " ", device_name() if device is None else device)
    return runs / "benchmarks" / ("-".join(re.findall(r"[a-z0-9]+", words.lower())) or "unknown")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
