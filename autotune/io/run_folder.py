"""Name a run's folder, and give it one writer at a time.

The lock is the kernel's: it ends with the process that holds it, however that ends, so that nobody has to guess whether
a lock file was left behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import weakref
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from autotune.errors import RunDirectoryError, RunLockedError
from autotune.io.files import require_replaceable, sweep_temporary

logger = logging.getLogger(__name__)

# Locks of a folder: of the run, and of what it records for a tracking server, which another process may send.
RUN, TRACKING = ".writer", ".tracking"
# Bytes of the part of a folder's name that the run is called after: file systems take 255 for the whole name.
_LONGEST_BYTES = 120
_HELD: weakref.WeakSet[WriterLock] = weakref.WeakSet()
# What file systems without locks answer.
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def new_run_folder(runs: Path, verb: str, called: str) -> Path:
    """Return the path of a run that begins now, ``<runs>/<utc time>-<verb>-<name>-<id>/``; nothing is made.

    Args:
        runs: the runs folder, in which the path lies whatever the run is called after.
        verb: the command.
        called: what the run is called after, a job or a model. Of this only letters, digits, ``-`` and ``_`` stay.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return runs / f"{stamp}-{verb}-{_name(called)}-{secrets.token_hex(3)}"


class WriterLock:
    """The right to write in a run's folder, from construction until :meth:`close` or the end of the process.

    Temporary files that an earlier writer left when it was killed are removed.

    Args:
        folder: the run's folder.
        name: which of its locks.

    Raises:
        RunLockedError: if another process, or another call in this one, holds it; the holder is named.
        RunDirectoryError: if the folder cannot be written.
        InputError: if something else than a regular file stands where the lock is kept.
    """

    def __init__(self, folder: Path, name: str = RUN) -> None:
        self._path = folder / name
        self._handle: int | None = None
        require_replaceable(self._path)
        while self._handle is None:
            handle = _locked(self._path, folder)
            # Whoever held it before takes the file away at the end: a lock on that file would be of nobody's.
            if _is_at(handle, self._path):
                self._handle = handle
            else:
                os.close(handle)
        _HELD.add(self)
        with contextlib.suppress(OSError):
            # On a full disk the holder has no name.
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        if name == RUN:
            sweep_temporary(folder)

    def close(self) -> None:
        """Let others write; the folder is left without a trace of the lock."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                # First, so that nobody takes the lock of a file that is about to go.
                self._path.unlink()
            with contextlib.suppress(OSError):
                # A child that was forked may still hold the same lock: it is this process that gives it up.
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def __enter__(self) -> WriterLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _forget(self) -> None:
        """Close the lock in a forked child, which does not write: its parent's end must be enough to end the lock."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def _locked(path: Path, folder: Path) -> int:
    """Return a lock file's descriptor, on which the lock is held."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise RunDirectoryError(problem, where=str(folder), allowed="a writable folder") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _holder(handle)
        if error.errno not in _UNSUPPORTED:
            os.close(handle)
            raise RunLockedError(
                f"is being written by {holder}", where=str(folder), allowed="to wait for its end, or to end it"
            ) from error
        logger.warning("%s lies on a file system without locks: let one process at a time write there", folder)
    return handle


def _is_at(handle: int, path: Path) -> bool:
    """Tell whether an open file is still what stands at a path."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def _holder(handle: int) -> str:
    """Return who wrote its name into a lock."""
    try:
        found: Any = json.loads(os.pread(handle, 4096, 0))
        return f"process {int(found['process'])} on {str(found['host'])[:100]!r}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _in_child() -> None:
    for lock in list(_HELD):
        lock._forget()


os.register_at_fork(after_in_child=_in_child)


def _name(called: str) -> str:
    kept = "".join(character if character.isalnum() or character in "-_" else "-" for character in called)
    # What is cut off may have been the middle of a letter.
    short = kept.encode()[:_LONGEST_BYTES].decode(errors="ignore")
    return short if short.strip("-") else "unnamed"
