"""Show, per unit, what its other choices would change: the reason, in figures, for the choice that was made."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.budget import format_bytes
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Profile
from autotune.cost_model.time_model import seconds_per_step
from autotune.errors import ProfileError
from autotune.plan import Plan
from autotune.report.pareto import predicted
from autotune.units import Unit

# Units whose other choices are predicted: each takes a few predictions.
_MOST_UNITS = 120


def otherwise(profile: Profile, plan: Plan, budget_bytes: int | None) -> dict[str, str]:
    """Return per unit what each other choice for it alone would change, as the profile predicts.

    Args:
        profile: the profile.
        plan: the plan, which the profile can predict.
        budget_bytes: the budget; ``None`` for none.

    Raises:
        ProfileError: if the profile cannot predict the plan.
    """
    texts = {}
    own = seconds_per_step(profile, plan), peak_bytes(profile, plan)
    for unit in profile.units[:_MOST_UNITS]:
        said = []
        for told, other in _others(profile, plan, unit):
            try:
                seconds, peak = seconds_per_step(profile, other), peak_bytes(profile, other)
            except ProfileError:
                continue
            fits = "" if budget_bytes is None or peak <= budget_bytes else ", over the budget"
            said.append(f"{told}: {(seconds - own[0]) * 1e3:+.2f} ms, {_signed(peak - own[1])}{fits}")
        texts[unit.name] = "; ".join(said)
    return texts


def other_steps(profile: Profile, plan: Plan, budget_bytes: int | None) -> str:
    """Return what each other k would change, as the profile predicts: time per sample, and the peak.

    Args:
        profile: the profile.
        plan: the plan, which the profile can predict.
        budget_bytes: the budget; ``None`` for none.
    """
    own = predicted(profile, plan)
    said = []
    for k in profile.accumulation_choices:
        other = predicted(profile, plan.changed(accumulation_steps=k))
        if k == plan.accumulation_steps or own is None or other is None:
            continue
        fits = "" if budget_bytes is None or other.peak_bytes <= budget_bytes else ", over the budget"
        ratio = other.seconds_per_sample / own.seconds_per_sample - 1
        said.append(f"k = {k}: {ratio:+.1%} time per sample, {_signed(other.peak_bytes - own.peak_bytes)}{fits}")
    return "; ".join(said)


def _others(profile: Profile, plan: Plan, unit: Unit) -> Iterator[tuple[str, Plan]]:
    """Yield the plans that differ from a plan in one choice for one unit, and what that choice is called."""
    if unit.recomputable:
        for storage in profile.space.storages:
            if storage is not plan.storage_of(unit.name):
                yield storage.label, plan.changed(storage={**plan.storage, unit.name: storage})
    for precision in profile.precisions:
        if precision != plan.precision_of(unit.name):
            yield str(precision), plan.changed(precision={**plan.precision, unit.name: precision})


def _signed(size: float) -> str:
    return f"{'-' if size < 0 else '+'}{format_bytes(abs(size))}"
