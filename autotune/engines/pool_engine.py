"""Measure many plans at once: windows that are asked for ahead run on several workers, and are answered in order.

A worker trains the job in a process of its own, maybe on another machine. What is asked, and in which order it is
answered, is as with one worker; only the waiting is gone. A worker that is lost takes nothing with it: what it ran is
run again by another one, once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from autotune.engines.engine import EngineBase
from autotune.errors import EngineError, WorkerLostError
from autotune.measurement import Failure, Measurement
from autotune.plan import Plan, PlanSpace

logger = logging.getLogger(__name__)

# Windows that wait at the door while every worker runs one: so many, or a share of the workers. Answers are taken in
# order, and whoever proposes is the less informed the more is open.
_WAITING, _WAITING_SHARE = 2, 0.25
# How often a window is begun before its plan is held to be what takes workers down.
_TRIES = 2
# Seconds that a worker's thread may take to end.
_ENDING_S = 10.0


class Worker(Protocol):
    """Run windows, one after another, somewhere else."""

    def describe(self) -> dict[str, Any]:
        """Return ``space``, the plans that the job allows, and ``locks``, why not others, as JSON objects.

        Raises:
            InputError: if the job cannot be used.
            WorkerLostError: if the worker is gone.
        """
        ...

    def run(self, plan: dict[str, Any], steps: int, memory_budget_bytes: int | None) -> dict[str, Any]:
        """Return a window's measurement, as a JSON object.

        Raises:
            WorkerLostError: if the worker is gone.
        """
        ...

    def close(self) -> None:
        """End the worker."""
        ...


@dataclass(slots=True, eq=False)
class _Window:
    """A window that was asked for."""

    plan: Plan
    steps: int
    memory_budget_bytes: int | None
    lost: int = 0
    answer: Future[Measurement] = field(default_factory=Future)


class PoolEngine(EngineBase):
    """Run windows on workers, those of :meth:`prepare` at once, and any others on the first worker.

    Windows that shall be compared with one another to the last per cent (references, finals) are so measured on one
    machine.

    Args:
        workers: at least one.
        on_close: is called once all workers were told to end.

    Attributes:
        memory_budget_bytes: the budget that windows are held to.
        ahead: windows that are worth asking for before the first is answered.
        locks: why plans are not allowed that might be, by unit.

    Raises:
        InputError: if the job cannot be used.
        EngineError: if no worker answers.
    """

    def __init__(self, workers: Sequence[Worker], on_close: Callable[[], None] | None = None) -> None:
        self.ahead = len(workers) + max(_WAITING, int(_WAITING_SHARE * len(workers)))
        self._workers = list(workers)
        self._on_close = on_close
        self._alive = list(range(len(workers)))
        self._changed = threading.Condition()
        self._shared: deque[_Window] = deque()
        self._own: deque[_Window] = deque()
        self._prepared: dict[tuple[Plan, int, int | None], _Window] = {}
        self._threads: list[threading.Thread] = []
        try:
            described = self._first_answer()
            super().__init__(PlanSpace.from_json(described["space"]))
            self.locks: dict[str, str] = described["locks"]
        except BaseException:
            self.close()
            raise
        for number in list(self._alive):
            thread = threading.Thread(target=self._serve, args=(number,), name=f"worker {number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def workers(self) -> int:
        """Return how many workers there still are."""
        with self._changed:
            return len(self._alive)

    def prepare(self, plan: Plan, steps: int) -> None:
        """Begin a window that :meth:`run` will be asked for, under the present budget, on whichever worker is free."""
        window = _Window(self.space.check(plan), steps, self.memory_budget_bytes)
        key = (window.plan, steps, window.memory_budget_bytes)
        if key not in self._prepared:
            self._prepared[key] = window
            self._ask(self._shared, window)

    def run(self, steps: int) -> Measurement:
        """Return a window: the prepared one, or one that the first worker runs now.

        Raises:
            EngineError: if the engine was closed, or all workers were lost.
        """
        window = self._prepared.pop((self.plan, steps, self.memory_budget_bytes), None)
        if window is None:
            window = _Window(self.plan, steps, self.memory_budget_bytes)
            self._ask(self._own, window)
        return window.answer.result()

    def evaluate(self) -> float:
        """Raise an error: each worker's model has seen other steps."""
        raise _no_single_state()

    def snapshot(self) -> Any:
        """Raise an error: each worker's model has seen other steps."""
        raise _no_single_state()

    def restore(self, snapshot: Any) -> None:
        """Raise an error: each worker's model has seen other steps."""
        raise _no_single_state()

    def close(self) -> None:
        """End all workers; what they still ran is lost."""
        with self._changed:
            if self._closed:
                return
            super().close()
            for window in (*self._shared, *self._own):
                window.answer.cancel()
            self._shared.clear()
            self._own.clear()
            self._changed.notify_all()
        for worker in self._workers:
            with contextlib.suppress(Exception):
                worker.close()
        for thread in self._threads:
            thread.join(_ENDING_S)
        if self._on_close is not None:
            self._on_close()

    def _first_answer(self) -> dict[str, Any]:
        """Return what the first worker that answers says of the job."""
        reason = "there is none"
        while self._alive:
            try:
                return self._workers[self._alive[0]].describe()
            except WorkerLostError as error:
                reason = str(error)
                self._alive.pop(0)
        raise EngineError(f"no worker answers: {reason}")

    def _ask(self, waiting: deque[_Window], window: _Window) -> None:
        with self._changed:
            self.require_open()
            if not self._alive:
                window.answer.set_exception(EngineError("all workers were lost"))
                return
            waiting.append(window)
            self._changed.notify_all()

    def _serve(self, number: int) -> None:
        """Run one worker's thread."""
        while (window := self._next(number)) is not None:
            try:
                found = self._workers[number].run(window.plan.to_json(), window.steps, window.memory_budget_bytes)
                measured = Measurement.from_json(found)
            except WorkerLostError as error:
                self._lose(number, window, error)
                return
            except Exception as error:  # noqa: BLE001 - whoever asked for the window is told
                window.answer.set_exception(error)
            else:
                window.answer.set_result(measured)

    def _next(self, number: int) -> _Window | None:
        """Return the next window for a worker; ``None`` once there will be none."""
        with self._changed:
            while not self._closed:
                if self._own and self._alive[0] == number:
                    return self._own.popleft()
                if self._shared:
                    return self._shared.popleft()
                self._changed.wait()
        return None

    def _lose(self, number: int, window: _Window, error: WorkerLostError) -> None:
        """Go on without a worker."""
        with self._changed:
            self._alive.remove(number)
            window.lost += 1
            if self._closed:
                window.answer.cancel()
                return
            logger.warning("a worker is lost (%s); %d go on", error, len(self._alive))
            if window.lost >= _TRIES:
                said = f"{window.lost} workers were lost while they ran it: {error}"
                window.answer.set_result(Measurement.of_failure(Failure.CRASHED, said, window.memory_budget_bytes))
            else:
                self._shared.appendleft(window)
            if not self._alive:
                for left in (*self._shared, *self._own):
                    left.answer.set_exception(EngineError(f"all workers were lost: {error}"))
                self._shared.clear()
                self._own.clear()
            self._changed.notify_all()


def _no_single_state() -> EngineError:
    return EngineError("workers share no training state: a pool measures windows, and nothing else")
