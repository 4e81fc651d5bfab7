"""Read and write the project's documents: strict JSON in, atomic files out.

Knows nothing of what the documents mean.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import InputError


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    Args:
        path: where the file shall stand; its folder must exist.
        data: text (written as UTF-8) or bytes.

    Raises:
        OSError: if the file cannot be written; no temporary file is left behind.
    """
    payload = data.encode() if isinstance(data, str) else data
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes a private file; documents are meant to be read by others.
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_json(path: Path, document: object) -> None:
    """Write one JSON document atomically; NaN and infinities are refused.

    Raises:
        ValueError: if the document holds a number that JSON does not have.
    """
    write_atomic(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def append_json_line(path: Path, document: object) -> None:
    """Append one record to a JSON-lines file and force it to the disk before returning.

    A last line that a kill or a full disk cut off is taken away: nobody was told that it is written.
    """
    line = json.dumps(document, allow_nan=False) + "\n"
    with path.open("a+b") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path, *, limit_bytes: int = 64 * 2**20) -> dict[str, Any]:
    """Read one JSON object, refusing duplicate keys and numbers that JSON does not have.

    Raises:
        InputError: if the file is missing, too large, not UTF-8, not JSON or not an object.
    """
    where = str(path)
    try:
        if path.stat().st_size > limit_bytes:
            raise InputError(f"the file is larger than {limit_bytes} bytes", where=where, allowed="a JSON document")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", where=where, allowed="a readable JSON file") from error
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text", where=where, allowed="a JSON file") from error
    return parse_json(text, where=where)


def parse_json(text: str, *, where: str) -> dict[str, Any]:
    """Parse one JSON object as strictly as :func:`read_json` does.

    Raises:
        InputError: if the text is not one JSON object with unique keys and finite numbers.
    """
    try:
        document = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except _JsonRuleError as error:
        raise InputError(str(error), where=where, allowed="JSON with unique keys, finite numbers") from error
    except (ValueError, RecursionError) as error:
        # Besides broken syntax: whole numbers of more digits than Python converts.
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
    return number if math.isfinite(number) else _refuse_constant(text)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
