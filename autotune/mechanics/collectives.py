"""Collectives of Python objects; and collectives wrapped, to time them or to wait until they release their memory."""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
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
# Operations by which torch's divided layers exchange activations: they return tensors that are still on their way.
_FUNCTIONAL = "torch.distributed._functional_collectives"
_OF_LAYERS = ("all_reduce", "all_gather_single", "all_gather_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
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
    def running(self, *, of_layers: bool = False) -> Iterator[CollectiveClock]:
        """Time the body's collectives.

        Args:
            of_layers: as for :func:`wrapped_collectives`.
        """
        with wrapped_collectives(self._timed, of_layers=of_layers):
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
            is_done = work is None or isinstance(work, torch.Tensor)
            return work if is_done or self._depth else _Awaited(work, self)

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
    with wrapped_collectives(_settled, of_layers=True):
        yield


def _settled(call: Call) -> Call:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def settled(*arguments: Any, **named: Any) -> Any:
        if "async_op" not in signature.parameters:
            found = call(*arguments, **named)
            time.sleep(_SETTLING_S)
            return found
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


def _arrived(call: Call) -> Call:
    """Make a collective return its tensor once it is there."""

    @functools.wraps(call)
    def arrived(*arguments: Any, **named: Any) -> Any:
        found = call(*arguments, **named)
        if hasattr(found, "wait"):
            found.wait()
        return found

    return arrived


@contextmanager
def wrapped_collectives(wrap: Callable[[Call], Call], *, of_layers: bool = False) -> Iterator[None]:
    """Wrap each collective while the body runs.

    Args:
        wrap: function that returns what is called in place of a collective.
        of_layers: whether to wrap those within divided layers, too, which then wait for their tensors.
    """
    places: list[tuple[Any, str]] = [(distributed, name) for name in _COLLECTIVES if hasattr(distributed, name)]
    backend = getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None)
    places += [(backend, name) for name in _KEPT if getattr(backend, name, None) is not None]
    layers = sys.modules.get(_FUNCTIONAL) if of_layers else None
    inner = [(layers, name) for name in _OF_LAYERS if hasattr(layers, name)]
    places += inner
    former = [getattr(place, name) for place, name in places]
    try:
        for (place, name), call in zip(places, former, strict=True):
            setattr(place, name, wrap(_arrived(call) if (place, name) in inner else call))
        yield
    finally:
        for (place, name), call in zip(places, former, strict=True):
            setattr(place, name, call)
