"""Read and write regular files, within a size limit and atomically.

Files from other people are read only here: they may be pipes, endless devices, or links out of their folder.
``autotune.io.documents`` checks the content.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from autotune.errors import InputError, a_kind

# Size limit of documents without a smaller limit of their own.
LARGEST_BYTES = 64 * 2**20
_PIECE_BYTES = 2**20
_LEAST = 1e-290
# Names of temporary files of `write_atomic`; the run's next writer removes those left by a killed writer.
TEMPORARY_PREFIX, TEMPORARY_SUFFIX = ".autotune-", ".tmp"
_SPECIAL = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def is_path(value: object) -> bool:
    """Return whether a value may be a path: text or a path object, without NUL."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    return isinstance(path, str) and "\0" not in path


def folder_given(value: object, name: str) -> Path:
    """Return a folder that a program gave as an argument.

    Raises:
        InputError: if the value is not a path; the message gives the argument's name.
    """
    if not is_path(value):
        raise InputError(f"{name} is {value!r:.80}", allowed="a folder")
    return Path(value)  # type: ignore[arg-type]


def special(mode: int) -> str | None:
    """Return the kind of a file from its ``st_mode``; ``None`` for a regular file."""
    if stat.S_ISREG(mode):
        return None
    return next((name for test, name in _SPECIAL if test(mode)), "not a regular file")


def read_bytes(path: Path, *, limit_bytes: int = LARGEST_BYTES, follow: bool = True) -> bytes:
    """Return a regular file's content; the limit applies to the bytes that are read, not to the file's reported size.

    Args:
        path: the file.
        limit_bytes: the largest allowed size.
        follow: whether the path itself may be a link to the file.

    Raises:
        InputError: if the file is missing, not a regular file, not readable, or too large.
    """
    where = str(path)
    try:
        # Also checked before opening: opening a pipe waits for its writer, and opening some devices has side effects.
        require_regular(path, follow=follow)
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        with os.fdopen(os.open(path, flags), "rb") as file:
            found = special(os.fstat(file.fileno()).st_mode)
            if found is not None:
                raise InputError(f"is {found}", where=where, allowed="a regular file")
            # Piece by piece: a single read would allocate the memory for all bytes first.
            data = bytearray()
            while len(data) <= limit_bytes and (piece := file.read(min(_PIECE_BYTES, limit_bytes + 1 - len(data)))):
                data += piece
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        # A ValueError means an invalid path, for example with a NUL.
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot be read ({reason})", where=where, allowed="a readable file") from error
    if len(data) > limit_bytes:
        raise InputError(f"the file is larger than {limit_bytes} bytes", where=where, allowed="a smaller one")
    return bytes(data)


def read_text(path: Path, *, limit_bytes: int = LARGEST_BYTES, follow: bool = True) -> str:
    """Return a regular file's text.

    Raises:
        InputError: as :func:`read_bytes`, or if the text is not UTF-8.
    """
    data = read_bytes(path, limit_bytes=limit_bytes, follow=follow)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"is not UTF-8 text at byte {error.start}", where=str(path), allowed="a text file in UTF-8"
        ) from error


def read_json(path: Path, *, limit_bytes: int = LARGEST_BYTES, follow: bool = True) -> dict[str, Any]:
    """Return the JSON object in a file, parsed as by :func:`parse_json`.

    Raises:
        InputError: if the file cannot be read, is too large, or is not one JSON object.
    """
    return parse_json(read_text(path, limit_bytes=limit_bytes, follow=follow), where=str(path))


def read_json_lines(path: Path, *, limit_bytes: int = LARGEST_BYTES, follow: bool = True) -> list[dict[str, Any]]:
    """Return the JSON objects of a JSON-lines file, one per line.

    A last line without a line feed is dropped: its writer was killed before it confirmed the line.

    Raises:
        InputError: if the file cannot be read or is too large, or a line is not one JSON object.
    """
    data = read_bytes(path, limit_bytes=limit_bytes, follow=follow)
    return [parse_line(row, where=f"{path} line {number}") for number, row in enumerate(data.split(b"\n")[:-1], 1)]


def parse_line(row: bytes, *, where: str) -> dict[str, Any]:
    """Return the JSON object of one line.

    Raises:
        InputError: if the line is not a JSON object in UTF-8.
    """
    try:
        return parse_json(row.decode("utf-8"), where=where)
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text at byte {error.start}", where=where, allowed="one JSON object") from error


def parse_json(text: str, *, where: str, bits: int = 64) -> dict[str, Any]:
    """Parse a text as one JSON object.

    Some things that Python's parser accepts are refused: duplicate keys, numbers that are not finite or need too many
    bits, and halves of surrogate pairs, which cannot be written to a file.

    Args:
        text: the text.
        where: the file and the place in it, for errors.
        bits: largest size of whole numbers including the sign; beyond 64 they overflow in most libraries.

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
        raise InputError("contains half of a surrogate pair", where=where, allowed="text") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON ({error})", where=where, allowed="one JSON object") from error
    if not isinstance(document, dict):
        raise InputError(f"contains {a_kind(document)}", where=where, allowed="one JSON object")
    return document


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader sees either the old content or the new, never a partial file.

    The umask determines the mode of the file.

    Args:
        path: a regular file, which is replaced, or a new one; its folder must exist.
        data: text (written as UTF-8) or bytes.

    Raises:
        InputError: if the path is a link, a folder, a pipe or a device.
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
        InputError: naming what the path is.
        OSError: if it does not exist or cannot be inspected.
    """
    found = special(path.stat(follow_symlinks=follow).st_mode)
    if found is not None:
        raise InputError(f"is {found}", where=str(path), allowed="a regular file")


def require_replaceable(path: Path) -> None:
    """Refuse a path that exists and is not a regular file.

    Raises:
        InputError: naming what the path is.
        OSError: if it cannot be inspected.
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
        ValueError: if the document contains a number that is not finite.
    """
    write_atomic(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def json_sha256(document: object) -> str:
    """Return the SHA-256 of a JSON document, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def sealed(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a document in which a key has the SHA-256 of the others; it shows damage, and proves no author."""
    others = {name: value for name, value in document.items() if name != key}
    return others | {key: json_sha256(others)}


def append_json_line(path: Path, document: object) -> None:
    """Append one record to a JSON-lines file and flush it to the disk before returning.

    A last line without a line feed, cut off by a kill or a full disk, is removed first: it was never confirmed.

    Raises:
        InputError: if the path exists and is not a regular file.
        ValueError: if the record contains a number that is not finite.
        OSError: if the file cannot be written.
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
    """Open a regular file or a new one for reading and appending.

    Raises:
        InputError: if the path exists and is not a regular file.
        OSError: if the file cannot be opened.
    """
    require_replaceable(path)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "a+b")


def require_plain(folder: Path) -> None:
    """Refuse a folder that contains anything but regular files and folders at any depth.

    No path in a folder that passes can lead a reader or a writer out of it.

    Raises:
        InputError: naming the first link, pipe, socket or device, or a path that cannot be inspected.
    """
    try:
        for entry in _entries(folder):
            try:
                found = special(entry.stat(follow_symlinks=False).st_mode)
            except FileNotFoundError:
                # Another thread's temporary file, which has its final name by now.
                continue
            if found not in (None, "a folder"):
                raise InputError(f"is {found}", where=entry.path, allowed="regular files and folders in a run's folder")
    except OSError as error:
        where = str(error.filename or folder)
        raise InputError(f"cannot be read ({error.strerror})", where=where, allowed="a readable folder") from error


def inside(folder: Path, name: str) -> Path:
    """Return a path within a folder.

    Args:
        folder: the folder.
        name: a path relative to it, or an absolute one within it.

    Raises:
        InputError: if the path lies outside the folder.
    """
    base = Path(os.path.abspath(folder))  # noqa: PTH100 - resolve() would follow links
    path = Path(os.path.abspath(base / name)) if "\0" not in name else base.parent  # noqa: PTH100
    if base not in path.parents:
        raise InputError(f"{name[:200]!r} lies outside", where=str(folder), allowed="a path within the folder")
    return path


def sweep_temporary(folder: Path) -> None:
    """Remove temporary files of killed writers from a folder; no other process may be writing there."""
    for path in folder.glob(f"{TEMPORARY_PREFIX}*{TEMPORARY_SUFFIX}"):
        # Anything that a writer cannot leave, such as a folder of that name, is kept.
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    # Not recursive, and one open folder at a time: folders may be nested deeper than Python's recursion limit.
    left = [str(folder)]
    while left:
        with os.scandir(left.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)


class _JsonRuleError(ValueError):
    """A violation of a rule that is stricter than JSON itself."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in pairs:
        if key in document:
            raise _JsonRuleError(f"key {key!r} appears twice")
        document[key] = value
    return document


def _refuse_constant(name: str) -> float:
    raise _JsonRuleError(f"the number {name} is not finite")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        return _refuse_constant(text)
    # The inverse of a smaller number is close to a float's largest value.
    return number if abs(number) >= _LEAST else 0.0


def _small_int(text: str, *, bits: int) -> int:
    # Longer numbers are not converted: Python's error about too many digits is confusing.
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
