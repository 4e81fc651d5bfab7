"""Conversion of termination signals into an exception, so that unfinished work is cleaned up."""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_ENDING = (signal.SIGTERM, signal.SIGHUP)
# A repeated signal within this time counts once: ``timeout`` sends it to the process and to its group.
_AGAIN_S = 1.0
# Time after which a signal whose exception was lost is sent again.
_LOST_S = 0.05


class EndedError(BaseException):
    """A termination signal reached this process.

    Args:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__("interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}")
        self.code = 128 + number


def interruptible(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that raises :class:`EndedError` on Ctrl-C; Typer would end silently."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except KeyboardInterrupt as error:
            raise EndedError(signal.SIGINT) from error

    return run


def end_in_order() -> None:
    """Make termination signals raise :class:`EndedError` in the main thread; ignored signals stay ignored.

    Python drops an exception that a signal raises within a destructor or a callback of a weak reference. Then the
    signal is sent again.
    """
    process, last, others = os.getpid(), -math.inf, sys.unraisablehook

    def end(number: int, _: FrameType | None) -> None:
        nonlocal last
        if os.getpid() != process:
            # A process that the job forked exits as it would without this handler.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif time.monotonic() - last > _AGAIN_S:
            last = time.monotonic()
            raise EndedError(number)

    def lost(dropped: sys.UnraisableHookArgs) -> None:
        nonlocal last
        if not isinstance(dropped.exc_value, EndedError | KeyboardInterrupt):
            others(dropped)
            return
        last = -math.inf
        number = dropped.exc_value.number if isinstance(dropped.exc_value, EndedError) else signal.SIGINT
        # Not at once, since the callback may still be running.
        again = threading.Timer(_LOST_S, signal.pthread_kill, (threading.main_thread().ident, number))
        again.daemon = True
        again.start()

    sys.unraisablehook = lost
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
