"""Correct a profile's times by whole steps that nothing watches.

On an accelerator, watching a step slows the host, and with it every step that the host cannot launch fast enough: those
of small micro-batches. And a step takes the longer of what the host needs to launch it and the device to compute it, so
that times between two values of k do not lie on a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.cost_model.memory_model import choices
from autotune.cost_model.profile import Profile, StepTable
from autotune.plan import Plan
from autotune.profiling.unseen_costs import none_faster_than_saving

# What remains at least of the seconds of parts, whatever a disturbed step took.
_LEAST = 0.1


def corrected(profile: Profile, measured: Mapping[Plan, float]) -> Profile:
    """Return the profile with times scaled so that those of homogeneous plans add up to what whole steps took.

    A choice is scaled by the same factor whether tensors pass between units in 16 bits or not.

    Args:
        profile: the profile, without calibration.
        measured: seconds of a whole step by homogeneous plan, those that save first: a unit that cannot recompute saves
            under every plan. The first plan of each k scales what is outside units, too.
    """
    factors: dict[int, dict[str, float]] = {}
    for plan, seconds in measured.items():
        table, known = profile.table_for(plan), factors.setdefault(plan.accumulation_steps, {})
        pieces = zip(table.segments, choices(table.segments, plan), strict=True)
        own = [(name, segment.cost(name).seconds) for segment, name in pieces]
        rest = sum(value for name, value in own if name not in known)
        others = table.update_s + sum(known[name] * value for name, value in own if name in known)
        factor = max(seconds - others, _LEAST * rest) / rest if rest > 0 else 1.0
        known.update({name: factor for name, _ in own if name not in known})
    return replace(
        profile,
        tables=tuple(_scaled(table, factors) for table in profile.tables),
        uniform_tables={
            borders: tuple(_scaled(table, factors) for table in tables)
            for borders, tables in profile.uniform_tables.items()
        },
    )


def _scaled(table: StepTable, factors: Mapping[int, Mapping[str, float]]) -> StepTable:
    """Return a table with the seconds of each choice scaled by the factor of its k and choice."""
    own = factors.get(table.accumulation_steps, {})
    segments = []
    for segment in table.segments:
        costs = {
            name: replace(
                cost,
                forward_s=cost.forward_s * own.get(name, 1.0),
                backward_s=cost.backward_s * own.get(name, 1.0),
            )
            for name, cost in segment.costs.items()
        }
        segments.append(replace(segment, costs=none_faster_than_saving(costs)))
    return replace(table, segments=tuple(segments))
