"""Two files of a run directory: the records for a tracking server, and the number of records sent.

A folder from other people may contain any record. Invalid records are skipped, and the path in a record must lead to a
file of the same folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len

from autotune.errors import InputError, RunDirectoryError, raised_as
from autotune.io.documents import Count, document, validated
from autotune.io.files import inside, parse_line, read_bytes, read_json, require_plain, require_regular
from autotune.report_to import Name

SPOOL, CURSOR = "tracking.jsonl", "tracking-sent.json"
_LARGEST_BYTES = 2**30
_Key = Annotated[str, Len(1, 200)]
_Text = Annotated[str, Len(1, 1_000)]
_Step = Annotated[int, Interval(ge=-(2**53), le=2**53)]
Row = Mapping[str, Any]


@document
class _Record:
    kind: str
    run: _Key
    step: _Step = 0
    # POSIX time; files of earlier versions have none.
    time_ms: Annotated[int, Interval(ge=0, le=2**53)] | None = None


@document
class _Run:
    name: _Text
    parent: _Key | None


@document
class _Begin(_Record):
    values: _Run


@document
class _Texts(_Record):
    values: Annotated[dict[_Text, str], Len(0, 100_000)]


@document
class _Metrics(_Record):
    values: Annotated[dict[_Text, float | bool], Len(0, 100_000)]


@document
class _Path:
    path: Annotated[str, Len(1, 10_000)]


@document
class _Artifact(_Record):
    values: _Path


@document
class _Status:
    status: Literal["FINISHED", "FAILED", "KILLED"]


@document
class _End(_Record):
    values: _Status


_KINDS: Mapping[str, type[_Record]] = {
    "begin": _Begin,
    "params": _Texts,
    "tags": _Texts,
    "metrics": _Metrics,
    "artifact": _Artifact,
    "end": _End,
}


@document
class Cursor:
    """``tracking-sent.json``: the number of records that a tracker has, and its id of each run, by key.

    Attributes:
        report_to: name of the tracker.
    """

    sent: Count
    ids: dict[_Key, _Key]
    report_to: Name = "mlflow"


def read_cursor(folder: Path) -> Cursor | None:
    """Return how many of a run directory's records a tracker has; ``None`` if no command has begun to send them.

    Raises:
        RunDirectoryError: if the file is damaged.
    """
    path = folder / CURSOR
    if not path.exists():
        return None
    with raised_as(RunDirectoryError):
        return validated(Cursor, read_json(path), where=str(path))


def read_rows(folder: Path) -> list[Row | None]:
    """Return the records of a run directory, in order; ``None`` for one that is damaged.

    Raises:
        InputError: if the file cannot be read.
    """
    path = folder / SPOOL
    if not path.exists():
        return []
    lines = read_bytes(path, limit_bytes=_LARGEST_BYTES, follow=False).split(b"\n")[:-1]
    return [_checked(line) for line in lines]


def artifact_of(folder: Path, row: Row) -> Path:
    """Return the file or folder of a record.

    Raises:
        InputError: if it lies outside the run directory, or contains anything but regular files and folders.
        OSError: if it does not exist.
    """
    path = inside(folder, row["values"]["path"])
    if path.is_dir() and not path.is_symlink():
        require_plain(path)
    else:
        require_regular(path)
    return path


def _checked(line: bytes) -> Row | None:
    try:
        row = parse_line(line, where=SPOOL)
        validated(_KINDS[row["kind"]], row, where=SPOOL)
    except (InputError, KeyError, TypeError):
        return None
    return row
