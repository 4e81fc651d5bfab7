"""Names of run folders, and a lock that gives a folder one writer at a time.

The kernel releases the lock when its process ends for any reason, so a leftover lock file does not block anyone.
"""

from __future__ import annotations

import atexit
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
from typing import Any

from autotune.errors import RunDirectoryError, RunLockedError
from autotune.io.files import require_replaceable, sweep_temporary

logger = logging.getLogger(__name__)

# Locks of a folder: one for the run, and one for its tracking records, which another process may send.
RUN, TRACKING = ".writer", ".tracking"
# Longest name of a job or model in a folder's name: file systems allow 255 bytes for the whole name.
_LONGEST_BYTES = 120
_HELD: weakref.WeakSet[WriterLock] = weakref.WeakSet()
# Errors of file systems without locks.
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def new_run_folder(runs: Path, verb: str, called: str) -> Path:
    """Return the path ``<runs>/<utc time>-<verb>-<name>-<id>/`` for a run that begins now; the folder is not created.

    Args:
        runs: the runs folder.
        verb: name of the command.
        called: name of the job or model; characters other than letters, digits, ``-`` and ``_`` are replaced.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return runs / f"{stamp}-{verb}-{_name(called)}-{secrets.token_hex(3)}"


class WriterLock:
    """An exclusive right to write in a run's folder, from construction until :meth:`close` or the end of the process.

    The lock :data:`RUN` also removes the temporary files of killed writers.

    Args:
        folder: the run's folder.
        name: name of the lock, :data:`RUN` or :data:`TRACKING`.

    Raises:
        RunLockedError: if another process, or another object in this process, has the lock.
        RunDirectoryError: if the folder cannot be written.
        InputError: if the path of the lock is not a regular file.
    """

    def __init__(self, folder: Path, name: str = RUN) -> None:
        self._path = folder / name
        self._handle: int | None = None
        require_replaceable(self._path)
        while self._handle is None:
            handle = _locked(self._path, folder)
            # The previous holder deletes the file at its end, and a lock on a deleted file is worthless.
            if _is_at(handle, self._path):
                self._handle = handle
            else:
                os.close(handle)
        _HELD.add(self)
        with contextlib.suppress(OSError):
            # On a full disk, the file does not name its holder.
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        if name == RUN:
            sweep_temporary(folder)

    def close(self) -> None:
        """Release the lock and delete its file."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                # Deleted before the lock is released, so that no other process locks a file about to be deleted.
                self._path.unlink()
            with contextlib.suppress(OSError):
                # A forked child may still hold the same lock, so it is released explicitly.
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def __enter__(self) -> WriterLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _forget(self) -> None:
        """Close the lock in a forked child, so that the end of the parent releases it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def _locked(path: Path, folder: Path) -> int:
    """Open and lock a lock file, and return its descriptor."""
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
    """Return whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def _holder(handle: int) -> str:
    """Return the holder that is named in a lock file."""
    try:
        found: Any = json.loads(os.pread(handle, 4096, 0))
        return f"process {int(found['process'])} on {str(found['host'])[:100]!r}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _in_child() -> None:
    for lock in list(_HELD):
        lock._forget()


def _at_exit() -> None:
    # Later, the modules that closing needs are gone.
    for lock in list(_HELD):
        lock.close()


os.register_at_fork(after_in_child=_in_child)
atexit.register(_at_exit)


def _name(called: str) -> str:
    kept = "".join(character if character.isalnum() or character in "-_" else "-" for character in called)
    # The cut may split a character.
    short = kept.encode()[:_LONGEST_BYTES].decode(errors="ignore")
    return short if short.strip("-") else "unnamed"
