"""The last two generations of a saved file: if one is damaged, the other one is used.

Each generation contains a checksum. A damaged one is logged once and removed. The saved bytes may have any format.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from autotune.errors import InputError, RunDirectoryError
from autotune.io.files import read_bytes, write_atomic

logger = logging.getLogger(__name__)

_LIMIT_BYTES = 2**26
_DIGEST = 64

_Read = TypeVar("_Read")


class Generations:
    """A saved file and its previous generation.

    Args:
        newest: path of the file.
        before: path of the previous generation.
    """

    def __init__(self, newest: Path, before: Path) -> None:
        self._newest, self._before = newest, before
        self._last: bytes | None = None

    def read(self, check: Callable[[bytes], _Read], *, begins_anew: str) -> _Read | None:
        """Return the newest undamaged generation, or ``None`` if there is none.

        Args:
            check: function that reads the saved bytes, and raises ``InputError`` if they are damaged.
            begins_anew: clause of the warning that says what happens if there is no undamaged generation.

        Raises:
            RunDirectoryError: if a damaged file cannot be removed.
        """
        damaged: InputError | None = None
        for path in (self._newest, self._before):
            if not _is_there(path):
                continue
            try:
                payload = _unsealed(read_bytes(path, limit_bytes=_LIMIT_BYTES, follow=False), path)
                found = check(payload)
            except InputError as error:
                damaged = damaged or error
                remove(path)
                continue
            if damaged:
                logger.warning("%s: %s; using the previous save", self._newest, damaged.problem)
            if path != self._newest:
                # Replace the missing or damaged newest file until the next save.
                write_atomic(self._newest, _sealed(payload))
            self._last = payload
            return found
        if damaged:
            logger.warning(
                "%s: %s, and the previous save is not intact either; %s", self._newest, damaged.problem, begins_anew
            )
        return None

    def write(self, payload: bytes) -> None:
        """Save a new generation; the current one becomes the previous one.

        Raises:
            OSError: if it cannot be written; the current generation is kept.
        """
        if payload == self._last:
            return
        if self._last is not None:
            write_atomic(self._before, _sealed(self._last))
        write_atomic(self._newest, _sealed(payload))
        self._last = payload

    def remove(self) -> None:
        """Remove both generations."""
        for path in (self._newest, self._before):
            path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a damaged file.

    Raises:
        RunDirectoryError: if it cannot be removed.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"is damaged and cannot be removed ({error.strerror})", where=str(path), allowed="a file, or nothing"
        ) from error


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except OSError:
        return False
    return True


def _sealed(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload


def _unsealed(content: bytes, path: Path) -> bytes:
    payload = content[_DIGEST + 1 :]
    if _sealed(payload) != content:
        raise InputError("its SHA-256 differs from the recorded one", where=str(path), allowed="what was saved")
    return payload
