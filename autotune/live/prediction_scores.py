"""Predicted and measured peaks: a tuner whose predictions are too low may not switch plans."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.cost_model.solver import SAFETY_MARGIN
from autotune.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A peak that was predicted before a step.

    Attributes:
        plan: The plan.
        largest_bytes: Bytes of the largest batch that the prediction is valid for.
        peak_bytes: The peak.
        static_bytes: The static part of the peak.
    """

    plan: Plan
    largest_bytes: int
    peak_bytes: float
    static_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The predicted and the measured peak of a step.

    Attributes:
        predicted_bytes: Predicted before the step.
        measured_bytes: Measured in the step.
    """

    predicted_bytes: int
    measured_bytes: int

    @property
    def short_frac(self) -> float:
        """The share by which the prediction was too low; negative if it was not."""
        return self.measured_bytes / self.predicted_bytes - 1

    @property
    def is_short(self) -> bool:
        """Whether the prediction was too low by more than the reserve that plans leave."""
        return self.short_frac > SAFETY_MARGIN
