"""Temporary folders that are removed when the process that made them ends for any reason.

They are for files that need a path; other temporary files are unnamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PREFIX = "autotune-scratch-"
# A file that marks such a folder. It is locked while the folder is in use.
_LOCK = "autotune-scratch.lock"
# Watcher that removes a folder when its standard input closes; other processes may still write there for a while.
_WATCH = """
import os, shutil, sys, time
os.read(0, 1)
for _ in range(60):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.5)
"""
# Seconds after which the lock of a folder in use is certainly held.
_YOUNG_S = 60.0


class ScratchFolder:
    """A temporary folder that a watcher process removes when this process ends.

    If the watcher is killed as well, the next scratch folder in the same parent removes this one.

    Args:
        parent: the parent folder; ``None`` for the system's folder of temporary files.

    Attributes:
        path: path of the folder.
    """

    def __init__(self, parent: Path | None = None) -> None:
        folder = Path(tempfile.gettempdir()) if parent is None else parent
        remove_abandoned(folder)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
        try:
            with (self.path / _LOCK).open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # The watcher inherits only the lock, and keeps it after this process has closed the file.
                self._watcher = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _WATCH, str(self.path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[lock.fileno()],
                    start_new_session=True,
                )
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        self._watcher.wait()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_abandoned(folder: Path) -> None:
    """Remove this user's scratch folders that are no longer locked.

    Args:
        folder: the parent folder.
    """
    for lock in folder.glob(f"{_PREFIX}*/{_LOCK}"):
        # A locked folder, or one of another user, raises.
        with contextlib.suppress(OSError):
            if lock.parent.is_symlink() or time.time() - lock.stat().st_mtime < _YOUNG_S:
                continue
            with lock.open("r+b") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
