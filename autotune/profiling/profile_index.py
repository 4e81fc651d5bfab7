"""Index of cached profiles, to find one without loading its job.

A profile is found if nothing that its job was made from has changed: the Python files that were imported when it was
loaded, the version of torch, the machine, and some environment variables. Data that a job reads is not checked; use
``--fresh`` if it changed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune.catalog import is_job_file
from autotune.choices import STORAGES_VARIABLE
from autotune.cost_model.profile import PROFILE_VERSION, Profile
from autotune.errors import InputError
from autotune.io.documents import document, validated
from autotune.io.files import inside, read_bytes, read_json, write_json
from autotune.mechanics.known_precisions import PRECISIONS_VARIABLE

# Suffix of the file names of lean profiles.
LEAN = "-lean"
_INDEX = "index.json"
_LARGEST_SOURCE_BYTES = 16 * 2**20
# Environment variables that change how a job runs.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", PRECISIONS_VARIABLE, STORAGES_VARIABLE)


@document
class _Entry:
    """The profile of a job reference, and what it was made from.

    Attributes:
        file: file name of the profile.
        sources: SHA-256 of each source file of the job, by path.
        environment: versions, machine and environment variables.
    """

    file: str
    sources: dict[str, str]
    environment: dict[str, Any]


def indexed_profile(reference: str, runs: Path, *, lean: bool = True) -> tuple[Profile, Path] | None:
    """Return the latest profile of a reference, or ``None`` if anything that it was made from may have changed.

    Args:
        reference: the job, as it is named on the command line.
        runs: the folder of runs.
        lean: whether a lean profile will do.
    """
    profiles = runs / "profiles"
    try:
        entry = _entries(profiles).get(_key(reference))
        if entry is None or entry.environment != _environment() or not entry.sources:
            return None
        path = inside(profiles, entry.file)
        if not lean and path.stem.endswith(LEAN):
            return None
        roots = _roots(reference)
        same = all(
            _is_source(Path(name), roots) and _digest(Path(name)) == digest for name, digest in entry.sources.items()
        )
        return (Profile.from_json(read_json(path, follow=False), where=str(path)), path) if same else None
    except InputError:
        return None


def remember(reference: str, profile: Path, runs: Path) -> None:
    """Add a reference's profile to the index; the job must have been loaded in this process.

    Args:
        reference: the job, as it is named on the command line.
        profile: the profile's file.
        runs: the folder of runs.
    """
    roots = _roots(reference)
    # Leave out files that other jobs in this process loaded from folders that are not on this job's import path.
    sources = {str(path): _digest(path) for path in _sources() if _is_source(path, roots)}
    try:
        known = _entries(runs / "profiles")
    except InputError:
        known = {}
    known[_key(reference)] = _Entry(file=profile.name, sources=sources, environment=_environment())
    write_json(runs / "profiles" / _INDEX, {key: asdict(entry) for key, entry in known.items()})


def _entries(profiles: Path) -> dict[str, _Entry]:
    """Return the entry of each reference.

    Raises:
        InputError: if the index is missing or damaged.
    """
    path = profiles / _INDEX
    found = read_json(path, follow=False)
    return {key: validated(_Entry, entry, where=f"{path}, {key}") for key, entry in found.items()}


def _roots(reference: str) -> list[Path]:
    """Return the folders on a job's import path, including that of its own file."""
    named = Path(reference.partition(":")[0]).absolute().parent
    return [named, Path.cwd(), Path(__file__).parents[2], *(Path(entry) for entry in sys.path if entry)]


def _is_source(path: Path, roots: Sequence[Path]) -> bool:
    """Return whether a file may be a job's source. No other file is opened, even if a manipulated index names it."""
    # A path with ".." would lead out of the folder that it begins with.
    plain = str(path) == os.path.abspath(path)  # noqa: PTH100 - resolve() would follow links
    return plain and path.suffix == ".py" and any(root in path.parents for root in roots)


def _key(reference: str) -> str:
    return f"{reference} in {Path.cwd()}"


def _sources() -> list[Path]:
    """Return the job's file, and those of all loaded modules outside the standard library and installed packages."""
    installed = [Path(path).resolve() for path in {*sysconfig.get_paths().values(), *_site_packages()}]
    own = Path(__file__).resolve().parents[1]
    found = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or not Path(file).is_file():
            continue
        path = Path(file).resolve()
        foreign = own in path.parents or any(folder in path.parents for folder in installed)
        if is_job_file(name) or not foreign:
            found.add(path)
    return sorted(found)


def _site_packages() -> list[str]:
    return [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]


def _environment() -> dict[str, Any]:
    return {
        "version": PROFILE_VERSION,
        "torch": importlib.metadata.version("torch"),
        "machine": [platform.machine(), platform.release(), os.cpu_count()],
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(read_bytes(path, limit_bytes=_LARGEST_SOURCE_BYTES)).hexdigest()
