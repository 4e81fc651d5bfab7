"""The measured plans of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.measurement import Measurement
from autotune.plan import Plan
from autotune.records.tracking import Tracker


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One measured plan of a search.

    Attributes:
        number: number of the trial, from 0 in the order of measurement.
        plan: the plan.
        measurement: the plan's window.
        cost: the plan's cost relative to the baseline; lower is better.
        final: whether the window belongs to the finals.
        tuning_steps: real steps that the method had spent after this trial, including references and profile.
        tuning_s: seconds that the method had spent after this trial.
    """

    number: int
    plan: Plan
    measurement: Measurement
    cost: float
    final: bool
    tuning_steps: int
    tuning_s: float

    def to_json(self) -> dict[str, Any]:
        """Return the trial as a JSON object."""
        return {
            "number": self.number,
            "plan": self.plan.to_json(),
            "measurement": self.measurement.to_json(),
            "cost": self.cost,
            "final": self.final,
            "tuning_steps": self.tuning_steps,
            "tuning_s": self.tuning_s,
        }


def track(tracker: Tracker, method: str, trial: Trial) -> None:
    """Log a trial, unless it is already logged.

    Args:
        tracker: the tracker.
        method: the method that measured the trial, with the launch options of the job.
        trial: the trial.
    """
    window = trial.measurement
    name = f"{method} trial {trial.number}"
    if tracker.knows(name):
        return
    key = tracker.begin(name)
    tracker.params(
        {
            "method": method,
            "accumulation_steps": trial.plan.accumulation_steps,
            **{f"precision.{unit}": choice for unit, choice in trial.plan.precision.items()},
            **{f"storage.{unit}": choice for unit, choice in trial.plan.storage.items()},
        },
        run=key,
    )
    gradient = window.gradient
    tracker.metrics(
        {
            "cost": trial.cost,
            "seconds_per_step": window.seconds_per_step,
            "peak_bytes": window.peak_bytes,
            "loss": window.loss,
            **({} if window.parts is None else window.parts.metrics()),
            "gradient_norm": None if gradient is None else gradient.norm,
            "noise_scale": None if gradient is None else gradient.noise_scale,
        },
        step=trial.number,
        run=key,
    )
    if window.failure is not None:
        tracker.tags({"failure": window.failure}, run=key)
    tracker.end(key, failed=window.failure is not None)
    tracker.settle()
