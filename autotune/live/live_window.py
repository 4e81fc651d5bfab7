"""The steps of a live run between two decisions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autotune.live.attached import Step
from autotune.measurement import GradientStatistics, Measurement
from autotune.step_parts import StepParts


@dataclass(frozen=True, slots=True)
class Ran:
    """Measured and predicted time of steps, scaled to batches of the profiled size.

    Attributes:
        seconds: median seconds of a step.
        predicted: median of the predicted seconds of the plans that they ran under.
    """

    seconds: float
    predicted: float


@dataclass(slots=True)
class Window:
    """Totals and figures of the steps of a window.

    Attributes:
        steps: number of steps.
        samples: number of samples consumed.
        seconds: seconds of all steps.
        skipped: number of steps without an update.
        sizes: bytes of each batch.
        losses: weighted losses of the micro-batches, still on the device.
        timed: seconds of each ordinary step under the decided plan, scaled to the profiled batch size.
        compared: scaled and predicted seconds of each ordinary step, under any plan.
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
        """Add a step."""
        self.steps += 1
        self.samples += step.samples
        self.seconds += step.seconds
        self.skipped += not step.stepped
        self.sizes.append(step.batch_bytes)
        self.losses += step.losses

    def compare(self, seconds: float, predicted_s: float, *, decided: bool) -> None:
        """Add the time of an ordinary step.

        Args:
            seconds: seconds of the step, scaled to the profiled batch size.
            predicted_s: predicted seconds of its plan at that size.
            decided: whether it ran under the decided plan.
        """
        self.compared.append((seconds, predicted_s))
        if decided:
            self.timed.append(seconds)

    @property
    def largest_bytes(self) -> int:
        """Return the size of the largest batch; 0 without any."""
        return max(self.sizes, default=0)

    def ran(self) -> Ran | None:
        """Return the measured and predicted time of ordinary steps; ``None`` without any."""
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
        parts: StepParts | None = None,
    ) -> Measurement:
        """Return the window as policies see it.

        Args:
            losses: values of :meth:`loss_values`.
            peak_bytes: measured peak; ``None`` if it was not measured.
            memory_budget_bytes: the current budget; ``None`` for none.
            gradient: statistics of the gradient; ``None`` if none were sampled.
            learning_rate: learning rate of the first group of parameters.
            parts: where the time of its steps went; ``None`` if unknown.
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
            parts=parts,
        )


def figures_of(window: Measurement) -> dict[str, Any]:
    """Return a window's figures for the decision log."""
    return {
        "seconds_per_step": window.seconds_per_step,
        "peak_bytes": window.peak_bytes,
        "loss": window.loss,
        "noise_scale": None if window.gradient is None else window.gradient.noise_scale,
        "memory_budget_bytes": window.memory_budget_bytes,
        "skipped_steps": window.skipped_steps,
        "steps": window.steps,
        "total_s": window.total_s,
        "parts": None if window.parts is None else window.parts.to_json(),
    }
