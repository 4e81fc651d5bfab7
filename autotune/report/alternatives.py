"""Predicted effects of the choices that a plan did not make, which explain its own choices in numbers."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.budget import format_bytes
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Profile
from autotune.cost_model.time_model import seconds_per_step
from autotune.errors import ProfileError
from autotune.plan import Plan
from autotune.report.pareto import predicted
from autotune.report.wording import changed_milliseconds
from autotune.units import Unit

# Largest number of units whose other choices are predicted; each unit takes several predictions.
_MOST_UNITS = 120


def other_choices(profile: Profile, plan: Plan, budget_bytes: int | None) -> dict[str, str]:
    """Return how each other k, and each other choice for a unit, would change time and peak; empty if unknown.

    Args:
        profile: the profile.
        plan: the plan.
        budget_bytes: the budget; ``None`` without one.

    Returns:
        The text by unit, and by ``accumulation_steps`` for k.
    """
    try:
        units = other_units(profile, plan, budget_bytes)
    except ProfileError:
        return {}
    return {"accumulation_steps": other_steps(profile, plan, budget_bytes), **units}


def other_units(profile: Profile, plan: Plan, budget_bytes: int | None) -> dict[str, str]:
    """Return by unit (the first ``_MOST_UNITS``) how each other choice for it would change time per step and peak.

    Args:
        profile: the profile.
        plan: a plan that the profile can predict.
        budget_bytes: the budget; ``None`` without one.

    Raises:
        ProfileError: if the profile cannot predict the plan.
    """
    texts = {}
    own_s, own_bytes = seconds_per_step(profile, plan), peak_bytes(profile, plan)
    for unit in profile.units[:_MOST_UNITS]:
        said = []
        for name, other in _others(profile, plan, unit):
            try:
                seconds, peak = seconds_per_step(profile, other), peak_bytes(profile, other)
            except ProfileError:
                continue
            said.append(
                f"{name}: {changed_milliseconds(seconds - own_s)}, {_peak_change(own_bytes, peak, budget_bytes)}"
            )
        texts[unit.name] = "; ".join(said)
    return texts


def other_steps(profile: Profile, plan: Plan, budget_bytes: int | None) -> str:
    """Return how each other k would change time per sample and peak.

    Args:
        profile: the profile.
        plan: a plan that the profile can predict.
        budget_bytes: the budget; ``None`` without one.
    """
    own = predicted(profile, plan)
    said = []
    for k in profile.accumulation_choices:
        other = predicted(profile, plan.changed(accumulation_steps=k))
        if k != plan.accumulation_steps and own is not None and other is not None:
            ratio = other.seconds_per_sample / own.seconds_per_sample - 1
            peak = _peak_change(own.peak_bytes, other.peak_bytes, budget_bytes)
            said.append(f"k = {k}: {ratio:+z.1%} time per sample, {peak}")
    return "; ".join(said)


def _others(profile: Profile, plan: Plan, unit: Unit) -> Iterator[tuple[str, Plan]]:
    """Yield the plans that differ from a plan in one choice for a unit, each with the name of that choice."""
    if unit.recomputable:
        for storage in profile.space.storages:
            if storage is not plan.storage_of(unit.name):
                yield storage.label, plan.storing([unit.name], storage)
    for precision in profile.precisions:
        if precision != plan.precision_of(unit.name):
            yield str(precision), plan.changed(precision={**plan.precision, unit.name: precision})


def _peak_change(own_bytes: float, other_bytes: float, budget_bytes: int | None) -> str:
    over = ", over the budget" if budget_bytes is not None and other_bytes > budget_bytes else ""
    change = other_bytes - own_bytes
    return f"{'-' if change < 0 else '+'}{format_bytes(abs(change))}{over}"
