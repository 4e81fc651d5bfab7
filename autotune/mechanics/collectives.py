"""Stand round collective operations: to tell how long this process waits in them, or until they let go of memory."""

from __future__ import annotations

import functools
import inspect
import sys
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
# Those that DeepSpeed looks up once, and keeps.
_KEPT = ("all_gather_function", "reduce_scatter_function")
# In which gloo's own threads let go of what they sent.
_SETTLING_S = 0.01
Call = Callable[..., Any]


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
        with _wrapped(self._timed):
            yield self

    def _timed(self, call: Call) -> Call:
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
    """A collective that goes on in the background; what it is waited for counts."""

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


@contextmanager
def settled_collectives() -> Iterator[None]:
    """Let this thread be the last that holds what the body's collectives send.

    Gloo's own threads hold buffers, too. Where one of them lets go last, the profiler, which listens to the thread that
    it was begun in, does not see the buffer freed: peaks of ZeRO 2 and 3 read up to a fifth too high.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        yield
        return
    with _wrapped(_settled):
        yield


def _settled(call: Call) -> Call:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def settled(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        goes_on = bool(bound.arguments.get("async_op"))
        bound.arguments["async_op"] = True
        work = call(*bound.args, **bound.kwargs)
        if work is None:
            return None
        work.wait()
        time.sleep(_SETTLING_S)
        return work if goes_on else None

    return settled


@contextmanager
def _wrapped(wrap: Callable[[Call], Call]) -> Iterator[None]:
    """Put something round each of the body's collectives."""
    places: list[tuple[Any, str]] = [(distributed, name) for name in _COLLECTIVES]
    backend = getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None)
    places += [(backend, name) for name in _KEPT if getattr(backend, name, None) is not None]
    former = [getattr(place, name) for place, name in places]
    try:
        for (place, name), call in zip(places, former, strict=True):
            setattr(place, name, wrap(call))
        yield
    finally:
        for (place, name), call in zip(places, former, strict=True):
            setattr(place, name, call)
