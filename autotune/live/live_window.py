"""Collect what a live run's steps came to between two decisions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from autotune.live.attached import Step
from autotune.measurement import GradientStatistics, Measurement


@dataclass(frozen=True, slots=True)
class Ran:
    """Set what steps took against what was predicted of the plans that they ran under, as if batches were alike.

    Attributes:
        seconds: median seconds of a step.
        predicted: median of what was predicted.
    """

    seconds: float
    predicted: float


@dataclass(slots=True)
class Window:
    """Collect steps.

    Attributes:
        steps: how many.
        samples: samples consumed.
        seconds: of all of them.
        skipped: steps that did not reach the weights.
        sizes: bytes of their batches.
        losses: weighed losses of their micro-batches, still on the device.
        timed: of ordinary steps under the decided plan, seconds as if their batch had the profiled size.
        compared: of all ordinary steps the same, and what was predicted of the plan that each ran under.
    """

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    skipped: int = 0
    sizes: list[int] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    timed: list[float] = field(default_factory=list)
    compared: list[tuple[float, float]] = field(default_factory=list)

    def take(self, step: Step) -> None:
        """Take in a step."""
        self.steps += 1
        self.samples += step.samples
        self.seconds += step.seconds
        self.skipped += not step.stepped
        self.sizes.append(step.batch_bytes)
        self.losses += step.losses

    def compare(self, seconds: float, predicted_s: float, *, decided: bool) -> None:
        """Take in how long an ordinary step took.

        Args:
            seconds: of the step, as if its batch had the profiled size.
            predicted_s: what was predicted of its plan at that size.
            decided: whether that is the plan which was decided on.
        """
        self.compared.append((seconds, predicted_s))
        if decided:
            self.timed.append(seconds)

    @property
    def largest_bytes(self) -> int:
        """Return the size of the largest batch; 0 without any."""
        return max(self.sizes, default=0)

    def ran(self) -> Ran | None:
        """Return what ordinary steps took and should have; ``None`` without any."""
        if not self.compared:
            return None
        return Ran(
            statistics.median(seconds for seconds, _ in self.compared),
            statistics.median(told for _, told in self.compared),
        )

    def loss_values(self) -> Sequence[float]:
        """Return the losses, read from the device."""
        return torch.stack([loss.float() for loss in self.losses]).tolist() if self.losses else []

    def measurement(
        self,
        losses: Sequence[float],
        *,
        peak_bytes: int | None,
        memory_budget_bytes: int | None,
        gradient: GradientStatistics | None,
        learning_rate: float,
    ) -> Measurement:
        """Return the window as policies see one.

        Args:
            losses: what :meth:`loss_values` returned.
            peak_bytes: measured peak, if there is one.
            memory_budget_bytes: the budget of the moment.
            gradient: the gradient's statistics, if they are sampled.
            learning_rate: of the first group of parameters.
        """
        finite = [loss for loss in losses if math.isfinite(loss)]
        own = self.timed
        return Measurement(
            steps=self.steps,
            samples=self.samples,
            items=self.samples,
            total_s=self.seconds,
            step_s=tuple(own),
            seconds_per_step=statistics.median(own) if own else None,
            samples_per_step=self.samples / self.steps if own else None,
            batch_bytes=(statistics.fmean(self.sizes), float(self.largest_bytes)) if self.sizes else None,
            peak_bytes=peak_bytes,
            memory_budget_bytes=memory_budget_bytes,
            loss=sum(finite) / self.steps if finite and self.steps else None,
            gradient=gradient,
            learning_rate=learning_rate,
            skipped_steps=self.skipped,
        )
