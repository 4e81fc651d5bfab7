"""Windows of plans, alternating with the baseline, and their results."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from autotune.bench.harness import alternating
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Profile
from autotune.cost_model.time_model import seconds_per_step
from autotune.engines.torch_engine import TorchEngine
from autotune.measurement import Measurement
from autotune.plan import Plan

# The first step is metered and not timed, the other three are timed.
_STEPS = 4


class PlanWindows:
    """Windows of an engine under several plans: the first of each chooses among plans, the others are reported.

    Args:
        engine: the engine that trains the job.
        plans: the plans.
        computed: makes the context of the plans' windows, but not of the baseline's.
    """

    def __init__(
        self,
        engine: TorchEngine,
        plans: Sequence[Plan],
        computed: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._engine = engine
        self._computed = computed
        self._rounds = 0
        self._baseline: list[Measurement] = []
        self._windows: dict[Plan, list[Measurement]] = {plan: [] for plan in plans}

    @property
    def plans(self) -> list[Plan]:
        """Return the plans."""
        return list(self._windows)

    def measure(self) -> None:
        """Measure the baseline and every plan once, in alternating direction."""
        turns: list[Plan | None] = [None, *self._windows]
        for plan in alternating(turns, self._rounds):
            if plan is None:
                self._baseline.append(self._window(self._engine.space.baseline()))
            else:
                with self._computed():
                    self._windows[plan].append(self._window(plan))
        self._rounds += 1

    def _window(self, plan: Plan) -> Measurement:
        self._engine.apply(plan)
        return self._engine.run(_STEPS)

    def reference(self) -> dict[str, Any]:
        """Return the speed and peak of the baseline."""
        return {
            "seconds_per_sample": _per_sample(self._baseline[1:]),
            "peak_bytes": _peak(self._baseline),
            "failure": _failure(self._baseline),
        }

    def plan(self, plan: Plan, seen: Profile) -> dict[str, Any]:
        """Return the speed and peak of a plan, as measured and as predicted from a profile."""
        return {
            "plan": plan.to_json(),
            "seconds_per_step": self.seconds(plan),
            "predicted_seconds_per_step": seconds_per_step(seen, plan),
            "peak_bytes": self.peak(plan),
            "predicted_peak_bytes": peak_bytes(seen, plan),
            "failure": self.failure(plan),
        }

    def seconds(self, plan: Plan) -> float | None:
        """Return the median seconds of a plan's steps, without the first round; ``None`` if it failed."""
        return _seconds(self._windows[plan][1:])

    def rounds_s(self, plan: Plan) -> list[float]:
        """Return the median seconds of a plan's steps in each round but the first; none of rounds that failed."""
        return [seconds for window in self._windows[plan][1:] if (seconds := _seconds([window])) is not None]

    def first_s(self, plan: Plan) -> float:
        """Return the seconds of a plan's first window, in which units are compiled."""
        return self._windows[plan][0].total_s

    def peak(self, plan: Plan) -> int | None:
        """Return the highest peak of a plan's steps in bytes; ``None`` if it is unknown."""
        return _peak(self._windows[plan])

    def failure(self, plan: Plan) -> str | None:
        """Return how a plan's first failed window ended; ``None`` if none failed."""
        return _failure(self._windows[plan])

    def within(self, budget: int, plans: Sequence[Plan]) -> dict[str, Any]:
        """Return which of several plans is chosen within a budget, and its speed-up."""
        if not plans:
            return {"plan": None, "fits": False, "speedup": None}

        def first_round(plan: Plan) -> tuple[bool, float]:
            peak, seconds = _peak(self._windows[plan]), _per_sample(self._windows[plan][:1])
            return (peak is None or peak > budget), float("inf") if seconds is None else seconds

        plan = min(plans, key=first_round)
        peak, seconds = _peak(self._windows[plan]), _per_sample(self._windows[plan][1:])
        reference = _per_sample(self._baseline[1:])
        return {
            "plan": self.plans.index(plan),
            "fits": peak is not None and peak <= budget and _failure(self._windows[plan]) is None,
            "speedup": None if seconds is None or reference is None else reference / seconds,
        }


def _seconds(windows: Sequence[Measurement]) -> float | None:
    """Return the median seconds per step; ``None`` if a window failed, or if there is none."""
    if any(window.failure is not None for window in windows):
        return None
    seconds = [second for window in windows for second in window.step_s]
    return statistics.median(seconds) if seconds else None


def _per_sample(windows: Sequence[Measurement]) -> float | None:
    """Return the median seconds per sample; under adaptive batching a step takes k batches."""
    seconds = _seconds(windows)
    return None if seconds is None or not windows[0].samples_per_step else seconds / windows[0].samples_per_step


def _peak(windows: Sequence[Measurement]) -> int | None:
    return max((window.peak_bytes for window in windows if window.peak_bytes is not None), default=None)


def _failure(windows: Sequence[Measurement]) -> str | None:
    return next((f"{one.failure}: {one.failure_detail}" for one in windows if one.failure is not None), None)
