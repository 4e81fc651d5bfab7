"""Clocks of the parts of a step: they read the time at borders and never wait for a device.

On an accelerator, a border is an event in the stream that computes, so that parts are times of the device: while it
waits for a batch or for a collective, that part grows. Elsewhere, and on devices without events, a border is a reading
of the host's clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from autotune.mechanics import devices
from autotune.mechanics.collectives import CollectiveClock

# A part of a step with the border where it begins; the last one has no name.
Border = tuple[str, Any]


class StepClock:
    """Clock of one step after another.

    Args:
        device: the device on which steps compute.
    """

    def __init__(self, device: devices.AnyDevice) -> None:
        self._device = device
        self._read: Callable[[], Any] = devices.border_for(device)
        self._borders: list[Border] = []

    def start(self, part: str) -> None:
        """Begin a step with a part."""
        self._borders = [(part, self._read())]

    def enter(self, part: str) -> None:
        """End the running part, and begin another one of the same step; nothing happens outside of a step."""
        if self._borders:
            self._borders.append((part, self._read()))

    def rename(self, part: str) -> None:
        """Give the running part another name."""
        if self._borders:
            self._borders[-1] = (part, self._borders[-1][1])

    @property
    def part(self) -> str:
        """Return the running part; empty outside of a step."""
        return self._borders[-1][0] if self._borders else ""

    def stop(self) -> Sequence[Border]:
        """End the step, and return its borders for :func:`seconds_of`."""
        self.enter("")
        borders, self._borders = self._borders, []
        return borders

    @contextmanager
    def timing_collectives(self, *, of_layers: bool = False) -> Iterator[None]:
        """Count the body's time in collectives as ``communication``, not as the part in which they run.

        Args:
            of_layers: whether collectives within divided layers count, too, which then wait for their tensors.
        """
        with _Communication(self).running(of_layers=of_layers):
            yield


class _Communication(CollectiveClock):
    """Clock of collectives that makes them a part of the running step."""

    def __init__(self, clock: StepClock) -> None:
        super().__init__()
        self._clock = clock
        self._outer = ""

    def entered(self) -> None:
        self._outer = self._clock.part
        self._clock.enter("communication")

    def left(self) -> None:
        if self._outer:
            self._clock.enter(self._outer)


def seconds_of(borders: Sequence[Border], device: devices.AnyDevice) -> dict[str, float]:
    """Return the seconds of each part of a step.

    Args:
        borders: result of :meth:`StepClock.stop`. An accelerator is waited for unless it has finished the step.
        device: the device of the clock.
    """
    at = devices.seconds_between([border for _, border in borders], device)
    found: dict[str, float] = {}
    for (part, _), begins, ends in zip(borders, at, at[1:], strict=False):
        found[part] = found.get(part, 0.0) + max(ends - begins, 0.0)
    return found


def completed(parts: dict[str, float], step_s: float) -> dict[str, float]:
    """Return the parts of a step so that they sum to its time on the host's clock.

    What a device's own clock did not see, such as its start and the wait for its end, is added to ``control``; parts
    that sum to more are scaled.

    Args:
        parts: seconds by part.
        step_s: seconds of the step on the host's clock.
    """
    known = math.fsum(parts.values())
    if known > step_s:
        return {part: seconds * step_s / known for part, seconds in parts.items()}
    return {**parts, "control": parts.get("control", 0.0) + step_s - known}
