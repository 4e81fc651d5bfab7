"""Keep run directories: one folder per command, every document written atomically."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.errors import InputError, RunDirectoryError
from autotune.files import append_json_line, read_json, write_json
from autotune.job import Job
from autotune.mechanics.devices import device_name
from autotune.plan import Plan

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


class RunDirectory:
    """Be one run's folder, ``<runs>/<utc time>-<verb>-<job>-<id>/``.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, runs: Path, verb: str, job: Job | str, config: Mapping[str, Any]) -> RunDirectory:
        """Make the folder and write ``config.json`` and ``environment.json``.

        Args:
            runs: the runs folder.
            verb: the command.
            job: the job, or what else the run is called after.
            config: what the command was asked for.

        Raises:
            RunDirectoryError: if it cannot be written.
        """
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        called = job if isinstance(job, str) else job.name
        name = "".join(c if c.isalnum() or c in "-_" else "-" for c in called)
        path = runs / f"{stamp}-{verb}-{name}-{secrets.token_hex(3)}"
        try:
            path.mkdir(parents=True)
        except OSError as error:
            raise RunDirectoryError(
                f"cannot be written ({error.strerror})",
                where=f"--runs-dir {runs}",
                allowed="a writable folder",
            ) from error
        run = cls(path)
        # What makes the folder a run comes last.
        run.write("environment.json", describe_environment(None if isinstance(job, str) else job))
        run.write("config.json", {"version": 1, "verb": verb, "job": called, **config})
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open an existing run.

        Raises:
            RunDirectoryError: if the folder holds no ``config.json``.
        """
        if not (path / "config.json").is_file():
            raise RunDirectoryError("is no run directory", where=str(path), allowed="a folder with config.json")
        return cls(path)

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
        """Read one of the run's documents.

        Raises:
            RunDirectoryError: if it is missing or damaged.
        """
        try:
            return read_json(self.path / name)
        except InputError as error:
            raise RunDirectoryError(error.problem, where=str(self.path / name), allowed=error.allowed) from error

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return a JSON-lines file's records; a torn last line, left by a kill, is dropped."""
        from autotune.files import parse_json

        path = self.path / name
        if not path.is_file():
            return []
        rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if rows and not rows[-1].endswith("\n"):
            rows.pop()
        return [parse_json(row, where=f"{path} line {number}") for number, row in enumerate(rows, 1)]


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


def require_writable(runs: Path) -> None:
    """Check that run directories can be made, before anything expensive begins; nothing is left behind.

    Raises:
        RunDirectoryError: if they cannot.
    """
    nearest = runs.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise RunDirectoryError("cannot be written", where=f"--runs-dir {runs}", allowed="a writable folder")


def read_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        InputError: naming the file, the key and what is allowed.
    """
    return Plan.from_json(read_json(path), where=str(path))


def describe_environment(job: Job | None = None) -> dict[str, Any]:
    """Return what a run must say of the machine, the versions and the data to be repeated."""
    import torch

    sources = [] if job is None or job.data_sources is None else job.data_sources()
    return {
        "version": 1,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "packages": {name: _version(name) for name in ("autotune-rl", *_PACKAGES)},
        "data": [{"name": source.name, "size_bytes": source.size_bytes, "sha256": source.sha256} for source in sources],
    }


def benchmark_folder(runs: Path) -> Path:
    """Return where this machine's benchmarks are written: ``<runs>/benchmarks/<device>/``."""
    words = re.sub(r"\((R|TM)\)|Processor|CPU", " ", device_name())
    return runs / "benchmarks" / ("-".join(re.findall(r"[a-z0-9]+", words.lower())) or "unknown")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
