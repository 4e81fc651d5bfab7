"""Conversion of termination signals into an exception, so that unfinished work is cleaned up."""

from __future__ import annotations

import functools
import math
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_ENDING = (signal.SIGTERM, signal.SIGHUP)
# A repeated signal within this time counts once: ``timeout`` sends it to the process and to its group.
_AGAIN_S = 1.0


class EndedError(BaseException):
    """A termination signal reached this process.

    Args:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
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
    """Make termination signals raise :class:`EndedError` in the main thread; ignored signals stay ignored."""
    process, last = os.getpid(), -math.inf

    def end(number: int, _: FrameType | None) -> None:
        nonlocal last
        if os.getpid() != process:
            # A process that the job forked exits as it would without this handler.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif time.monotonic() - last > _AGAIN_S:
            last = time.monotonic()
            raise EndedError(number)

    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
