"""Settings of a planner: what it assumes of errors, lengths and dips, and how far it looks ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from autotune.errors import InputError
from autotune.io.documents import STRICT
from autotune.simulator.dip_forecasts import FARTHEST

Dips = Literal["belief", "last", "none"]
Costs = Literal["weighed", "assumed"]
# The largest value of each number.
LARGEST = {
    "reserve": 10.0,
    "rise": 10.0,
    "retry": 1000.0,
    "horizon": float(FARTHEST),
    "cost_error": 10.0,
    "common_share": 1.0,
    "drift": 10.0,
    "time_noise": 10.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Settings of a planner.

    Attributes:
        reserve: safety margin on memory: sequences are assumed to be longer than the last ones by this share.
        rise: prior standard deviation of the logarithm of a window's longest batch over the length of the window
            before. Above 0, each plan's time includes the expected cost of a batch that needs too much memory. With 0,
            the last length and the reserve are taken as certain.
        retry: share of a window that is lost when it runs out of memory, besides the repetition under the leanest plan.
        horizon: windows that are planned ahead, over which a switch must pay for itself, or what it teaches about
            costs; 0 switches whenever another plan is better for the next window.
        costs: how measured times correct profiled costs: ``weighed`` by how well several explanations predict them, so
            that a plan of uncertain cost may be tried for what it teaches, or with errors of the ``assumed`` sizes.
        cost_error: standard deviation of the logarithm of real over profiled costs; 0 trusts the profile.
        common_share: share of that variance that is common to all units in a precision.
        drift: standard deviation of the change of log costs per window, common to all units in a precision.
        time_noise: standard deviation of the logarithm of a window's measured seconds per step.
        dips: the forecast of unannounced dips of the budget, whose expected cost is part of each plan's time: a
            Bayesian ``belief`` about their intervals, the ``last`` interval again, or ``none``.

    Raises:
        InputError: if a value is not allowed; numbers are at most those in ``LARGEST``.
    """

    __pydantic_config__ = STRICT

    reserve: float = 0.0
    rise: float = 0.0
    retry: float = 1.0
    horizon: float = 3.0
    costs: Costs = "weighed"
    cost_error: float = 0.3
    common_share: float = 0.6
    drift: float = 0.02
    time_noise: float = 0.02
    dips: Dips = "belief"

    def __post_init__(self) -> None:
        """Check the values."""
        for name, largest in LARGEST.items():
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= largest:
                raise InputError(f"planner.{name} is {value!r}", allowed=f"a number from 0 to {largest:g}")
        for name, kind in (("dips", Dips), ("costs", Costs)):
            if getattr(self, name) not in get_args(kind):
                raise InputError(f"planner.{name} is {getattr(self, name)!r}", allowed=get_args(kind))
