"""Find a cached profile without loading the job: nothing that it was made from has changed on disk.

What a job was made of is the Python files that its loading brought in, the versions of the libraries and the machine.
Data that a job reads is not looked at; ``--fresh`` is for that.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any

from autotune.catalog import is_job_file
from autotune.errors import InputError, ProfileError
from autotune.files import read_json, write_json
from autotune.physics.profile import PROFILE_VERSION, Profile

_INDEX = "index.json"
# What else decides how a job runs.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def indexed_profile(reference: str, runs: Path) -> tuple[Profile, Path] | None:
    """Return the profile that was last made or found for a reference, or ``None`` if anything may have changed.

    Args:
        reference: the job, as it is named on the command line.
        runs: the folder of runs.
    """
    try:
        entry = read_json(runs / "profiles" / _INDEX)[_key(reference)]
        path = runs / "profiles" / str(entry["file"])
        same = entry["environment"] == _environment() and bool(entry["sources"])
        same = same and all(_digest(Path(name)) == digest for name, digest in entry["sources"].items())
        return (Profile.from_json(read_json(path), where=str(path)), path) if same else None
    except (InputError, ProfileError, KeyError, TypeError, AttributeError, OSError):
        return None


def remember(reference: str, profile: Path, runs: Path) -> None:
    """Note which profile a reference has; the job must have been loaded in this process."""
    sources = {str(path): _digest(path) for path in _sources()}
    index = runs / "profiles" / _INDEX
    try:
        known: dict[str, Any] = dict(read_json(index))
    except (InputError, TypeError, ValueError):
        known = {}
    known[_key(reference)] = {"file": profile.name, "sources": sources, "environment": _environment()}
    write_json(index, known)


def _key(reference: str) -> str:
    return f"{reference} in {Path.cwd()}"


def _sources() -> list[Path]:
    """Return the job's file, and those of all loaded modules that are neither the standard library's nor installed."""
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
    return hashlib.sha256(path.read_bytes()).hexdigest()
