"""Catch the tuner's own errors, but not exceptions that a signal handler raises, which are meant for the loop."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any


def any_error() -> tuple[type[Exception], ...]:
    """Return the exception classes that an ``except`` clause should catch where a tuner error must not end the run.

    Returns:
        ``Exception``; nothing, if a signal handler raised the exception that is being handled (on a preemption notice,
        for example), since a signal may arrive at any line.
    """
    error, handlers = sys.exception(), _handlers()
    while error is not None and handlers:
        # Other code may have raised an exception of its own from the handler's.
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
            return ()
        error = error.__cause__
    return (Exception,)


@contextmanager
def errors_ignored() -> Iterator[None]:
    """Run the body, and ignore its errors, except those that a signal handler raises."""
    try:
        yield
    except any_error():
        pass


def _handlers() -> set[CodeType]:
    """Return the code of all signal handlers that are written in Python."""
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            function = handler if hasattr(handler, "__code__") else getattr(handler, "__func__", type(handler).__call__)
            code = getattr(function, "__code__", None)
            if code is not None:
                found.add(code)
    return found
