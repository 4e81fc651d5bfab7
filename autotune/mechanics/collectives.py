"""Collectives of Python objects; and collectives wrapped, to time them or to wait until they release their memory."""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import distributed

# Operations by which data parallelism, ZeRO and FSDP2 exchange gradients and weights; some are new in torch 2.13.
_COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all_single",
    "barrier",
)
# Operations that DeepSpeed's backend looks up once and stores.
_KEPT = ("all_gather_function", "reduce_scatter_function")
# Seconds within which gloo's threads release the buffers that they sent.
_SETTLING_S = 0.01
Call = Callable[..., Any]
Value = TypeVar("Value")


def of_first_rank(value: Value) -> Value:
    """Return the value of rank 0 on every rank."""
    shared: list[Any] = [value]
    distributed.broadcast_object_list(shared, src=0)
    found: Value = shared[0]
    return found


def of_all_ranks(value: Value) -> list[Value]:
    """Return the values of all ranks, in their order."""
    shared: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(shared, value)
    return shared


class CollectiveClock:
    """Clock that measures the time in collectives, including the wait for the slowest rank.

    Attributes:
        seconds: total time so far.
        calls: number of collectives so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._depth = 0
        self._began = 0.0

    @contextmanager
    def running(self) -> Iterator[CollectiveClock]:
        """Time the body's collectives."""
        with wrapped_collectives(self._timed):
            yield self

    def entered(self) -> None:
        """Note that a collective, or the wait for one, begins."""
        self._began = time.perf_counter()

    def left(self) -> None:
        """Note that it has ended."""
        self.seconds += time.perf_counter() - self._began

    def begin(self) -> None:
        """Begin a collective, or the wait for one; those within another one do not count."""
        if not self._depth:
            self.entered()
        self._depth += 1

    def end(self) -> None:
        """End what :meth:`begin` began."""
        self._depth -= 1
        if not self._depth:
            self.left()

    def _timed(self, call: Call) -> Call:
        @functools.wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            self.begin()
            try:
                work = call(*arguments, **named)
            finally:
                self.end()
                self.calls += not self._depth
            return work if work is None or self._depth else _Awaited(work, self)

        return timed


class _Awaited:
    """A collective that runs in the background; only the time spent waiting for it counts."""

    def __init__(self, work: Any, clock: CollectiveClock) -> None:
        self._work = work
        self._clock = clock

    def wait(self, *arguments: Any, **named: Any) -> Any:
        """Wait for the collective."""
        self._clock.begin()
        try:
            return self._work.wait(*arguments, **named)
        finally:
            self._clock.end()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Torch waits only for what is an instance of its own class.
        return type(self._work)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def settled_collectives() -> Iterator[None]:
    """Make this thread the last to release the buffers of the body's collectives.

    Gloo's threads hold buffers, too. If one of them is the last to release a buffer, the profiler misses the release,
    since it traces only the thread that started it: measured peaks of ZeRO 2 and 3 would be up to a fifth too high.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        yield
        return
    with wrapped_collectives(_settled):
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
def wrapped_collectives(wrap: Callable[[Call], Call]) -> Iterator[None]:
    """Wrap each collective while the body runs.

    Args:
        wrap: function that returns what is called in place of a collective.
    """
    places: list[tuple[Any, str]] = [(distributed, name) for name in _COLLECTIVES if hasattr(distributed, name)]
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
