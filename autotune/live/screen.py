"""Show a live run at the bottom of a terminal, below whatever the run itself prints, and never make it wait.

The last lines of the terminal are taken out of what scrolls, as package managers do it. No stream of the run is
replaced, so its own output and progress bars stay what they are. Drawing is done by a thread; what it cannot draw in
time is left out, and what fails ends the drawing alone.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import queue
import sys
import threading
import time
from typing import Literal

from rich.console import Console

from autotune.live.view import Snapshot, line, panel

logger = logging.getLogger(__name__)

REFRESH_S = 1.0
# A terminal with fewer rows shows one line, one with fewer still nothing.
_ROWS_OF_A_PANEL, _ROWS_OF_A_LINE = 24, 5
_CLOSE_TIMEOUT_S = 0.5
_SAVE, _RESTORE, _CLEAR_LINE, _CLEAR_BELOW = "\x1b7", "\x1b8", "\x1b[2K", "\x1b[J"
# Down, scrolling, in the same column.
_INDEX = "\x1bD"


def screen_of(descriptor: int = 2) -> Screen | None:
    """Return a screen on a terminal, stderr's by default; ``None`` if it is none, or somebody types there."""
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    try:
        usable = os.isatty(descriptor) and os.environ.get("TERM", "dumb") != "dumb" and os.name == "posix"
        return Screen(descriptor) if usable and not interactive else None
    except OSError:
        return None


class Screen:
    """Draw snapshots at the bottom of a terminal.

    Attributes:
        due: time (``perf_counter``) from which the next snapshot is wanted.
        problem: why drawing ended; ``None`` if it did not.

    Args:
        descriptor: file descriptor of the terminal.
    """

    def __init__(self, descriptor: int) -> None:
        self.due = 0.0
        self.problem: str | None = None
        self._descriptor = os.dup(descriptor)
        self._process = os.getpid()
        self._snapshots: queue.SimpleQueue[Snapshot | str] = queue.SimpleQueue()
        self._busy = False
        self._closed = False
        self._reserved: tuple[int, int, int] | None = None
        self._spent_s = self._charged_s = 0.0
        self._thread = threading.Thread(target=self._work, name="autotune-screen", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def show(self, snapshot: Snapshot, now: float) -> None:
        """Have a snapshot drawn; one is left out while the one before is still being drawn."""
        self.due = now + REFRESH_S
        if not self._busy and self.problem is None and not self._closed:
            self._busy = True
            self._snapshots.put(snapshot)

    def spent_s(self) -> float:
        """Return the processor seconds that drawing took since this was last asked."""
        spent, self._charged_s = self._spent_s - self._charged_s, self._spent_s
        return spent

    def close(self, last: str = "") -> None:
        """Give the terminal back, and leave one line there; wait for it, but never long.

        Args:
            last: the line; empty for none.
        """
        # A forked process has no thread, and the terminal is not its own.
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._snapshots.put(last)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        while True:
            item = self._snapshots.get()
            began = time.thread_time()
            try:
                if isinstance(item, str):
                    self._finish(item)
                elif self.problem is None:
                    self._draw(item)
            except Exception as error:  # noqa: BLE001 - whatever a terminal does must not reach training
                self.problem = f"{type(error).__name__}: {error}"
                logger.info("the live view ended: %s", self.problem)
            self._spent_s += time.thread_time() - began
            self._busy = False
            if isinstance(item, str):
                os.close(self._descriptor)
                return

    def _draw(self, snapshot: Snapshot) -> None:
        if self._in_background():
            self._release()
            return
        columns, rows = os.get_terminal_size(self._descriptor)
        if rows < _ROWS_OF_A_LINE or columns < 2 * _ROWS_OF_A_LINE:
            self._release()
            return
        lines = render(snapshot, columns, whole=rows >= _ROWS_OF_A_PANEL)
        if self._reserved != (columns, rows, len(lines)):
            self._release()
            self._reserve(columns, rows, len(lines))
        first = rows - len(lines) + 1
        drawn = "".join(f"\x1b[{first + number};1H{_CLEAR_LINE}{text}" for number, text in enumerate(lines))
        self._write(_SAVE + drawn + _RESTORE)

    def _in_background(self) -> bool:
        """Tell whether the terminal is somebody else's at present; where that cannot be told, it is ours."""
        try:
            return os.tcgetpgrp(self._descriptor) != os.getpgrp()
        except OSError:
            return False

    def _reserve(self, columns: int, rows: int, height: int) -> None:
        self._reserved = columns, rows, height
        room = _INDEX * height + f"\x1b[{height}A"
        self._write(f"{room}{_SAVE}\x1b[1;{rows - height}r{_RESTORE}")

    def _release(self) -> None:
        if self._reserved is not None:
            self._reserved = None
            # To set the margins moves the cursor, and what is below it is the panel.
            self._write(f"{_SAVE}\x1b[r{_RESTORE}{_SAVE}{_INDEX}\r{_CLEAR_BELOW}{_RESTORE}")

    def _finish(self, last: str) -> None:
        self._release()
        if last:
            self._write(last + "\n")

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", errors="replace")
        while data:
            data = data[os.write(self._descriptor, data) :]


def render(snapshot: Snapshot, columns: int, *, whole: bool) -> list[str]:
    """Return the lines of a terminal that show a snapshot.

    Args:
        snapshot: what to show.
        columns: width of the terminal.
        whole: whether there is room for the panel; else it is one line.
    """
    plain = "utf" not in (getattr(sys.__stderr__, "encoding", None) or "").lower()
    system: Literal["standard"] = "standard"
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=columns - 1, color_system=system, highlight=False)
    shown = panel(snapshot, plain=plain) if whole else line(snapshot)
    console.print(shown, end="", no_wrap=True, overflow="ellipsis")
    return stream.getvalue().rstrip("\n").split("\n")
