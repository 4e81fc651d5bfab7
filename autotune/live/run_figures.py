"""The figures that a tuner reports of its run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from autotune.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """The figures of a run that ``tuner.status`` shows; the defaults are those of a run before its first step.

    Attributes:
        steps: optimizer steps since the tuner was attached.
        total_steps: length of the run; ``None`` if it is not known.
        run_s: seconds of the run so far.
        stage: the tuner's stage.
        acting: whether plans may be switched.
        plan: the applied plan.
        decided: the plan that was decided, which single batches and budgets may change.
        switches: number of decided switches.
        placed: number of times that the applied plan has changed, for any reason.
        trips: step and reason of each trip.
        over_budget_steps: steps that ran with no plan known to fit, or whose measured peak exceeded the budget.
        memory_budget_bytes: the budget; ``None`` without one.
        predicted_peak_bytes: predicted peak of the applied plan; ``None`` before there is a profile.
        measured_peak_bytes: the last measured peak; ``None`` before the first.
        pressure: the predicted peak divided by the budget; ``None`` unless both are known.
        predicted_s: predicted seconds per step of the last window; ``None`` before the first.
        measured_s: measured seconds per step of that window.
        noise_scale: simple noise scale in samples; ``None`` while unknown.
        overhead_frac: the tuner's own share of the run's time.
        parts: where the time of the last window's steps went; ``None`` if it is not known.
        advice: the advice that was given; ``None`` if none was.
    """

    steps: int = 0
    total_steps: int | None
    run_s: float = 0.0
    stage: str
    acting: bool = False
    plan: Plan
    decided: Plan
    switches: int = 0
    placed: int = 0
    trips: list[tuple[int, str]]
    over_budget_steps: int = 0
    memory_budget_bytes: int | None = None
    predicted_peak_bytes: float | None = None
    measured_peak_bytes: float | None = None
    pressure: float | None = None
    predicted_s: float | None = None
    measured_s: float | None = None
    noise_scale: float | None = None
    overhead_frac: float = 0.0
    parts: dict[str, Any] | None = None
    advice: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}
