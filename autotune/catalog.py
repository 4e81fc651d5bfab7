"""Find a job by its name: in the catalog, in an importable module, or in a file.

A reference is code by nature, so it may come from the command line or from the user's own call, never from a
data file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from autotune.errors import JobError, one_line
from autotune.job import Job
from autotune.launching import launched, split

_PACKAGE = Path(__file__).resolve().parent
# What modules that are loaded from a job's file are called.
_FILE_MODULE = "autotune_job_"


def content_folder(name: str) -> Path:
    """Return the folder ``envs`` or ``policies``: inside an installed wheel, else beside the package."""
    installed = _PACKAGE / f"_{name}"
    return installed if installed.is_dir() else _PACKAGE.parent / name


def catalog() -> dict[str, Path]:
    """Return the reference jobs' files by name."""
    folder = content_folder("envs")
    return {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}


def load_job(reference: str | Job) -> Job:
    """Return the job that a reference names.

    Args:
        reference: a catalog name (``charlm``), alone or with another job of that file (``charlm:adaptive``),
            ``package.module:attribute``, ``path/to/file.py:attribute`` (the attribute is ``job`` if left out), or a
            job, which is returned as it is. The attribute is a :class:`Job` or a function without arguments that
            returns one. Behind a name may stand what the job is launched with (``charlm+lion+compile``).

    Raises:
        JobError: if nothing has that name, or what has it is no job.
        InputError: if it cannot be launched so.
    """
    if isinstance(reference, Job):
        return reference
    plain, launch = split(reference, where="job")
    return launched(_found(plain), launch)


def _found(reference: str) -> Job:
    jobs = catalog()
    location, _, attribute = reference.partition(":")
    if location in jobs:
        return _take(_load_file(jobs[location], reference), attribute or "job", reference)
    if location.endswith(".py"):
        return _take(_load_file(Path(location), reference), attribute or "job", reference)
    if attribute:
        return _take(_import(location, reference), attribute, reference)
    raise JobError(
        f"no job has the name {reference!r}",
        where="job",
        allowed=[*jobs, "package.module:attribute", "path/to/file.py:attribute"],
    )


def is_job_file(module_name: str) -> bool:
    """Tell whether a module was loaded from a job's file."""
    return module_name.startswith(_FILE_MODULE)


def _take(module: ModuleType, attribute: str, reference: str) -> Job:
    found = getattr(module, attribute, None)
    if not isinstance(found, Job) and callable(found):
        try:
            found = found()
        except Exception as error:
            raise JobError(f"{attribute}() raised {one_line(error)[:300]}", where=reference) from error
    if not isinstance(found, Job):
        raise JobError(
            f"{attribute!r} is no autotune.Job",
            where=reference,
            allowed="a Job, or a function that returns one",
        )
    return found


def _load_file(path: Path, reference: str) -> ModuleType:
    if not path.is_file():
        raise JobError(f"no file {path}", where=reference, allowed="an existing .py file")
    resolved = path.resolve()
    name = f"{_FILE_MODULE}{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise JobError(f"{path} cannot be loaded", where=reference, allowed="a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise JobError(f"raised {one_line(error)[:300]} when it was loaded", where=reference) from error
    return module


def _import(name: str, reference: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise JobError(f"importing {name!r} raised {one_line(error)[:300]}", where=reference) from error
