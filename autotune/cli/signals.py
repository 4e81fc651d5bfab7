"""Turn signals that ask the command line to end into an exception, so that whatever is under way is cleaned up."""

from __future__ import annotations

import math
import os
import signal
import time
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)
# Seconds in which the same request counts once: ``timeout`` and others send it to the process and to its group.
_AGAIN_S = 1.0


class EndedError(BaseException):
    """A signal asked this process to end.

    Args:
        number: the signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.code = 128 + number


def end_in_order() -> None:
    """Have signals that ask this process to end raise :class:`EndedError` in the main thread; ignored ones stay so."""
    process, last = os.getpid(), -math.inf

    def end(number: int, _: FrameType | None) -> None:
        nonlocal last
        if os.getpid() != process:
            # What the job forked ends as it would without this.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif time.monotonic() - last > _AGAIN_S:
            last = time.monotonic()
            raise EndedError(number)

    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
