"""Train a job in a process of its own: what kills, hangs or garbles that process is a value of the window.

The child is the leader of its own process group, which is ended as a whole. The next window begins in a fresh child, at
the last snapshot that was taken or restored, or else where the job begins.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.engines.child import OPENING, SOCKET
from autotune.engines.deepspeed_config import STAGES
from autotune.engines.processes import (
    command,
    kills,
    last_words,
    members,
    python_path,
    rank_that_raised,
    remove_shared_memory,
    signal_name,
)
from autotune.engines.torch_engine import EngineOptions
from autotune.engines.wire import GarbledError, Wire
from autotune.errors import EngineError, InputError, JobError
from autotune.measurement import Failure, Measurement
from autotune.mechanics.devices import device_kind
from autotune.plan import Plan, PlanSpace

# Seconds between two looks at whether a child that has not called yet is still there.
_POLL_S = 0.2
Predict = Callable[[Plan], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Say how long a child may take before it counts as hanging.

    Attributes:
        opening_s: seconds in which it must have built its model.
        first_s: seconds for a window of whose plan nothing is known.
        factor: how many times as long as predicted, or as the slowest window so far, a window may take.
        grace_s: seconds on top of that.
    """

    opening_s: float = 300.0
    first_s: float = 600.0
    factor: float = 10.0
    grace_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """Ask for several processes that train one job together, through DeepSpeed.

    Attributes:
        count: how many.
        zero_stage: ZeRO stage, 0 to 3.
        config: a DeepSpeed configuration of the user's own; ``None`` for none.
    """

    count: int = 2
    zero_stage: int = 0
    config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise InputError(f"ranks is {self.count!r}", where="engine deepspeed", allowed="a whole number >= 1")
        if type(self.zero_stage) is not int or self.zero_stage not in STAGES:
            raise InputError(f"ZeRO stage is {self.zero_stage!r}", where="engine deepspeed", allowed=STAGES)


@dataclass(slots=True)
class _Child:
    """Hold a running child, or the ranks that stand for one."""

    process: subprocess.Popen[bytes]
    output: Path
    killed_before: int | None
    wire: Wire | None = None
    processes: tuple[int, ...] = ()


class IsolatedEngine:
    """Run a job's windows in a child process that may die.

    Args:
        job: the job's reference, as :func:`autotune.load_job` takes it; a job itself crosses no process border.
        seed: of weights, batches and everything random.
        device: where the model lives; ``None`` for where jobs train on this machine.
        options: how to measure.
        patience: how long a window may take.
        predict: returns the seconds of a step under a plan, if it is known.
        threads: torch's threads in the child; ``None`` for its default.
        ranks: how many processes train the job together; ``None`` for one, without DeepSpeed.

    Raises:
        JobError: if the job cannot be used, or takes the child down while it is built.
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
        self.memory_budget_bytes: int | None = None
        self._job = job
        self._opening = {
            "job": job,
            "seed": seed,
            "device": device or device_kind(1 if ranks is None else ranks.count),
            "options": asdict(options or EngineOptions()),
            "threads": threads,
            "ranks": None if ranks is None else asdict(ranks),
            "path": [entry for entry in sys.path if entry],
        }
        self._patience = patience or Patience()
        self._predict = predict
        self._slowest_s = 0.0
        self._ranks = ranks
        self._folder = Path(tempfile.mkdtemp(prefix="autotune-isolated-"))
        # Whoever forgets to close leaves nothing behind either.
        self._removed = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._snapshots = 0
        self._latest: Path | None = None
        self._closed = False
        self._child: _Child | None = None
        self.children = 0
        try:
            opened = self._open()
        except BaseException:
            self.close()
            raise
        self._space = PlanSpace.from_json(opened["space"])
        self.locks: dict[str, str] = opened["locks"]
        self._plan = self._space.baseline()

    @property
    def space(self) -> PlanSpace:
        """Return the plans that this job on this device allows."""
        return self._space

    @property
    def plan(self) -> Plan:
        """Return the plan of the next window."""
        return self._plan

    def apply(self, plan: Plan) -> None:
        """Make the next steps run under a plan.

        Raises:
            PlanError: if the plan lies outside the space; the former plan stays.
        """
        self._plan = self._space.check(plan)

    def run(self, steps: int) -> Measurement:
        """Run a window of optimizer steps; whatever becomes of the child is its failure.

        Raises:
            EngineError: if the engine was closed.
        """
        began = time.perf_counter()
        request = {"steps": steps, "plan": self._plan.to_json(), "memory_budget_bytes": self.memory_budget_bytes}
        try:
            answer = self._ask("run", self._patience_for(steps), **request)
        except _ChildError as error:
            spent = time.perf_counter() - began
            return Measurement.of_failure(error.failure, str(error), self.memory_budget_bytes, total_s=spent)
        found = Measurement.from_json(answer)
        if found.steps:
            self._slowest_s = max(self._slowest_s, found.total_s / found.steps)
        return found

    def evaluate(self) -> float:
        """Return the job's metric.

        Raises:
            EngineError: if the child does not survive it.
        """
        return float(self._told("evaluate"))

    def snapshot(self) -> Path:
        """Return the training state, as a file that lives as long as the engine does.

        Raises:
            EngineError: if the child does not survive it.
        """
        self._snapshots += 1
        path = self._folder / f"snapshot-{self._snapshots}.pt"
        self._told("snapshot", path=str(path))
        self._latest = path
        return path

    def restore(self, snapshot: Path) -> None:
        """Return to a snapshot of this engine.

        Raises:
            EngineError: if the child does not survive it.
        """
        self._told("restore", path=str(snapshot))
        self._latest = snapshot

    def close(self) -> None:
        """End the child and remove what it wrote."""
        self._closed = True
        self._end()
        self._removed()

    # The child.

    def _told(self, call: str, **request: Any) -> Any:
        try:
            return self._ask(call, self._patience.first_s, **request)
        except _ChildError as error:
            raise EngineError(f"{call}: {error}") from error

    def _ask(self, call: str, timeout_s: float, **request: Any) -> Any:
        """Return a child's answer to a call, a fresh child's if there is none."""
        if self._closed:
            raise EngineError("the engine is closed; create another one")
        if self._child is None:
            self._open()
            if self._latest is not None and call != "restore":
                self._answer("restore", self._patience.first_s, path=str(self._latest))
        return self._answer(call, timeout_s, **request)

    def _answer(self, call: str, timeout_s: float, **request: Any) -> Any:
        document = self._exchange({"call": call, **request}, timeout_s)
        if "answer" not in document:
            # After an exception that the engine does not make a value of, its state is unknown. Where another rank
            # raised first, what the first one met is only that it was gone.
            elsewhere = None if self._child is None else rank_that_raised(self._child.output)
            self._end()
            own = Failure(document.get("failure", Failure.CRASHED)), str(document.get("raised", "it cannot be read"))
            raise _ChildError(*(elsewhere or own))
        return document["answer"]

    def _open(self) -> dict[str, Any]:
        """Start a child and have it build its model."""
        self.children += 1
        output = self._folder / "output.txt"
        # What the child before had to say was read; a campaign may have thousands of them.
        output.unlink(missing_ok=True)
        count = None if self._ranks is None else self._ranks.count
        (self._folder / OPENING).write_text(json.dumps(self._opening))
        # A socket's path may have a hundred characters; the folder's own is short.
        with socket.socket(socket.AF_UNIX) as listening, output.open("wb") as sink:
            (self._folder / SOCKET).unlink(missing_ok=True)
            listening.bind(str(self._folder / SOCKET))
            listening.listen(1)
            process = subprocess.Popen(
                command("autotune.engines.child", self._folder, count),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": python_path()},
            )
            self._child = child = _Child(process, output, kills())
            try:
                child.wire = self._accept(listening, child)
                opened = self._answered(child, self._patience.opening_s)
            except _ChildError as error:
                raise JobError(f"building it ends with {error.failure}: {error}", where=self._job) from error
            except BaseException:
                self._end()
                raise
        if "space" not in opened:
            self._end()
            raise JobError("building it fails: the answer cannot be read", where=self._job)
        child.processes = tuple(opened["processes"])
        return opened

    def _accept(self, listening: socket.socket, child: _Child) -> Wire:
        """Wait until a child calls."""
        until = time.monotonic() + self._patience.opening_s
        listening.settimeout(_POLL_S)
        while True:
            try:
                return Wire(listening.accept()[0])
            except TimeoutError:
                if child.process.poll() is not None:
                    raise self._died(child) from None
                if time.monotonic() > until:
                    self._end()
                    raise _ChildError(Failure.TIMEOUT, f"no call within {self._patience.opening_s:.0f} s") from None

    def _exchange(self, document: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        child = self._child
        assert child is not None
        assert child.wire is not None
        with contextlib.suppress(OSError):
            # Of one that is gone, the answer says what became of it.
            child.wire.send(document)
        return self._answered(child, timeout_s)

    def _answered(self, child: _Child, timeout_s: float) -> dict[str, Any]:
        assert child.wire is not None
        try:
            found = child.wire.receive(timeout_s)
        except TimeoutError:
            self._end()
            raise _ChildError(Failure.TIMEOUT, f"no answer within {timeout_s:.0f} s") from None
        except GarbledError as error:
            self._end()
            raise _ChildError(Failure.CRASHED, str(error)) from None
        except (EOFError, OSError):
            raise self._died(child) from None
        if "input_error" in found:
            self._end()
            raise InputError.from_json(found["input_error"])
        return found

    def _died(self, child: _Child) -> _ChildError:
        """Return what a child died of, and forget it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            # It closed its end: its exit status follows, or it is ended.
            child.process.wait(5.0)
        code = child.process.poll()
        self._end()
        killed = kills()
        if code == -signal.SIGKILL and None not in (killed, child.killed_before) and killed != child.killed_before:
            return _ChildError(Failure.OUT_OF_MEMORY, "the system ended it for want of memory")
        raised = rank_that_raised(child.output)
        if raised is not None:
            return _ChildError(*raised)
        said = last_words(child.output)
        if code is not None and code < 0:
            return _ChildError(Failure.CRASHED, f"ended by {signal_name(-code)}{said}")
        how = "closed its connection" if code is None else f"ended with exit code {code}"
        return _ChildError(Failure.CRASHED, f"{how}{said}")

    def _end(self) -> None:
        """End the child and everything that it started."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.wire is not None:
            child.wire.close()
        group = {*members(child.process.pid), *child.processes}
        # The group outlives its leader where the job started processes of its own; ranks lead groups of their own.
        for leader in {child.process.pid, *child.processes}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, signal.SIGKILL)
        child.process.wait()
        remove_shared_memory(group)

    def _patience_for(self, steps: int) -> float:
        predicted = None if self._predict is None else self._predict(self._plan)
        step_s = max(predicted or 0.0, self._slowest_s)
        if not step_s or not math.isfinite(step_s):
            return self._patience.first_s
        return self._patience.grace_s + self._patience.factor * steps * step_s


class _ChildError(Exception):
    """Say what became of a child.

    Args:
        failure: its class.
        detail: one line about it.
    """

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(" ".join(detail.split()))
        self.failure = failure
