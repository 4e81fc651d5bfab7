"""Where the time of an attached run's steps goes, between two decisions.

Reading the clock never disturbs the run: after the first failure, nothing is measured any more.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

import torch
from torch import nn

from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.step_clock import Border, StepClock, seconds_of
from autotune.mechanics.step_trace import Phase
from autotune.step_parts import PARTS, StepParts, parts_of_ranks

# A pause between two steps that is so many times as long as the others, and longer than a step, is no wait for data but
# an evaluation, a checkpoint or the like.
_PAUSE = 10.0
# Of fewer steps it is not known what is usual.
_FEWEST = 5
# DistributedDataParallel reduces gradients in C++, and measures itself at every so many iterations.
_REDUCER_EVERY = 25
_Arguments = ParamSpec("_Arguments")


@dataclass(frozen=True, slots=True)
class _Timed:
    """One step.

    Attributes:
        borders: its borders, from the end of the step before it.
        samples: samples that it consumed.
        items: loss-bearing items; ``None`` if they are not counted.
    """

    borders: Sequence[Border]
    samples: int
    items: int | None


def _undisturbing(
    method: Callable[Concatenate[StepTimes, _Arguments], None],
) -> Callable[Concatenate[StepTimes, _Arguments], None]:
    """Make a method stop all measuring if it fails."""

    @functools.wraps(method)
    def safe(self: StepTimes, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        if self.broken:
            return
        try:
            method(self, *args, **kwargs)
        except any_error():
            self.broken = True

    return safe


class StepTimes:
    """Times of the steps of a run since the last decision.

    Args:
        device: the model's device.

    Attributes:
        broken: whether measuring has failed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = StepClock(device)
        self._steps: list[_Timed] = []
        self._watching = ExitStack()
        self._reducer: Any = None
        # Seconds of the reducer that nothing hid, in the iterations that it measured since the last decision.
        self._reduced: list[float] = []
        self._num_steps = 0
        self.broken = False

    @classmethod
    def none(cls) -> StepTimes:
        """Return times that are never taken."""
        found = cls(torch.device("cpu"))
        found.close()
        return found

    @_undisturbing
    def watch_collectives(self) -> None:
        """Count collectives that torch's Python functions run as communication, until :meth:`close`."""
        self._watching.enter_context(self._clock.timing_collectives())

    @_undisturbing
    def watch_reducer(self, model: nn.parallel.DistributedDataParallel) -> None:
        """Count what a model's own reducer measures of itself as communication."""
        model._set_ddp_runtime_logging_sample_rate(_REDUCER_EVERY)
        self._reducer = model

    def close(self) -> None:
        """Stop measuring."""
        self._reducer = None
        self._steps.clear()
        self.broken = True
        self._watching.close()

    @_undisturbing
    def begin(self) -> None:
        """Note that the caller has come with the first batch of a step: until now it waited for data."""
        if self._clock.part:
            self._clock.enter("control")
        else:
            self._clock.start("control")

    @_undisturbing
    def begun(self) -> None:
        """Note that the caller goes on with its step."""
        self._clock.enter("compute")

    @_undisturbing
    def come_back(self) -> None:
        """Note that the caller has come with another batch of the same step, for which it waited."""
        self._clock.rename("data")
        self._clock.enter("compute")

    @_undisturbing
    def control(self) -> None:
        """Note that the tuner works for itself."""
        self._clock.enter("control")

    @_undisturbing
    def phase(self, name: Phase) -> None:
        """Note that a pass of a micro-batch begins, or its update."""
        part = "update" if name == "update" else "compute"
        if self._clock.part != part:
            self._clock.enter(part)

    @_undisturbing
    def end(self, *, samples: int, items: int | None, ordinary: bool) -> None:
        """End a step; from now on, the caller waits for data.

        Args:
            samples: samples that the step consumed.
            items: loss-bearing items of the step; ``None`` if they are not counted.
            ordinary: whether its time is that of other steps, too.
        """
        borders = self._clock.stop()
        # The wait for the first batch of a run is not known.
        if ordinary and borders and borders[0][0] == "data":
            self._steps.append(_Timed(borders, samples, items))
        self._num_steps += 1
        if self._reducer is not None and self._num_steps % _REDUCER_EVERY == 0:
            seen = self._reducer._get_ddp_logging_data()
            # Nanoseconds of its last measured iteration.
            alone = seen.get("backward_comm_time", 0) - seen.get("backward_compute_comm_overlap_time", 0)
            self._reduced.append(max(alone, 0) / 1e9)
        self._clock.start("data")

    def abandon(self) -> None:
        """Discard a step that was not finished."""
        self._clock.stop()

    def take(self) -> StepParts | None:
        """Return the mean parts of the steps since the last ones that were returned.

        Returns:
            ``None`` if they are too few, in which case they count the next time, or if measuring failed.
        """
        found: list[StepParts | None] = []
        self._take_into(found)
        return found[0] if found else None

    @_undisturbing
    def _take_into(self, found: list[StepParts | None]) -> None:
        if len(self._steps) < _FEWEST:
            return
        steps, self._steps = self._steps, []
        timed = [(step, self._with_reducer(seconds_of(step.borders, self._device))) for step in steps]
        self._reduced = self._reduced[-1:]
        kept = [timed[number] for number in _without_pauses([seconds for _, seconds in timed])]
        whole = math.fsum(second for _, seconds in kept for second in seconds.values())
        if not whole:
            return
        items = [step.items for step, _ in kept]
        counted = [one for one in items if one is not None]
        found.append(
            parts_of_ranks(
                [[seconds for _, seconds in kept]],
                samples_per_s=sum(step.samples for step, _ in kept) / whole,
                items_per_s=sum(counted) / whole if len(counted) == len(items) else None,
            )
        )

    def _with_reducer(self, seconds: dict[str, float]) -> dict[str, float]:
        """Return the parts of a step with the reducer's time as communication: it is within the backward pass."""
        if not self._reduced:
            return seconds
        moved = min(statistics.fmean(self._reduced), seconds.get("compute", 0.0))
        communication = seconds.get("communication", 0.0) + moved
        return {**seconds, "compute": seconds.get("compute", 0.0) - moved, "communication": communication}


def _without_pauses(steps: Sequence[dict[str, float]]) -> list[int]:
    """Return the numbers of the steps before which the caller did nothing unusual."""
    waits = [step.get("data", 0.0) for step in steps]
    usual = statistics.median(math.fsum(step.values()) - step.get("data", 0.0) for step in steps)
    total = math.fsum(waits)
    others = [(total - wait) / (len(waits) - 1) for wait in waits]
    return [n for n, wait in enumerate(waits) if wait <= max(_PAUSE * others[n], usual)]


def as_values(parts: StepParts | None) -> list[float]:
    """Return the seconds of each part, in order; -1 if they are not known."""
    return [-1.0] * len(PARTS) if parts is None else list(parts.seconds().values())


def of_all_ranks(own: StepParts | None, ranks: Sequence[Sequence[float]]) -> StepParts | None:
    """Return the parts of steps that several ranks took together; ``None`` if one of them does not know its own.

    Args:
        own: those of this rank, with its rates, which are summed over the ranks as if all had the same.
        ranks: result of :func:`as_values` on each rank.
    """
    if own is None or any(min(values) < 0 for values in ranks):
        return None
    count = len(ranks)
    return parts_of_ranks(
        [[dict(zip(PARTS, values, strict=True))] for values in ranks],
        samples_per_s=None if own.samples_per_s is None else own.samples_per_s * count,
        items_per_s=None if own.items_per_s is None else own.items_per_s * count,
    )
