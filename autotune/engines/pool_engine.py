"""Measure several plans at once: prepared windows run on several workers and are returned in order.

Each worker trains the job in its own process, possibly on another machine. Answers are returned in the order of
requests, as with one worker. If a worker is lost, another one repeats its window, once.
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

# Windows that wait while every worker runs one: this number or this share of the workers, whichever is larger. Answers
# are taken in order, and the more windows are open, the less a search knows when it chooses its next plan.
_WAITING, _WAITING_SHARE = 2, 0.25
# Attempts at a window after which its plan counts as the cause of the lost workers.
_TRIES = 2
# Seconds for a worker's thread to end.
_ENDING_S = 10.0


class Worker(Protocol):
    """A runner of windows outside this process, one at a time."""

    def describe(self) -> dict[str, Any]:
        """Return ``space``, the plans that the job allows, and ``locks``, the reasons against others, as JSON objects.

        Raises:
            InputError: if the job cannot be used.
            WorkerLostError: if the worker is lost.
        """
        ...

    def run(self, plan: dict[str, Any], steps: int, memory_budget_bytes: int | None) -> dict[str, Any]:
        """Run a window, and return its measurement as a JSON object.

        Raises:
            WorkerLostError: if the worker is lost.
        """
        ...

    def close(self) -> None:
        """End the worker."""
        ...


@dataclass(slots=True, eq=False)
class _Window:
    """A window that was requested."""

    plan: Plan
    steps: int
    memory_budget_bytes: int | None
    lost: int = 0
    answer: Future[Measurement] = field(default_factory=Future)


class PoolEngine(EngineBase):
    """An engine that runs prepared windows on all workers at once, and any others on the first worker.

    Windows that are compared precisely with each other (references, finals) are thus measured on one machine.

    Args:
        workers: at least one worker.
        on_close: called at the end of :meth:`close`.

    Attributes:
        ahead: number of windows worth preparing before the first of them is run.
        locks: reasons against choices that are not allowed.

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
        """Return the number of workers that are left."""
        with self._changed:
            return len(self._alive)

    def prepare(self, plan: Plan, steps: int) -> None:
        """Queue a window under the current budget for any free worker; :meth:`run` returns it later."""
        window = _Window(self.space.check(plan), steps, self.memory_budget_bytes)
        key = (window.plan, steps, window.memory_budget_bytes)
        if key not in self._prepared:
            self._prepared[key] = window
            self._ask(self._shared, window)

    def run(self, steps: int) -> Measurement:
        """Return the prepared window; if there is none, let the first worker run one.

        Raises:
            EngineError: if the engine was closed, or all workers were lost.
        """
        window = self._prepared.pop((self.plan, steps, self.memory_budget_bytes), None)
        if window is None:
            window = _Window(self.plan, steps, self.memory_budget_bytes)
            self._ask(self._own, window)
        return window.answer.result()

    def evaluate(self) -> float:
        """Refuse: the models of the workers have been trained with different steps.

        Raises:
            EngineError: always.
        """
        raise EngineError("workers share no training state: a pool can only measure windows")

    def snapshot(self) -> Any:
        """Refuse, as :meth:`evaluate` does."""
        return self.evaluate()

    def restore(self, snapshot: Any) -> None:
        """Refuse, as :meth:`evaluate` does."""
        self.evaluate()

    def close(self) -> None:
        """End all workers; windows that they still run are lost."""
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
        """Return the job's description from the first worker that answers."""
        reason = "there are no workers"
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
        """Run windows on a worker until it is lost or the engine is closed: the body of its thread."""
        while (window := self._next(number)) is not None:
            try:
                found = self._workers[number].run(window.plan.to_json(), window.steps, window.memory_budget_bytes)
                measured = Measurement.from_json(found)
            except WorkerLostError as error:
                self._lose(number, window, error)
                return
            except Exception as error:  # noqa: BLE001 - raised again where the window was requested
                window.answer.set_exception(error)
            else:
                window.answer.set_result(measured)

    def _next(self, number: int) -> _Window | None:
        """Wait for the next window of a worker; ``None`` after the engine was closed."""
        with self._changed:
            while not self._closed:
                if self._own and self._alive[0] == number:
                    return self._own.popleft()
                if self._shared:
                    return self._shared.popleft()
                self._changed.wait()
        return None

    def _lose(self, number: int, window: _Window, error: WorkerLostError) -> None:
        """Remove a lost worker; return its window to the queue, or fail it after the last attempt."""
        with self._changed:
            self._alive.remove(number)
            window.lost += 1
            if self._closed:
                window.answer.cancel()
                return
            logger.warning("a worker was lost (%s); %d are left", error, len(self._alive))
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
