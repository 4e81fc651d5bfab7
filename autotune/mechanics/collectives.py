"""Tell how long this process waits in collective operations."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed

# What data parallelism and ZeRO exchange gradients and weights with.
_COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "barrier",
)


class CollectiveClock:
    """Add up the seconds spent in collectives, waiting for the slowest rank included.

    Attributes:
        seconds: so far.
        calls: how many there were.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._depth = 0

    @contextmanager
    def running(self) -> Iterator[CollectiveClock]:
        """Time the body's collectives."""
        former = {name: getattr(distributed, name) for name in _COLLECTIVES}
        try:
            for name, call in former.items():
                setattr(distributed, name, self._timed(call))
            yield self
        finally:
            for name, call in former.items():
                setattr(distributed, name, call)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            # One that calls another is one collective.
            self._depth += 1
            began = time.perf_counter()
            try:
                work = call(*arguments, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - began
                    self.calls += 1
            return work if work is None or self._depth else _Awaited(work, self)

        return timed


class _Awaited:
    """Be a collective that goes on in the background; what it is waited for counts."""

    def __init__(self, work: Any, clock: CollectiveClock) -> None:
        self._work = work
        self._clock = clock

    def wait(self, *arguments: Any, **named: Any) -> Any:
        """Wait for it."""
        began = time.perf_counter()
        try:
            return self._work.wait(*arguments, **named)
        finally:
            self._clock.seconds += time.perf_counter() - began

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
