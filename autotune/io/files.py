"""Read and write files of the project: regular ones only, within a limit, atomically.

Knows nothing of what documents mean; ``autotune.io.documents`` checks that. Files that somebody else made are read here
and nowhere else, since a document may be a pipe, a device without an end, or a link out of its folder.
"""

from __future__ import annotations

import functools
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from autotune.errors import InputError

# Documents of which nothing smaller is known.
LARGEST_BYTES = 64 * 2**20
_PIECE_BYTES = 2**20
_LEAST = 1e-290
# Temporary files of `write_atomic` begin and end so; what a killed writer left is swept by the run's next writer.
TEMPORARY_PREFIX, TEMPORARY_SUFFIX = ".autotune-", ".tmp"
_SPECIAL = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def special(mode: int) -> str | None:
    """Return what a file is in one word, from its ``st_mode``; ``None`` for a regular file."""
    if stat.S_ISREG(mode):
        return None
    return next((name for test, name in _SPECIAL if test(mode)), "not a regular file")


def read_bytes(path: Path, *, limit_bytes: int = LARGEST_BYTES, follow: bool = True) -> bytes:
    """Return a regular file's content; bytes are counted while they are read.

    Args:
        path: the file.
        limit_bytes: the most that it may hold.
        follow: whether the path itself may be a link to the file.

    Raises:
        InputError: if it is missing, is no regular file, cannot be read, or is larger.
    """
    where = str(path)
    try:
        # Before it is opened, too: to open a pipe waits for its writer, and to open some devices does something.
        require_regular(path, follow=follow)
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        with os.fdopen(os.open(path, flags), "rb") as file:
            found = special(os.fstat(file.fileno()).st_mode)
            if found is not None:
                raise InputError(f"is {found}", where=where, allowed="a regular file")
            # Piece by piece: a read of so many bytes would take the room for all of them first.
            data = bytearray()
            while len(data) <= limit_bytes and (piece := file.read(min(_PIECE_BYTES, limit_bytes + 1 - len(data)))):
                data += piece
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        # A ValueError is about the path: no file has a NUL in its name.
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot be read ({reason})", where=where, allowed="a readable file") from error
    if len(data) > limit_bytes:
        raise InputError(f"the file is larger than {limit_bytes} bytes", where=where, allowed="a smaller one")
    return bytes(data)


def read_text(path: Path, *, limit_bytes: int = LARGEST_BYTES, follow: bool = True) -> str:
    """Return a regular file's text.

    Raises:
        InputError: as :func:`read_bytes`, or if it is not UTF-8.
    """
    data = read_bytes(path, limit_bytes=limit_bytes, follow=follow)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"is not UTF-8 text at byte {error.start}", where=str(path), allowed="a text file in UTF-8"
        ) from error


def read_json(path: Path, *, limit_bytes: int = LARGEST_BYTES, follow: bool = True) -> dict[str, Any]:
    """Return the JSON object that a file holds, parsed as :func:`parse_json` does.

    Raises:
        InputError: if the file cannot be read, is too large, or is not one JSON object.
    """
    return parse_json(read_text(path, limit_bytes=limit_bytes, follow=follow), where=str(path))


def read_json_lines(path: Path, *, limit_bytes: int = LARGEST_BYTES, follow: bool = True) -> list[dict[str, Any]]:
    """Return the JSON objects of a JSON-lines file, one per line.

    A last line without an end, which a kill left, is dropped: nobody was told that it was written.

    Raises:
        InputError: if the file cannot be read or is too large, or a line is not one JSON object; the line is named.
    """
    data = read_bytes(path, limit_bytes=limit_bytes, follow=follow)
    return [parse_line(row, where=f"{path} line {number}") for number, row in enumerate(data.split(b"\n")[:-1], 1)]


def parse_line(row: bytes, *, where: str) -> dict[str, Any]:
    """Return the JSON object of one line.

    Raises:
        InputError: if it is not one, or not UTF-8.
    """
    try:
        return parse_json(row.decode("utf-8"), where=where)
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text at byte {error.start}", where=where, allowed="one JSON object") from error


def parse_json(text: str, *, where: str, bits: int = 64) -> dict[str, Any]:
    """Return the one JSON object that a text is.

    Refused, although Python's parser takes them: keys that occur twice, numbers that are not finite or need more bits,
    and characters that are half of a surrogate pair, which no file can hold.

    Args:
        text: the text.
        where: the file, and the place in it.
        bits: of whole numbers, the sign included; beyond 64 they overflow in most libraries that they meet.

    Raises:
        InputError: if the text is anything else.
    """
    try:
        document = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=functools.partial(_small_int, bits=bits),
        )
        if "\\ud" in text or "\\uD" in text:
            json.dumps(document, ensure_ascii=False).encode()
    except _JsonRuleError as error:
        allowed = "JSON with unique keys, finite numbers"
        raise InputError(str(error), where=where, allowed=allowed) from error
    except UnicodeEncodeError as error:
        raise InputError("holds half of a surrogate pair", where=where, allowed="text") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON ({error})", where=where, allowed="one JSON object") from error
    if not isinstance(document, dict):
        raise InputError(f"holds a {type(document).__name__}", where=where, allowed="one JSON object")
    return document


def refuse_unknown_keys(document: Mapping[str, object], known: frozenset[str], *, where: str) -> None:
    """Raise for the first key that the schema does not have.

    Raises:
        InputError: naming the key and the known ones.
    """
    unknown = sorted(set(document) - known)
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r}", where=where, allowed=sorted(known))


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    The file has the mode that the umask leaves.

    Args:
        path: a regular file, which is replaced, or a new one; its folder must exist.
        data: text (written as UTF-8) or bytes.

    Raises:
        InputError: if something else stands there: a link, a folder, a pipe or a device.
        OSError: if the file cannot be written; no temporary file is left behind.
    """
    payload = data.encode() if isinstance(data, str) else data
    require_replaceable(path)
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def require_regular(path: Path, *, follow: bool = False) -> None:
    """Refuse anything but a regular file.

    Raises:
        InputError: naming what stands there.
        OSError: if nothing does, or it cannot be looked at.
    """
    found = special(path.stat(follow_symlinks=follow).st_mode)
    if found is not None:
        raise InputError(f"is {found}", where=str(path), allowed="a regular file")


def require_replaceable(path: Path) -> None:
    """Refuse a path at which something else than a regular file stands.

    Raises:
        InputError: naming what stands there.
        OSError: if the path cannot be looked at.
    """
    try:
        found = special(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if found is not None:
        raise InputError(f"is {found}", where=str(path), allowed="a new file, or a regular one, which is replaced")


def write_json(path: Path, document: object) -> None:
    """Write one JSON document atomically; NaN and infinities are refused.

    Raises:
        InputError: as :func:`write_atomic`.
        ValueError: if the document holds a number that JSON does not have.
    """
    write_atomic(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def append_json_line(path: Path, document: object) -> None:
    """Append one record to a JSON-lines file and force it to the disk before returning.

    A last line that a kill or a full disk cut off is taken away: nobody was told that it is written.

    Raises:
        InputError: if something else than a regular file stands there.
        ValueError: if the record holds a number that JSON does not have.
        OSError: if it cannot be written.
    """
    line = json.dumps(document, allow_nan=False) + "\n"
    with open_for_appending(path) as file:
        if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def open_for_appending(path: Path) -> BinaryIO:
    """Open a regular file, or a new one, to be read and appended to.

    Raises:
        InputError: if something else than a regular file stands there.
        OSError: if it cannot be opened.
    """
    require_replaceable(path)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "a+b")


def require_plain(folder: Path) -> None:
    """Refuse a folder that holds anything but regular files and folders, however deep.

    What is checked so cannot lead a reader or a writer out of the folder.

    Raises:
        InputError: naming the first link, pipe, socket or device, or what cannot be looked at.
    """
    try:
        for entry in _entries(folder):
            found = special(entry.stat(follow_symlinks=False).st_mode)
            if found not in (None, "a folder"):
                raise InputError(f"is {found}", where=entry.path, allowed="regular files and folders in a run's folder")
    except OSError as error:
        where = str(error.filename or folder)
        raise InputError(f"cannot be read ({error.strerror})", where=where, allowed="a readable folder") from error


def inside(folder: Path, name: str) -> Path:
    """Return the path of something in a folder.

    Args:
        folder: the folder.
        name: a path relative to it, or an absolute one within it.

    Raises:
        InputError: if it lies elsewhere.
    """
    base = Path(os.path.abspath(folder))  # noqa: PTH100 - resolve() would follow links
    path = Path(os.path.abspath(base / name)) if "\0" not in name else base.parent  # noqa: PTH100
    if base not in path.parents:
        raise InputError(f"{name[:200]!r} lies outside", where=str(folder), allowed="a path within the folder")
    return path


def sweep_temporary(folder: Path) -> None:
    """Remove what writers that were killed left in a folder; nobody else may be writing there."""
    for path in folder.glob(f"{TEMPORARY_PREFIX}*{TEMPORARY_SUFFIX}"):
        # What no writer leaves, such as a folder of that name, stays.
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    # One folder is open at a time, and none within another: a stranger's may be nested deeper than Python calls.
    left = [str(folder)]
    while left:
        with os.scandir(left.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)


class _JsonRuleError(ValueError):
    """A rule of ours that JSON itself does not have."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in pairs:
        if key in document:
            raise _JsonRuleError(f"key {key!r} stands twice")
        document[key] = value
    return document


def _refuse_constant(name: str) -> float:
    raise _JsonRuleError(f"the number {name} is not finite")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        return _refuse_constant(text)
    # One over the smallest numbers is none.
    return number if abs(number) >= _LEAST else 0.0


def _small_int(text: str, *, bits: int) -> int:
    # Longer ones are not converted: Python's own limit on digits would speak of its settings.
    largest = 2 ** (bits - 1)
    number = int(text) if len(text) < bits else largest
    if not -largest <= number < largest:
        raise _JsonRuleError(f"the number {text[:40]} needs more than {bits} bits")
    return number


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
