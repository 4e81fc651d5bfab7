"""The cost of each arm: time, memory, energy with its source, and carbon."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.cost_model.carbon import Intensity


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmCost:
    """The cost of an arm of a comparison.

    Attributes:
        arm: name of the arm.
        to_target_s: mean training seconds to the target, over the runs that reached it; ``None`` if none did. Without a
            target, those of a whole run.
        sample_s: mean training seconds per sample of a whole run; ``None`` if a run failed.
        train_s: mean training seconds of a whole run.
        tuning_s: seconds spent on finding the arm's plan.
        tuning_steps: real steps spent on finding the arm's plan.
        peak_bytes: highest memory peak of any run; ``None`` if none was measured.
        energy_j: mean energy of a whole run; ``None`` unless it is known for every seed.
        energy_source: where the energy values come from, or ``absent``.
        carbon_g: mean emissions of a whole run in grams of CO2 equivalent; ``None`` unless known for every seed.
    """

    arm: str
    to_target_s: float | None
    sample_s: float | None
    train_s: float
    tuning_s: float
    tuning_steps: int
    peak_bytes: int | None
    energy_j: float | None
    energy_source: str
    carbon_g: float | None


def arm_costs(comparison: Mapping[str, Any], intensity: Intensity | None = None) -> list[ArmCost]:
    """Return the cost of each arm of ``comparison.json``.

    Args:
        comparison: the document.
        intensity: the grid's carbon intensity; ``None`` for the grams recorded in the comparison, if any.
    """
    return [_arm_cost(arm, intensity) for arm in comparison["arms"]]


def _arm_cost(arm: Mapping[str, Any], intensity: Intensity | None) -> ArmCost:
    runs = arm["runs"]
    arrived = reached_times(arm)
    energy, source = energy_of(runs)
    return ArmCost(
        arm=arm["name"],
        to_target_s=statistics.fmean(arrived) if arrived else None,
        sample_s=whole_mean([_per_sample(run) for run in runs]),
        train_s=statistics.fmean(run["curve"][-1][0] if run["curve"] else 0.0 for run in runs),
        tuning_s=arm["tuning_s"],
        tuning_steps=arm["tuning_steps"],
        peak_bytes=peak_of(arm),
        energy_j=energy,
        energy_source=source,
        carbon_g=whole_mean([_grams(run, intensity) for run in runs]),
    )


def has_target(comparison: Mapping[str, Any]) -> bool:
    """Return whether the arms' times are those to a target; otherwise they are those of whole runs."""
    return comparison["metric"]["target"] is not None


def reached_times(arm: Mapping[str, Any]) -> list[float]:
    """Return the seconds to the target of the runs that reached it; without a target, those of whole runs."""
    return [run["time_to_target_s"] for run in arm["runs"] if run["reached"]]


def _per_sample(run: Mapping[str, Any]) -> float | None:
    return run["curve"][-1][0] / run["samples"] if run["curve"] and run["samples"] and not run["failure"] else None


def peak_of(arm: Mapping[str, Any]) -> int | None:
    """Return the highest memory peak of any run of an arm in bytes; ``None`` if none was measured."""
    return max((run["peak_bytes"] for run in arm["runs"] if run["peak_bytes"]), default=None)


def energy_of(records: Sequence[Mapping[str, Any]]) -> tuple[float | None, str]:
    """Return the mean energy of runs or windows in J, and its source; ``None`` and ``absent`` if a value is missing."""
    mean = whole_mean([record["energy_j"] for record in records])
    if mean is None:
        return None, "absent"
    return mean, ", ".join(sorted({record["energy_source"] for record in records}))


def _grams(run: Mapping[str, Any], intensity: Intensity | None) -> float | None:
    grams: float | None = run.get("grams")
    if intensity is None or run["energy_j"] is None:
        return grams
    return intensity.grams(run["energy_j"], *run.get("ran_s", (0.0, 0.0)))


def whole_mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; ``None`` if a value is missing, because the mean of the others would be misleading."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None
