"""Run user code once more without its messages, which its first pass has already given.

While any body is muted, a few functions of the process are replaced by ones that behave as before on other threads.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_thread = threading.local()
_lock = threading.Lock()
_undo: list[tuple[Any, str, Any, Any]] = []
_users = 0


@contextmanager
def muted(untold: list[logging.LogRecord] | None = None) -> Iterator[None]:
    """Run the body, on this thread, without log records, warnings of Python code, and output to ``sys.stdout``.

    Args:
        untold: list to which the suppressed log records are added.
    """
    with _hearing(untold, silent=True):
        yield


@contextmanager
def telling(untold: Sequence[logging.LogRecord]) -> Iterator[None]:
    """Run the body; then log those suppressed records that it did not log itself, such as what is logged only once.

    Args:
        untold: the records that were suppressed before.
    """
    if not untold:
        yield
        return
    told: list[logging.LogRecord] = []
    with _hearing(told, silent=False):
        yield
    met = set(map(_text_of, told))
    for record in untold:
        if _text_of(record) not in met:
            met.add(_text_of(record))
            logging.getLogger(record.name).handle(record)


@contextmanager
def _hearing(records: list[logging.LogRecord] | None, *, silent: bool) -> Iterator[None]:
    """Run the body, and add this thread's log records to a list; if silent, nothing else receives its messages."""
    with _replaced():
        former = _heard()
        _thread.heard = (records, silent)
        try:
            yield
        finally:
            _thread.heard = former


def _text_of(record: logging.LogRecord) -> tuple[str, int, str]:
    return record.name, record.levelno, str(record.msg)


def _heard() -> tuple[list[logging.LogRecord] | None, bool]:
    """Return the list for this thread's log records, and whether the thread is muted."""
    found: tuple[list[logging.LogRecord] | None, bool] = getattr(_thread, "heard", (None, False))
    return found


@contextmanager
def _replaced() -> Iterator[None]:
    """Replace the functions while at least one body runs."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _replace()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _put_back()


def _replace() -> None:
    handle, warn = logging.Logger.handle, warnings.warn

    def handle_unmuted(logger: logging.Logger, record: logging.LogRecord) -> None:
        records, silent = _heard()
        if records is not None:
            records.append(record)
        if not silent:
            handle(logger, record)

    def warn_unmuted(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kwargs: Any) -> None:
        if not _heard()[1]:
            warn(message, category, stacklevel + 1, *args, **kwargs)

    _set(logging.Logger, "handle", handle_unmuted)
    _set(warnings, "warn", warn_unmuted)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is not None:
            _set(sys, name, _Stream(getattr(sys, name)))


def _set(owner: Any, name: str, value: Any) -> None:
    _undo.append((owner, name, getattr(owner, name), value))
    setattr(owner, name, value)


def _put_back() -> None:
    while _undo:
        owner, name, former, value = _undo.pop()
        # Other code may have set another one meanwhile.
        if getattr(owner, name) is value:
            setattr(owner, name, former)


class _Stream:
    """A stream that drops what muted threads write.

    Args:
        stream: the stream that others write to.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)

    def write(self, text: str) -> int:
        """Write a text, unless this thread is muted."""
        return len(text) if _heard()[1] else self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        """Write lines, unless this thread is muted."""
        if not _heard()[1]:
            self._stream.writelines(lines)
