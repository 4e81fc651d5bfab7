"""Tests of scratch folders: removed with their process however it ends, and no other folder is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from leftovers import descendants, wait_until

from autotune.io.scratch import ScratchFolder

MAKES = """
import sys, time
from pathlib import Path
from autotune.io.scratch import ScratchFolder

made = ScratchFolder(Path(sys.argv[1]))
(made.path / "sub").mkdir()
(made.path / "sub" / "file").write_text("x")
print(made.path, flush=True)
time.sleep(600)
"""


def maker(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """Return a process that has created a scratch folder, and the folder."""
    process = subprocess.Popen([sys.executable, "-c", MAKES, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    made = Path(process.stdout.readline().strip())
    assert (made / "sub" / "file").is_file()
    return process, made


def end(process: subprocess.Popen[str], how: signal.Signals) -> None:
    assert process.stdout is not None
    process.send_signal(how)
    process.wait()
    process.stdout.close()


def test_folder_is_removed_on_close(tmp_path: Path) -> None:
    with ScratchFolder(tmp_path) as folder:
        (folder / "file").touch()
    assert not list(tmp_path.iterdir())


def test_folder_is_removed_after_its_process_was_killed(tmp_path: Path) -> None:
    for how in (signal.SIGKILL, signal.SIGTERM):
        process, _ = maker(tmp_path)
        end(process, how)
        wait_until(lambda: not list(tmp_path.iterdir()), "the folder is left")


def test_abandoned_folder_is_removed_when_the_next_is_created(tmp_path: Path) -> None:
    process, left = maker(tmp_path)
    for watcher in descendants(process.pid):
        os.kill(watcher, signal.SIGKILL)
    end(process, signal.SIGKILL)
    held, theirs = maker(tmp_path)
    foreign = tmp_path / "autotune-scratch-of-somebody"
    foreign.mkdir()
    (foreign / "file").touch()
    (tmp_path / "autotune-scratch-link").symlink_to(theirs)
    try:
        for path in (left, theirs):
            # As if they had been created long ago.
            (lock,) = path.glob("*.lock")
            os.utime(lock, (time.time() - 1000, time.time() - 1000))
        ScratchFolder(tmp_path).close()
        assert not left.exists()
        assert (theirs / "sub" / "file").is_file()
        assert (foreign / "file").is_file()
    finally:
        end(held, signal.SIGKILL)
