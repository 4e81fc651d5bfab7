"""Train a job in a separate process: if the process dies, hangs or sends garbage, only the window fails.

The child is then ended with all processes that it started. The next window begins in a new child, from the last
snapshot that was taken or restored, or from the job's beginning if there is none.
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from autotune.engines.engine import EngineBase
from autotune.engines.registry import DEFAULT_ENGINE, RankOptions
from autotune.engines.torch_engine import EngineOptions
from autotune.engines.worker_processes import Workers, WorkersError
from autotune.errors import EngineError, JobError
from autotune.measurement import Measurement
from autotune.mechanics.devices import device_kind
from autotune.plan import Plan, PlanSpace

logger = logging.getLogger(__name__)

Predict = Callable[[Plan], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Time limits after which a child process counts as hanging.

    Attributes:
        opening_s: seconds for building the model.
        first_s: seconds for a window if no step time is predicted or measured yet or its plan compiles units, and for
            any other call.
        factor: a window's limit as a multiple of its steps at the predicted or, if longer, the slowest measured time.
        grace_s: seconds added to that limit.
    """

    opening_s: float = 300.0
    first_s: float = 600.0
    factor: float = 10.0
    grace_s: float = 30.0


class StateFiles:
    """Unnamed files that keep a training state while this object exists, one for each process.

    Args:
        count: number of processes.
    """

    def __init__(self, count: int) -> None:
        self._files = [tempfile.TemporaryFile() for _ in range(count)]  # noqa: SIM115 - they are closed with this object

    def __del__(self) -> None:
        for file in self._files:
            file.close()

    @property
    def descriptors(self) -> list[int]:
        """Return the files' descriptors, by process."""
        return [file.fileno() for file in self._files]


class IsolatedEngine(EngineBase):
    """An engine that runs a job's windows in a child process and survives the child's death.

    Args:
        job: the job's reference for :func:`autotune.load_job`; a job itself cannot be sent to another process.
        seed: random seed for weights, batches and training.
        device: device of the model; ``None`` for the device on which jobs train on this machine.
        options: how to measure.
        patience: time limits of the child process.
        predict: function that returns the seconds of a step under a plan, or ``None`` if they are not known.
        threads: torch threads of the child; ``None`` for torch's default.
        ranks: options of several processes that train the job together; ``None`` for one process.

    Raises:
        JobError: if the job cannot be used, or the child ends or hangs while it builds the model.
    """

    def __init__(
        self,
        job: str,
        *,
        seed: int = 0,
        device: str | None = None,
        options: EngineOptions | None = None,
        patience: Patience | None = None,
        predict: Predict | None = None,
        threads: int | None = None,
        ranks: RankOptions | None = None,
    ) -> None:
        if not isinstance(job, str):
            raise JobError(
                f"is {type(job).__name__}", where="isolated engine", allowed="a job's name: it crosses a process border"
            )
        self._job = job
        self._opening = {
            "job": job,
            "seed": seed,
            "device": device or device_kind(1 if ranks is None else ranks.count),
            "options": asdict(options or EngineOptions()),
            "threads": threads,
            "engine": DEFAULT_ENGINE if ranks is None else ranks.engine,
            "arguments": {} if ranks is None else ranks.arguments(),
        }
        self._patience = patience or Patience()
        self._predict = predict
        self._slowest_s = 0.0
        self._ranks = None if ranks is None else ranks.count
        self._latest: StateFiles | None = None
        self._child: Workers | None = None
        self.children = 0
        try:
            opened = self._first_opened()
        except BaseException:
            self.close()
            raise
        super().__init__(PlanSpace.from_json(opened["space"]))
        self.locks: dict[str, str] = opened["locks"]

    def run(self, steps: int) -> Measurement:
        """Run a window of optimizer steps; if the child ends or hangs, the window fails.

        Raises:
            EngineError: if the engine was closed.
        """
        began = time.perf_counter()
        request: dict[str, Any] = {
            "steps": steps,
            "plan": self.plan.to_json(),
            "memory_budget_bytes": self.memory_budget_bytes,
        }
        try:
            answer = self._ask("run", self._patience_for(steps), **request)
        except WorkersError as error:
            spent = time.perf_counter() - began
            return Measurement.of_failure(error.failure, str(error), self.memory_budget_bytes, total_s=spent)
        found = Measurement.from_json(answer)
        if found.steps:
            self._slowest_s = max(self._slowest_s, found.total_s / found.steps)
        return found

    def evaluate(self) -> float:
        """Return the job's metric.

        Raises:
            EngineError: if the child ends or hangs.
        """
        return float(self._told("evaluate"))

    def snapshot(self) -> StateFiles:
        """Return the training state, which outlives the child.

        Raises:
            EngineError: if the child ends or hangs.
        """
        state = StateFiles(self._ranks or 1)
        self._told("snapshot", state)
        self._latest = state
        return state

    def restore(self, snapshot: StateFiles) -> None:
        """Return to a snapshot of this engine.

        Raises:
            EngineError: if the child ends or hangs.
        """
        self._told("restore", snapshot)
        self._latest = snapshot

    def close(self) -> None:
        """End the child, and release the last snapshot, which is deleted unless the caller keeps it."""
        super().close()
        self._latest = None
        self._end()

    # The child.

    def _told(self, call: str, state: StateFiles | None = None) -> Any:
        try:
            return self._ask(call, self._patience.first_s, state)
        except WorkersError as error:
            raise EngineError(f"{call}: {error}") from error

    def _ask(self, call: str, timeout_s: float, state: StateFiles | None = None, **request: Any) -> Any:
        """Return the child's answer to a call; start a new child if there is none."""
        self.require_open()
        if self._child is None:
            self._open()
            if self._latest is not None and call != "restore":
                self._answer("restore", self._patience.first_s, self._latest)
        return self._answer(call, timeout_s, state, **request)

    def _answer(self, call: str, timeout_s: float, state: StateFiles | None = None, **request: Any) -> Any:
        assert self._child is not None
        self._child.send({"call": call, **request})
        if state is not None:
            self._child.send_files(state.descriptors)
        return self._received(timeout_s)["answer"]

    def _open(self) -> dict[str, Any]:
        """Start a child, and wait until it has built its model."""
        self.children += 1
        self._child = Workers("autotune.engines.worker_main", self._opening, ranks=self._ranks)
        opened: dict[str, Any] = self._received(self._patience.opening_s)["answer"]
        return opened

    def _first_opened(self) -> dict[str, Any]:
        """Start the first child, once more if a signal ends it, which need not be due to the job."""
        try:
            try:
                return self._open()
            except WorkersError as error:
                if not error.killed:
                    raise
                logger.warning("%s: %s while the model was built; it is built again", self._job, error)
            return self._open()
        except WorkersError as error:
            raise JobError(f"the model could not be built ({error.failure}: {error})", where=self._job) from error

    def _received(self, timeout_s: float) -> dict[str, Any]:
        """Return the child's next document; end a child that sends none, because its state is unknown."""
        assert self._child is not None
        try:
            return self._child.answer(timeout_s)
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _patience_for(self, steps: int) -> float:
        predicted = None if self._predict is None else self._predict(self.plan)
        step_s = max(predicted or 0.0, self._slowest_s)
        if not step_s or not math.isfinite(step_s):
            return self._patience.first_s
        usual = self._patience.grace_s + self._patience.factor * steps * step_s
        return max(usual, self._patience.first_s) if self.plan.compiles else usual
