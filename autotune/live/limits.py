"""Limits on what a live tuner may do."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum

from autotune.errors import AttachError


class Mode(StrEnum):
    """What a live tuner may change.

    ``exact``: only storage, so that training stays bit-identical. ``rounding``: also k at a fixed batch, which changes
    the gradient by rounding. ``tolerant``: also the precision of units.
    """

    EXACT = "exact"
    ROUNDING = "rounding"
    TOLERANT = "tolerant"


class Stage(StrEnum):
    """What a live tuner does with its decisions.

    ``observe``: it only measures, and logs them. ``act``: it switches plans.
    """

    OBSERVE = "observe"
    ACT = "act"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on what a live tuner does to a run.

    Attributes:
        decide_every: optimizer steps from one decision to the next.
        min_steps_between_switches: least number of optimizer steps from one switch to the next, unless the memory
            budget requires one.
        canary_steps: optimizer steps after the first switch before another one is allowed.
        gain_frac: least predicted gain, as a share of the step's time, for which plans are switched; a negative value
            also allows switches to slower plans.
        follow_batches: whether, between decisions, each batch gets the fastest storage that fits its own size and the
            current budget; this exploits batches of varying length.
        statistics_every: optimizer steps from one sampled gradient to the next; ``None`` samples none.
        pressure_frac: share of the budget above which a measured peak trips; plans may use less.
        slowdown_frac: share by which steps may be slower than predicted before a comparison with the baseline begins,
            and slower than the baseline's before the tuner trips.
        overhead_frac: the tuner's own share of the run's time above which it detaches; what the first profile took,
            which leaving would not win back, does not count.
        pause_steps: optimizer steps without switches after the first trip; each further trip doubles them.
        max_trips: trips after which the tuner detaches for good.
        decision_timeout_s: seconds that a decision may take; if it takes longer, the plan stays.
        rank_timeout_s: seconds that a rank waits for the others to agree before it goes back to the baseline.
    """

    decide_every: int = 50
    min_steps_between_switches: int = 50
    canary_steps: int = 20
    gain_frac: float = 0.03
    follow_batches: bool = True
    statistics_every: int | None = 50
    pressure_frac: float = 1.02
    slowdown_frac: float = 0.05
    overhead_frac: float = 0.03
    pause_steps: int = 200
    max_trips: int = 4
    decision_timeout_s: float = 1.0
    rank_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        least = {"decide_every": 1, "pause_steps": 1, "max_trips": 1, "statistics_every": 1}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "follow_batches":
                _require(isinstance(value, bool), item.name, value, "true, false")
            elif item.name.endswith(("_frac", "_s")):
                good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
                signed = item.name == "gain_frac"
                allowed = "a finite number" if signed else "a finite number >= 0"
                _require(good and (signed or value >= 0.0), item.name, value, allowed)
            elif item.name != "statistics_every" or value is not None:
                lowest = least.get(item.name, 0)
                good = isinstance(value, int) and not isinstance(value, bool) and value >= lowest
                _require(good, item.name, value, f"a whole number >= {lowest}")


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise AttachError(f"{name} is {value!r}", where="limits", allowed=allowed)
