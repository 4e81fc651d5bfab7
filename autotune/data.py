"""Find a public data set, in any of its formats, in a folder that the user names.

Nothing is downloaded. Only regular files up to a size limit are read; the jobs check their content.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import InputError, JobError
from autotune.io.environment_variables import variable
from autotune.io.files import read_bytes
from autotune.job import DataSource

# Environment variable with the folder, so that worker processes find it too.
DATA_VARIABLE = "AUTOTUNE_DATA"
_NAMED_AT_MOST = 8
_SHOWN = 200
# Size limit of a file; the largest published file has 31 MB.
_LIMIT_BYTES = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One format of a data set.

    Attributes:
        name: name of the format.
        folder: folder to which its archive unpacks.
        files: files in that folder, all of which are needed.
    """

    name: str
    folder: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A data set that was found.

    Attributes:
        layout: its format.
        folder: the folder with its files.
    """

    layout: Layout
    folder: Path

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return its files, in the layout's order."""
        return tuple(self.folder / name for name in self.layout.files)

    def sources(self) -> list[DataSource]:
        """Return name, size in bytes and SHA-256 of every file."""
        return [source_of(path, f"{self.layout.name}: {path.name}") for path in self.paths]


def data_folder() -> Path:
    """Return the folder with public data sets.

    Raises:
        JobError: if no folder is named, or the folder does not exist.
    """
    named = os.environ.get(DATA_VARIABLE, "")
    allowed = "a folder, by --data or in the environment"
    if not named:
        raise JobError("no folder of data sets is named", where=DATA_VARIABLE, allowed=allowed)
    if not _is(stat.S_ISDIR, Path(named)):
        raise JobError(f"{named!r:.{_SHOWN}} is not a folder", where=DATA_VARIABLE, allowed=allowed)
    return Path(named)


@contextmanager
def pointed_at(folder: str | Path | None) -> Iterator[None]:
    """Let jobs, including those in worker processes, find public data sets in a folder while the body runs.

    Args:
        folder: the folder; ``None`` for the one in the environment.

    Raises:
        JobError: if the path is not a folder.
    """
    if folder is None:
        yield
        return
    if not _is(stat.S_ISDIR, Path(folder)):
        allowed = "a folder with CIFAR-10 or WikiText-2"
        raise JobError(f"{str(folder)!r:.{_SHOWN}} is not a folder", where="--data", allowed=allowed)
    with variable(DATA_VARIABLE, str(Path(folder).absolute())):
        yield


def locate(folder: Path, layouts: Sequence[Layout]) -> Located:
    """Return the first layout whose files are all in a folder, or in the archive's own folder inside it.

    Args:
        folder: the folder that the user names.
        layouts: formats in which the data set is published, the preferred one first.

    Raises:
        JobError: if no layout is complete, naming the expected files and those found.
    """
    for layout in layouts:
        for place in (folder / layout.folder, folder):
            if all(is_file(place / name) for name in layout.files):
                return Located(layout=layout, folder=place)
    expected = [f"{layout.folder}/{{{','.join(layout.files)}}}" for layout in layouts]
    raise JobError(_missing(folder, layouts), where=str(folder), allowed=" or ".join(expected))


def is_file(path: Path) -> bool:
    """Return whether a path leads to a regular file."""
    return _is(stat.S_ISREG, path)


def read_file(path: Path, *, limit_bytes: int = _LIMIT_BYTES) -> bytes:
    """Return a data file's bytes.

    Raises:
        JobError: if the file cannot be read, is not a regular file, or is larger than the limit.
    """
    try:
        return read_bytes(path, limit_bytes=limit_bytes)
    except InputError as error:
        raise JobError(error.problem, where=str(path), allowed="a file as it is published") from error


def source_of(path: Path, name: str) -> DataSource:
    """Return name, size in bytes and SHA-256 of one file.

    Raises:
        JobError: as :func:`read_file` does.
    """
    content = read_file(path)
    return DataSource(name=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def _missing(folder: Path, layouts: Sequence[Layout]) -> str:
    """Describe why a folder has no known layout: the first missing file of a layout that is partly there."""
    for layout in layouts:
        for place in (folder / layout.folder, folder):
            there = [name for name in layout.files if is_file(place / name)]
            if there:
                lacking = next(name for name in layout.files if name not in there)
                return f"{place} lacks {lacking}, and has {_listed(there)}"
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return f"cannot be listed ({error.strerror})"
    return f"contains {_listed(names) or 'nothing'}"


def _is(kind: Callable[[int], bool], path: Path) -> bool:
    """Return whether a path leads to a file of a kind; ``False`` if it cannot be read."""
    try:
        return kind(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    shown = (name if name.isprintable() else repr(name) for name in names[:_NAMED_AT_MOST])
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
