"""Correct a profile's times by whole steps that nothing watches.

On an accelerator, watching a step slows the host, and with it every step that the host cannot launch fast enough: those
of small micro-batches. And a step takes the longer of what the host needs to launch it and the device to compute it, so
that times between two values of k do not lie on a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.cost_model.profile import Profile, Segment, StepTable, choice_name
from autotune.plan import Precision, Storage
from autotune.profiling.homogeneous_plans import PlanName
from autotune.profiling.unseen_costs import none_faster_than_saving

# What remains at least of the seconds of parts, whatever a disturbed step took.
_LEAST = 0.1


def corrected(profile: Profile, measured: Mapping[PlanName, float]) -> Profile:
    """Return the profile with times scaled so that those of homogeneous plans add up to what whole steps took.

    Args:
        profile: the profile, without calibration.
        measured: seconds of a whole step by homogeneous plan.
    """

    def tables(found: tuple[StepTable, ...], borders: str | None) -> tuple[StepTable, ...]:
        seconds = {
            (name.accumulation_steps, name.choice): value
            for name, value in measured.items()
            if (name.precision if name.passes_16_bit else None) == borders
        }
        return tuple(
            _scaled(table, {choice: value for (k, choice), value in seconds.items() if k == table.accumulation_steps})
            for table in found
        )

    return replace(
        profile,
        tables=tables(profile.tables, None),
        uniform_tables={borders: tables(found, borders) for borders, found in profile.uniform_tables.items()},
    )


def _scaled(table: StepTable, measured: Mapping[str, float]) -> StepTable:
    """Return a table scaled to the seconds of whole steps, by the choice of all units.

    Steps of the first precision that saves scale what is outside units, too.
    """
    saving = [choice for choice in measured if choice.endswith(f"/{Storage.SAVE}")]
    factors: dict[str, float] = {}
    for choice in [*saving, *(choice for choice in measured if choice not in saving)]:
        # Units that cannot recompute save under every plan.
        own = [(name, segment.costs[name].seconds) for segment in table.segments for name in [_taken(segment, choice)]]
        known = sum(factors[name] * seconds for name, seconds in own if name in factors)
        rest = sum(seconds for name, seconds in own if name not in factors)
        factor = max(measured[choice] - table.update_s - known, _LEAST * rest) / rest if rest > 0 else 1.0
        factors |= {name: factor for name, _ in own if name not in factors}
    segments = []
    for segment in table.segments:
        costs = {
            name: replace(
                cost,
                forward_s=cost.forward_s * factors.get(name, 1.0),
                backward_s=cost.backward_s * factors.get(name, 1.0),
            )
            for name, cost in segment.costs.items()
        }
        segments.append(replace(segment, costs=none_faster_than_saving(costs)))
    return replace(table, segments=tuple(segments))


def _taken(segment: Segment, choice: str) -> str:
    """Return a segment's choice if all units have one."""
    saving = choice_name(Precision(choice.partition("/")[0]), Storage.SAVE)
    return next((name for name in (choice, saving) if name in segment.costs), next(iter(segment.costs)))
