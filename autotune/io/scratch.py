"""Make temporary folders that are gone with the process that made them, however it ends.

For what cannot do without names in a folder; whatever can, uses files that have none.
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
from types import TracebackType

_PREFIX = "autotune-scratch-"
# A file that makes a folder one of these. A lock is held on it as long as anybody cares for the folder.
_LOCK = "autotune-scratch.lock"
# Removes a folder once nobody holds the other end of its standard input: what still writes there may take a while.
_WATCH = """
import os, shutil, sys, time
os.read(0, 1)
for _ in range(60):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.5)
"""
# Seconds after which a folder's lock is held for certain, if anybody holds it.
_YOUNG_S = 60.0


class ScratchFolder:
    """A temporary folder, which a process of its own removes once this process is gone.

    If that process is killed as well, whoever makes the next folder removes this one.

    Args:
        parent: the folder in which it is made; ``None`` for the usual one of temporary files.

    Attributes:
        path: the folder.
    """

    def __init__(self, parent: Path | None = None) -> None:
        folder = Path(tempfile.gettempdir()) if parent is None else parent
        remove_abandoned(folder)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
        try:
            with (self.path / _LOCK).open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # Of what is open here, the watcher has the lock alone: it holds it from now on.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remove_abandoned(folder: Path) -> None:
    """Remove the scratch folders of this user that nobody holds a lock on any more.

    Args:
        folder: where they lie.
    """
    for lock in folder.glob(f"{_PREFIX}*/{_LOCK}"):
        # One that somebody holds, or that is another user's, raises.
        with contextlib.suppress(OSError):
            if lock.parent.is_symlink() or time.time() - lock.stat().st_mtime < _YOUNG_S:
                continue
            with lock.open("r+b") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
