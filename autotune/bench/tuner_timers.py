"""Timers of the parts of a step with a live tuner, for benchmarks.

The tuner's methods are wrapped only while a benchmark runs; a user's run has no timers. Each second is charged to the
innermost part, so that the parts sum to the step.
"""

from __future__ import annotations

import functools
import gc
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autotune.bench.attached_arms import Arm
from autotune.live import tuner
from autotune.live.controller import Controller
from autotune.live.deciding import Decider
from autotune.live.decision_log import DecisionLog
from autotune.live.decisions import Decisions
from autotune.live.live_knowledge import Knowledge
from autotune.live.live_profiler import LiveProfiler
from autotune.live.memory_budget import BudgetReader
from autotune.live.probe_results import ProbeResults
from autotune.live.running_step import RunningStep
from autotune.live.step_plans import StepPlans
from autotune.live.tripwires import Wires
from autotune.live.tuner import LiveTuner
from autotune.mechanics import cutting, devices
from autotune.mechanics.controls import Switcher
from autotune.mechanics.gradient_stats import GradientMonitor, GradientProbe
from autotune.mechanics.step_trace import StepWatch
from autotune.mechanics.stepping import Update
from autotune.profiling import recompute_probe
from autotune.profiling.step_peaks import StepPeaks
from autotune.profiling.unit_calls import UnitCalls

LOOP, SHADOW, COLLECTION = "the loop itself", "shadow passes", "garbage collection"
FORWARD, BACKWARD, NORM, OPTIMIZER = "forward", "backward", "norm and clipping", "optimizer and clearing"
STATISTICS, DECISION, TRACING, PROBE = "gradient statistics", "decision", "tracing and timing", "probe of units"

# The functions timed as each part: objects, and the names of their functions.
PARTS: Mapping[str, tuple[tuple[Any, tuple[str, ...]], ...]] = {
    "beginning a step": ((LiveTuner, ("_begin",)), (tuner, ("reason_to_stop",))),
    "size of the batch": ((RunningStep, ("add",)),),
    "signature": ((tuner, ("signature_of",)),),
    "reading the budget": ((BudgetReader, ("read", "read_device")),),
    "choosing the placement": (
        (StepPlans, ("_plan_ahead", "_placed_plan", "_is_news", "of_several")),
        (LiveProfiler, ("plan_for", "also_watch")),
    ),
    "switching plans": ((Switcher, ("apply",)),),
    "counting calls": (
        (UnitCalls, ("begin_step", "begin_pass", "end_step")),
        (Controller, ("_begin_to_count",)),
        (Switcher, ("barred",)),
    ),
    STATISTICS: (
        (GradientProbe, ("__init__", "__enter__", "__exit__", "next_micro_batch", "read")),
        (GradientMonitor, ("observe", "aged")),
    ),
    "memory peaks": ((StepPeaks, ("begin", "end", "take")),),
    "log": ((DecisionLog, ("write",)),),
    DECISION: ((Decisions, ("_meet",)),),
    "policy": ((Decider, ("ask",)),),
    "profile": ((Decisions, ("_take_profile",)), (Knowledge, ("profile",))),
    TRACING: ((LiveProfiler, ("begin", "phase", "end")), (StepWatch, ("_see", "_go"))),
    PROBE: ((recompute_probe, ("storage_lock",)), (ProbeResults, ("read",))),
    SHADOW: ((Controller, ("take_shadows",)),),
    "bookkeeping": (
        (Controller, ("before_step", "before_update", "after_step", "tell_phase")),
        (Decisions, ("note_step",)),
        (Wires, ("after_step",)),
    ),
    "ending a step": ((LiveTuner, ("_end", "_watch_over")),),
    "device synchronisation": ((devices, ("synchronize",)),),
    # An unattached step has these parts as well.
    "cutting the batch": ((tuner, ("cut",)), (cutting, ("split",))),
    BACKWARD: ((torch.Tensor, ("backward",)),),
    NORM: ((Update, ("unscale", "clip", "average")), (nn.utils, ("clip_grad_norm_",))),
    OPTIMIZER: ((Update, ("finish",)), (Arm, ("update",))),
}
# Number of empty parts entered to measure a timer's own time.
_EMPTY = 2000


@dataclass(slots=True)
class Spent:
    """Time that a step spent in one part.

    Attributes:
        wall: wall-clock seconds, without inner parts.
        cpu: CPU seconds, without inner parts.
        entries: number of times that the part was entered.
        within: number of parts entered from it.
    """

    wall: float = 0.0
    cpu: float = 0.0
    entries: int = 0
    within: int = 0


@dataclass(slots=True)
class PartTimers:
    """Timers that attribute the seconds of each step to parts.

    Attributes:
        spent: time of the running step by part.
        beside: returns whether a shadow pass is running; all timed functions then count as shadow passes.
    """

    spent: dict[str, Spent] = field(default_factory=dict)
    beside: Callable[[], bool] = lambda: False
    _stack: list[Spent] = field(default_factory=list)
    _wall: float = 0.0
    _cpu: float = 0.0
    _thread: int = field(default_factory=threading.get_ident)
    # Wall-clock and CPU seconds that a timer adds to its own part, and to the part around it.
    _inside: tuple[float, float] = (0.0, 0.0)
    _outside: tuple[float, float] = (0.0, 0.0)

    def enter(self, part: str) -> None:
        """Enter a part."""
        if self._stack:
            self._charge()
            self._stack[-1].within += 1
        found = self.spent.get(part)
        if found is None:
            found = self.spent[part] = Spent()
        found.entries += 1
        self._stack.append(found)
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def leave(self) -> None:
        """Leave the part that was entered last."""
        self._charge()
        self._stack.pop()
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def _charge(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        part = self._stack[-1]
        part.wall += wall - self._wall
        part.cpu += cpu - self._cpu

    def step(self, body: Callable[[], Any]) -> tuple[Any, dict[str, Spent]]:
        """Run a step; return its result and its time by part, without the timers' own time."""
        self.spent = {}
        self.enter(LOOP)
        try:
            result = body()
        finally:
            self.leave()
        for one in self.spent.values():
            one.wall -= one.entries * self._inside[0] + one.within * self._outside[0]
            one.cpu -= one.entries * self._inside[1] + one.within * self._outside[1]
        return result, self.spent

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is timed as a part, except in other threads and outside of steps."""

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            if not self._stack or threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self.enter(SHADOW if self.beside() else part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return inside

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Run the body with timers on every part."""
        self._weigh()
        with ExitStack() as stack:
            for part, targets in PARTS.items():
                for owner, names in targets:
                    for name in names:
                        self._replace(stack, owner, name, self.timed(part, vars(owner)[name]))
            note = GradientProbe._note
            self._replace(
                stack,
                GradientProbe,
                "_note",
                lambda probe, index: self.timed(STATISTICS, note(probe, index)),
            )
            gc.callbacks.append(self._collecting)
            stack.callback(gc.callbacks.remove, self._collecting)
            yield

    def _replace(self, stack: ExitStack, owner: Any, name: str, value: Any) -> None:
        stack.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, value)

    def _collecting(self, phase: str, _: Any) -> None:
        if self._stack and threading.get_ident() == self._thread:
            if phase == "start":
                self.enter(COLLECTION)
            else:
                self.leave()

    def _weigh(self) -> None:
        """Measure a timer's own time."""
        empty = self.timed("empty", lambda: None)
        self._inside = self._outside = (0.0, 0.0)
        inner, outer = [], []
        for _ in range(_EMPTY):
            _, spent = self.step(empty)
            inner.append((spent["empty"].wall, spent["empty"].cpu))
            outer.append((spent[LOOP].wall, spent[LOOP].cpu))
        _, alone = self.step(lambda: None)
        _, alone = self.step(lambda: None)
        self._inside = _medians(inner)
        around = _medians(outer)
        self._outside = around[0] - alone[LOOP].wall, around[1] - alone[LOOP].cpu


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(wall for wall, _ in pairs), statistics.median(cpu for _, cpu in pairs)


def summed(steps: Iterable[Mapping[str, Spent]], clock: str) -> Counter[str]:
    """Return the total seconds of several steps by part.

    Args:
        steps: time by part of each step, from :meth:`PartTimers.step`.
        clock: ``wall`` or ``cpu``.
    """
    total: Counter[str] = Counter()
    for spent in steps:
        for part, one in spent.items():
            total[part] += getattr(one, clock)
    return total
