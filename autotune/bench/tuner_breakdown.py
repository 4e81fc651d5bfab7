"""Breakdown of the time that a live tuner adds to the steps of an unattached copy under the same plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.bench.attached_arms import Arm, LiveArm
from autotune.bench.tuner_timers import DECISION, STATISTICS, PartTimers, Spent, summed
from autotune.plan import Plan

# Kinds of steps, the most expensive first; a step is of the first kind that applies.
LEARNING, DECIDED, SAMPLED, SWITCHED, SAME = (
    "learning",
    "deciding",
    "sampling the gradient",
    "the first of another plan",
    "all others",
)


def watch(timers: PartTimers, arm: Arm) -> list[dict[str, Spent]]:
    """Time the parts of each batch of an arm; return the list to which results will be appended.

    Args:
        timers: the timers.
        arm: the arm, before its first batch.
    """
    found: list[dict[str, Spent]] = []
    step = arm.step

    def watched(batch: Any) -> Any:
        timers.beside = (lambda: arm.tuner.probing) if isinstance(arm, LiveArm) else lambda: False
        result, spent = timers.step(lambda: step(batch))
        found.append(spent)
        return result

    arm.__dict__["step"] = watched
    return found


def breakdown(
    live: Sequence[dict[str, Spent]],
    followed: Sequence[dict[str, Spent]],
    plans: Sequence[Plan],
    learning: Sequence[bool],
) -> dict[str, Any]:
    """Return the time that each part adds to an unattached copy's, over all batches and by kind of step.

    Args:
        live: time by part for each batch of the live arm.
        followed: the same for the arm that follows it.
        plans: plan of each batch.
        learning: whether each batch was used to profile the run.
    """
    kinds = [_kind_of(*one) for one in zip(live, plans, [None, *plans], learning, strict=False)]
    found: dict[str, Any] = {"all": _added(live, followed)}
    for kind in dict.fromkeys((LEARNING, DECIDED, SAMPLED, SWITCHED, SAME)):
        places = [number for number, one in enumerate(kinds) if one == kind]
        if places:
            found[kind] = _added([live[place] for place in places], [followed[place] for place in places])
    return found


def _kind_of(spent: Mapping[str, Spent], plan: Plan, former: Plan | None, learning: bool) -> str:
    if learning:
        return LEARNING
    if DECISION in spent:
        return DECIDED
    if STATISTICS in spent:
        return SAMPLED
    return SAME if plan == former else SWITCHED


def _added(live: Sequence[dict[str, Spent]], followed: Sequence[dict[str, Spent]]) -> dict[str, Any]:
    found: dict[str, Any] = {"batches": len(live)}
    for clock in ("wall", "cpu"):
        own, other = summed(live, clock), summed(followed, clock)
        total = sum(other.values())
        own.subtract(other)
        found[clock] = {
            "followed_s": total,
            "added_s": sum(own.values()),
            "added_frac": sum(own.values()) / total,
            # Shares of the followed arm's seconds, the largest first.
            "rooms": {part: seconds / total for part, seconds in own.most_common()},
        }
    return found
