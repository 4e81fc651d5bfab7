"""Where the time of a step goes: its parts, and one line of advice where a part is large.

This file knows no clock: engines and attached runs measure, ``mechanics.step_clock`` reads the time at the borders.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from autotune.errors import InputError
from autotune.io.documents import STRICT, validated

# The parts may differ from the step by this share of it.
TOLERANCE = 0.02
# Shares of the step above which advice names a part; waiting for a rank costs on all the others at once.
_MUCH_DATA, _MUCH_COMMUNICATION, _MUCH_WAITING, _MUCH_IDLE = 0.2, 0.25, 0.1, 0.25
# A rank is named if it takes this many times as long as the others.
_SLOW_RANK = 1.15
_RATES = ("samples_per_s", "items_per_s", "mfu")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Mean seconds of each part of a timed step; on several ranks, the mean over the ranks.

    Attributes:
        step_s: the whole step, which the parts sum to within 2 %.
        data_s: fetching the batch and moving it to the device. In an attached run all that the loop does between
            two steps.
        compute_s: forward and backward passes, without exposed communication.
        communication_s: communication that nothing hides, without waiting for the slowest rank.
        synchronisation_s: waiting in collectives for the slowest rank.
        update_s: unscaling and clipping the gradient, and the optimizer's update.
        control_s: work of this program itself: statistics, metering, decisions.
        rank_s: seconds that each rank takes for a step without its time in collectives; empty for one rank.
        samples_per_s: samples per second.
        items_per_s: loss-bearing items per second, such as tokens; ``None`` if they are not counted.
        mfu: model FLOPs utilisation: operations of the forward and backward pass of the model, without recomputation,
            over what the devices could compute in the time of the step; ``None`` where one of them is unknown.
        peak_source: where the peak rate in ``mfu`` comes from; empty without ``mfu``.

    Source: model FLOPs utilisation, Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
    """

    __pydantic_config__ = STRICT

    step_s: float
    data_s: float
    compute_s: float
    communication_s: float = 0.0
    synchronisation_s: float = 0.0
    update_s: float
    control_s: float
    rank_s: tuple[float, ...] = ()
    samples_per_s: float | None = None
    items_per_s: float | None = None
    mfu: float | None = None
    peak_source: str = ""

    def __post_init__(self) -> None:
        for name in (*(f"{part}_s" for part in PARTS), "step_s"):
            _require(_is_time(getattr(self, name)), name, getattr(self, name), "seconds >= 0")
        _require(all(map(_is_time, self.rank_s)), "rank_s", self.rank_s, "seconds >= 0")
        for name in _RATES:
            value = getattr(self, name)
            _require(value is None or _is_time(value), name, value, "a number >= 0")
        whole = math.fsum(self.seconds().values())
        close = abs(whole - self.step_s) <= TOLERANCE * self.step_s
        _require(close, "sum of the parts", whole, f"step_s, {self.step_s!r}, within {TOLERANCE:.0%}")

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part by its name, in the order of :data:`PARTS`."""
        return {part: getattr(self, f"{part}_s") for part in PARTS}

    def of_step(self, step_s: float) -> StepParts:
        """Return the same shares of a step of another length, such as one rank's of a mean over ranks."""
        if not self.step_s:
            return self
        changed: dict[str, Any] = {f"{part}_s": share * step_s for part, share in self.shares().items()}
        return replace(self, step_s=step_s, **changed)

    def shares(self) -> dict[str, float]:
        """Return each part's share of the step by its name; zeros for a step that took no time."""
        return {part: seconds / self.step_s if self.step_s else 0.0 for part, seconds in self.seconds().items()}

    def metrics(self) -> dict[str, float | None]:
        """Return the numbers as metrics of a tracker: ``part_data_s``, ..., ``mfu`` and the rates."""
        rates = {name: getattr(self, name) for name in _RATES}
        return {**{f"part_{part}_s": seconds for part, seconds in self.seconds().items()}, **rates}

    def to_json(self) -> dict[str, Any]:
        """Return the parts as a JSON object."""
        return {**asdict(self), "rank_s": list(self.rank_s)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, where: str = "parts of a step") -> StepParts:
        """Read parts from a JSON object.

        Raises:
            InputError: naming the first key or value that is not allowed.
        """
        return validated(cls, document, where=where)


def metrics_of(parts: StepParts | None) -> dict[str, float | None]:
    """Return the metrics of parts, each ``None`` where the parts are not known."""
    known = {} if parts is None else parts.metrics()
    return {name: known.get(name) for name in (*(f"part_{part}_s" for part in PARTS), *_RATES)}


# Names of the parts, in the order in which they are shown.
PARTS = tuple(
    item.name.removesuffix("_s")
    for item in fields(StepParts)
    if item.name in {"data_s", "compute_s", "communication_s", "synchronisation_s", "update_s", "control_s"}
)


def parts_of_ranks(
    ranks: Sequence[Sequence[Mapping[str, float]]],
    *,
    samples_per_s: float | None = None,
    items_per_s: float | None = None,
) -> StepParts | None:
    """Return the parts of steps that several ranks took together; ``None`` without steps.

    All ranks leave a step's collectives together, so that the rank that spends least in them waits for no other: its
    time in collectives is the transfer, and what others spend beyond it is waiting for the slowest rank.

    Args:
        ranks: for each rank and each step, seconds by part; ``communication`` is all time in collectives, and
            ``synchronisation`` the wait for other stages of a pipeline.
        samples_per_s: samples per second.
        items_per_s: loss-bearing items per second.
    """
    steps = len(ranks[0]) if ranks else 0
    if not steps:
        return None
    count = len(ranks) * steps
    means = {part: math.fsum(step.get(part, 0.0) for rank in ranks for step in rank) / count for part in PARTS}
    transfers = [min(rank[number].get("communication", 0.0) for rank in ranks) for number in range(steps)]
    transfer = math.fsum(transfers) / steps
    means["synchronisation"] += means["communication"] - transfer
    means["communication"] = transfer
    own = tuple(math.fsum(_own(step) for step in rank) / steps for rank in ranks)
    named: dict[str, Any] = {f"{part}_s": max(seconds, 0.0) for part, seconds in means.items()}
    return StepParts(
        step_s=math.fsum(means.values()),
        rank_s=own if len(ranks) > 1 else (),
        samples_per_s=samples_per_s,
        items_per_s=items_per_s,
        **named,
    )


def _own(step: Mapping[str, float]) -> float:
    return math.fsum(seconds for part, seconds in step.items() if part not in ("communication", "synchronisation"))


def mean_parts(found: Sequence[tuple[float, StepParts | None]]) -> StepParts | None:
    """Return the mean of several windows' parts; ``None`` if no window has any.

    Args:
        found: for each window its weight, such as the number of timed steps, and its parts.
    """
    known = [(weight, parts) for weight, parts in found if parts is not None and weight > 0]
    if not known:
        return None
    total = math.fsum(weight for weight, _ in known)

    def mean(values: Sequence[float | None]) -> float | None:
        if any(value is None for value in values):
            return None
        return math.fsum(weight * (value or 0.0) for (weight, _), value in zip(known, values, strict=True)) / total

    last, every = known[-1][1], [parts for _, parts in known]
    names = ("step_s", *(f"{part}_s" for part in PARTS))
    changed: dict[str, Any] = {name: mean([getattr(parts, name) for parts in every]) for name in names}
    alike = all(len(parts.rank_s) == len(last.rank_s) for parts in every)
    ranks = [mean(values) for values in zip(*(parts.rank_s for parts in every), strict=True)] if alike else last.rank_s
    utilisation = mean([parts.mfu for parts in every])
    # Rates are of time, so that slow windows count more.
    changed |= {name: _rate(known, name) for name in ("samples_per_s", "items_per_s")}
    return replace(
        last,
        rank_s=tuple(seconds or 0.0 for seconds in ranks),
        mfu=utilisation,
        peak_source=last.peak_source if utilisation is not None else "",
        **changed,
    )


def _rate(known: Sequence[tuple[float, StepParts]], name: str) -> float | None:
    seconds = math.fsum(weight * parts.step_s for weight, parts in known)
    rates = [getattr(parts, name) for _, parts in known]
    if any(rate is None for rate in rates) or not seconds:
        return None
    return math.fsum(weight * parts.step_s * rate for (weight, parts), rate in zip(known, rates, strict=True)) / seconds


def advice(parts: StepParts | None) -> str | None:
    """Return one line on the part of a step that costs most beyond what plans can change; ``None`` if none is large."""
    if parts is None:
        return None
    shares = parts.shares()
    found = [
        (shares["data"] / _MUCH_DATA, _data_told(shares["data"])),
        (shares["communication"] / _MUCH_COMMUNICATION, _communication_told(shares["communication"])),
        (_waiting(parts) / _MUCH_WAITING, _waiting_told(parts)),
        ((shares["synchronisation"] - _waiting(parts)) / _MUCH_IDLE, _idle_told(shares["synchronisation"])),
    ]
    much, told = max(found)
    return told if much >= 1 else None


def _data_told(share: float) -> str:
    return f"{share:.0%} of the step waits for data: more loader workers would help more than any plan"


def _communication_told(share: float) -> str:
    return (
        f"{share:.0%} of the step is communication that nothing hides: a faster link, or fewer bytes and exchanges per "
        "sample, would help more than any plan"
    )


def _waiting(parts: StepParts) -> float:
    """Return the share of the step that ranks wait for one that is slower than the others; else 0."""
    return parts.shares()["synchronisation"] if _slowest(parts)[1] >= _SLOW_RANK else 0.0


def _slowest(parts: StepParts) -> tuple[int, float]:
    """Return the slowest rank, and its time over the median of the others; 0 and 1 for one rank."""
    if len(parts.rank_s) < 2:
        return 0, 1.0
    rank = max(range(len(parts.rank_s)), key=parts.rank_s.__getitem__)
    others = statistics.median(seconds for number, seconds in enumerate(parts.rank_s) if number != rank)
    return rank, parts.rank_s[rank] / others if others else math.inf


def _waiting_told(parts: StepParts) -> str:
    rank, times = _slowest(parts)
    return (
        f"rank {rank} is {times:.1f} times as slow as the others, which wait for it in "
        f"{parts.shares()['synchronisation']:.0%} of the step: see what else its device, its data or its machine does, "
        "or give its stage of a pipeline fewer units"
    )


def _idle_told(share: float) -> str:
    return (
        f"ranks that are equally fast wait for one another in {share:.0%} of the step: in a pipeline, more "
        "micro-batches (a larger k), schedule=zero-bubble or interleaved stages would help more than other choices"
    )


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise InputError(f"{name} is {value!r}", where="parts of a step", allowed=allowed)
