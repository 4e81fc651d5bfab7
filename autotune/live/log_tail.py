"""A reader of a decision log that is still being written; it reads each line once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import InputError
from autotune.io.files import require_regular, special

_PIECE_BYTES = 2**20
# A decision takes a few kilobytes, or up to two megabytes with ten thousand units.
_LONGEST_BYTES = 2**26


class LogTail:
    """A reader of the complete lines that were added to a file since it was last read.

    Attributes:
        grown: time (``time.time``) of the last write to the file, as of the last read; ``None`` before it exists.

    Args:
        path: the file; it may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.grown: float | None = None
        self._offset = 0

    def read(self) -> Iterator[tuple[bytes, int]]:
        """Yield each new complete line without its newline, and the number of bytes in the file that follow it.

        Raises:
            InputError: if the path is not a regular file, it cannot be read, it has become shorter, or a line is too
                long for a log.
        """
        try:
            require_regular(self.path)
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(self.path, flags), "rb") as file:
                found = os.fstat(file.fileno())
                if special(found.st_mode) is not None or found.st_size < self._offset:
                    raise InputError("is not the same file as before", where=str(self.path), allowed="a log that grows")
                self.grown = found.st_mtime
                file.seek(self._offset)
                left = found.st_size - self._offset
                torn = b""
                while left and (piece := file.read(min(_PIECE_BYTES, left))):
                    left -= len(piece)
                    *rows, torn = (torn + piece).split(b"\n")
                    follow = left + len(torn) + sum(len(row) + 1 for row in rows)
                    for row in rows:
                        self._offset += len(row) + 1
                        follow -= len(row) + 1
                        yield row, follow
                    if len(torn) > _LONGEST_BYTES:
                        allowed = f"lines of at most {_LONGEST_BYTES} bytes"
                        raise InputError("has a line that does not end", where=str(self.path), allowed=allowed)
        except FileNotFoundError:
            return
        except OSError as error:
            reason = f"cannot be read ({error.strerror})"
            raise InputError(reason, where=str(self.path), allowed="a readable file") from error
