"""Find a job by its name: in the catalog, in an importable module, or in a file.

Loading a reference runs code. A reference may therefore come from the command line or the user's own call, but not
from a data file, except for the names that :func:`is_catalog_reference` accepts.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import stat
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType

from autotune.errors import JobError, a_kind, one_line
from autotune.job import Job
from autotune.launching import launched, plain, split

_PACKAGE = Path(__file__).resolve().parent
# Prefix of the names of modules that are loaded from a job's file.
_FILE_MODULE = "autotune_job_"
# Files of jobs that are being loaded, the innermost last.
_loading: list[str] = []
# Longest reference, in characters; no path is longer.
_LONGEST = 4096
_SHOWN, _SAID = 200, 300
# Most jobs of a file that an error lists.
_LISTED = 20


def content_folder(name: str) -> Path:
    """Return the folder ``envs`` or ``policies``: inside an installed wheel, or next to the package in a checkout."""
    installed = _PACKAGE / f"_{name}"
    return installed if installed.is_dir() else _PACKAGE.parent / name


def catalog() -> dict[str, Path]:
    """Return the reference jobs' files by name."""
    folder = content_folder("envs")
    return {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}


def is_catalog_reference(reference: object) -> bool:
    """Return whether a reference can only name a job of the catalog.

    Such a reference may come from a run's own documents: loading it runs only a file of this package, and uses a job
    in it or a function annotated to return one. Nothing outside the package is imported or searched. The reference may
    include launch choices (``charlm+lion``), which :func:`load_job` checks.
    """
    if not isinstance(reference, str):
        return False
    location, colon, attribute = plain(reference).partition(":")
    return location in catalog() and (not colon or attribute.isidentifier())


def load_job(reference: str | Job) -> Job:
    """Return the job that a reference names.

    Only the job's own modules can import modules next to the job's file or in the working directory, also after
    loading. Installed modules take precedence, and libraries never see those modules.

    Args:
        reference: a catalog name (``charlm``), alone or with another job of that file (``charlm:adaptive``),
            ``package.module:attribute``, ``path/to/file.py:attribute`` (the attribute is ``job`` if left out), or a
            job, which is returned as it is. The attribute is a :class:`Job` or a function without arguments that
            returns one. Launch choices may follow the name (``charlm+lion+compile``).

    Raises:
        JobError: if no job has that name, or the file or function raises or ends the program.
        InputError: if the launch choices are wrong.
    """
    if isinstance(reference, Job):
        return reference
    if not isinstance(reference, str):
        raise JobError(
            f"is {a_kind(reference)}",
            where="job",
            allowed="a Job or its name; Job.from_loader(model, loader, loss, optimizer) makes one of what a loop has",
        )
    if len(reference) > _LONGEST:
        raise JobError(f"a name of {len(reference)} characters", where="job", allowed=f"at most {_LONGEST}")
    name, launch = split(reference, where="job")
    return launched(_found(name), launch)


def _found(reference: str) -> Job:
    jobs = catalog()
    location, _, attribute = reference.partition(":")
    if location in jobs:
        module = _load_file(jobs[location], reference)
        return _take(module, attribute or "job", reference, declared=True)
    if location.endswith(".py"):
        module = _load_file(Path(location), reference, neighbours=True)
        return _take(module, attribute or "job", reference)
    if attribute and all(part.isidentifier() for part in location.split(".")):
        return _take(_import(location, reference), attribute, reference)
    raise JobError(
        f"no job has the name {_shown(reference)!r}",
        where="job",
        allowed=[*jobs, "package.module:attribute", "path/to/file.py:attribute"],
        given=reference,
    )


def refuse_while_loading() -> None:
    """Refuse to start work while a job's file is loaded: every later load of the job would start that work again.

    Raises:
        JobError: if a job's file is being loaded.
    """
    if _loading:
        raise JobError(
            "a search or a comparison was started while the job's file was being loaded",
            where=_shown(_loading[-1]),
            allowed="such calls below: if __name__ == '__main__'",
        )


def is_job_file(module_name: str) -> bool:
    """Return whether a module was loaded from a job's file."""
    return module_name.startswith(_FILE_MODULE)


def _take(module: ModuleType, attribute: str, reference: str, *, declared: bool = False) -> Job:
    """Return a module's job.

    Args:
        module: the module.
        attribute: name of a job in it, or of a function that returns one.
        reference: the job's reference, for errors.
        declared: whether to call only functions annotated to return a job.
    """
    try:
        found = getattr(module, attribute, None)
        # A model is callable, too.
        made = isinstance(found, Job) or hasattr(found, "named_parameters")
        if not made and callable(found) and (not declared or _returns_a_job(found)):
            found = found()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a job may call sys.exit, which must not look like success
        raise JobError(f"{_shown(attribute)}() raised {_said(error)}", where=_shown(reference)) from error
    if not isinstance(found, Job):
        problem = "is not an autotune.Job" if hasattr(module, attribute) else "does not exist"
        there = vars(module).items()
        jobs = [_shown(name) for name, value in there if isinstance(value, Job) or _returns_a_job(value)][:_LISTED]
        raise JobError(
            f"{_shown(attribute)!r} {problem}",
            where=_shown(reference),
            allowed=jobs or "a Job, or a function that returns one; the name after the colon is job if left out",
            given=attribute,
        )
    return found


def _returns_a_job(function: object) -> bool:
    return getattr(function, "__annotations__", {}).get("return") is Job


def _load_file(path: Path, reference: str, *, neighbours: bool = False) -> ModuleType:
    """Load a file as a module, once.

    Args:
        path: the file.
        reference: the job's reference, for errors.
        neighbours: whether the file can import modules next to it and in the working directory.
    """
    where = _shown(reference)
    try:
        mode = path.stat().st_mode
        resolved = path.resolve()
    except (OSError, ValueError) as error:
        raise JobError(f"no file {_shown(str(path))}", where=where, allowed="an existing .py file") from error
    if not stat.S_ISREG(mode):
        raise JobError(f"{_shown(str(path))} is not a regular file", where=where, allowed="an existing .py file")
    name = f"{_FILE_MODULE}{resolved.stem}_{hashlib.sha256(os.fsencode(resolved)).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise JobError(f"{_shown(str(path))} cannot be loaded", where=where, allowed="a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if neighbours:
        folders = [*_working_directory(), str(resolved.parent)]
        if other := _neighbours.namesake(folders):
            raise JobError(
                f"the module {_shown(other)!r} is next to it, and another job has its own module of that name",
                where=where,
                allowed="jobs whose modules have different names, or one job at a time",
            )
        _neighbours.serve(name, folders)
    _loading.append(str(path))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise JobError(f"raised {_said(error)} when it was loaded", where=where) from error
    finally:
        _loading.pop()
    return module


def _import(name: str, reference: str) -> ModuleType:
    # The import starts here, so this module must be allowed to search the working directory.
    _neighbours.serve(__name__, _working_directory())
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as above
        raise JobError(f"importing {_shown(name)!r} raised {_said(error)}", where=_shown(reference)) from error


class _Neighbours:
    """Import finder for modules next to jobs; it serves only the jobs' own modules, after all other finders.

    A folder on ``sys.path`` would be searched for every import: code that checks whether a library is installed would
    find any file of that name in the working directory.
    """

    def __init__(self) -> None:
        self._folders: dict[str, Sequence[str]] = {}
        self._found: dict[str, tuple[str | None, tuple[str, ...]]] = {}

    def serve(self, module: str, folders: Sequence[str]) -> None:
        """Let a module, and the modules that it finds in the folders, import from these folders."""
        self._folders[module] = folders
        if self not in sys.meta_path:
            sys.meta_path.append(self)

    def namesake(self, folders: Sequence[str]) -> str | None:
        """Return the name of a module in the folders if another job has found a different module of that name.

        Python keeps one module per name: the second job would silently get the module of the first.
        """
        for name in self._found:
            spec = PathFinder.find_spec(name, folders)
            if spec is not None and _place(spec) != self._found[name]:
                return name
        return None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module next to the job whose module imports it; Python finds submodules through their package."""
        if path is not None:
            return None
        asking = _asking_module()
        folders = self._folders.get(asking, self._folders.get(asking.partition(".")[0], ()))
        spec = PathFinder.find_spec(name, folders, target)
        if spec is not None:
            self._folders[name] = folders
            self._found[name] = _place(spec)
        return spec


def _place(spec: ModuleSpec) -> tuple[str | None, tuple[str, ...]]:
    """Return the file of a module and the folders of a package."""
    return spec.origin, tuple(spec.submodule_search_locations or ())


_neighbours = _Neighbours()


def _asking_module() -> str:
    """Return the name of the module that the current import comes from."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _module_of(frame).partition(".")[0] == "importlib":
        frame = frame.f_back
    return _module_of(frame)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _working_directory() -> list[str]:
    try:
        return [os.getcwd()]  # noqa: PTH109 - finders take strings
    except OSError:
        # The folder was deleted.
        return []


def _said(error: BaseException) -> str:
    try:
        return _shown(one_line(error), _SAID)
    except Exception:  # noqa: BLE001 - formatting a job's exception runs the job's code
        return type(error).__name__


def _shown(text: str, longest: int = _SHOWN) -> str:
    """Return text as one short printable line."""
    shown = text if text.isprintable() else ascii(text)[1:-1]
    return shown if len(shown) <= longest else f"{shown[:longest]}..."
