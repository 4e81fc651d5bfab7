"""The events in a decision log, and the check that a log contains no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Interval, Len

from autotune.agents.policy import DipOutlook
from autotune.errors import InputError
from autotune.io.documents import Bytes, Count, NotNegative, Positive, Quantity, Seconds, document, shown, validated
from autotune.plan import Plan
from autotune.step_parts import StepParts

_Text = Annotated[str, Len(0, 10_000)]
_Names = Annotated[list[_Text], Len(0, 100_000)]
_Texts = Annotated[dict[str, _Text], Len(0, 100_000)]
_Peak = Annotated[int, Interval(ge=1, le=2**60)]
_Facts = Annotated[dict[str, str | int | float | bool | None], Len(0, 1_000)]


@document
class _Event:
    event: _Text
    step: Count


@document
class Attached(_Event):
    """The first event: the run, and how the tuner was attached to it."""

    version: Count
    model: _Text
    units: _Names
    recomputable: _Names | None = None
    locks: _Texts
    total_steps: Count | None = None
    environment: _Facts | None = None
    baseline: dict[str, Any] | None = None
    mode: _Text | None = None
    stage: _Text | None = None
    batching: _Text | None = None
    policy: _Text | None = None
    placement: _Text | None = None


@document
class _Score:
    predicted_bytes: _Peak
    measured_bytes: _Peak


@document
class _Predicted:
    seconds: Seconds | None
    peak_bytes: NotNegative | None
    gain: Quantity | None


@document
class _Seen:
    seconds_per_step: Seconds | None
    peak_bytes: NotNegative | None
    loss: Quantity | None = None
    noise_scale: Quantity | None = None
    memory_budget_bytes: Bytes | None = None
    skipped_steps: Count = 0
    steps: Count = 0
    total_s: Seconds = 0.0
    parts: StepParts | None = None


@document
class _Ran:
    seconds: Seconds
    predicted: Positive


@document
class _Cost:
    seconds: Seconds | None
    peak_bytes: NotNegative | None


@document
class Profiled(_Event):
    """The run has been profiled."""

    units: Count
    kept_share: Quantity | None = None
    square_share: Quantity | None = None
    growth: Quantity | None = None
    autocast: _Text | None = None
    locks: _Texts | None = None
    scores: list[_Score] | None = None
    baseline: _Cost | None = None
    static_bytes: Bytes
    batch_bytes: Bytes


@document
class Decision(_Event):
    """A policy proposed a plan, and the rules answered."""

    observation: _Text | None
    # A policy may propose any value.
    proposal: Any
    rules: _Texts
    applied: bool
    predicted: _Predicted
    measured: _Seen | None = None
    ran: _Ran | None = None
    memory_budget_bytes: Bytes | None = None
    placed: Count = 0
    over_budget_steps: Count = 0
    overhead_frac: Quantity | None = None
    dips: DipOutlook | None = None
    # The plan that was applied when the decision was made.
    plan: dict[str, Any] | None = None
    acting: bool | None = None
    predicted_peak_bytes: NotNegative | None = None


@document
class Switched(_Event):
    """Another plan was applied."""

    plan: dict[str, Any]


@document
class Tripped(_Event):
    """A trip returned the run to its baseline, or to a plan that fits."""

    reason: _Text
    trips: Count = 0
    open: bool = False


@document
class Advice(_Event):
    """A part of the step is so large that something else than a plan would help most; said once."""

    advice: _Text
    parts: StepParts


@document
class Locked(_Event):
    """What was learnt while the run trained locks a choice."""

    what: _Text
    reason: _Text


@document
class OutOfMemory(_Event):
    """Memory ran out under a plan, and the step was run again with a larger k."""

    plan: dict[str, Any]
    smallest_k: Count
    reason: _Text


@document
class Late(_Event):
    """A decision came too late, and the plan was kept."""

    reason: _Text


@document
class BudgetRefused(_Event):
    """The run's memory budget had a value that is not a size."""

    value: Any


@document
class Detached(_Event):
    """The last event, with figures of the whole run if the tuner could still report them."""

    reason: _Text
    locks: _Texts | None = None
    steps: Count = 0
    total_steps: Count | None = None
    run_s: Seconds = 0.0
    stage: _Text | None = None
    acting: bool = False
    plan: dict[str, Any] | None = None
    decided: dict[str, Any] | None = None
    switches: Count = 0
    placed: Count = 0
    trips: list[Any] | None = None
    over_budget_steps: Count = 0
    memory_budget_bytes: Bytes | None = None
    predicted_peak_bytes: NotNegative | None = None
    measured_peak_bytes: NotNegative | None = None
    pressure: NotNegative | None = None
    predicted_s: Seconds | None = None
    measured_s: Seconds | None = None
    noise_scale: Quantity | None = None
    overhead_frac: Quantity | None = None
    parts: StepParts | None = None
    advice: _Text | None = None


_KINDS: Mapping[str, type[_Event]] = {
    "attached": Attached,
    "profiled": Profiled,
    "decision": Decision,
    "switched": Switched,
    "tripped": Tripped,
    "advice": Advice,
    "locked": Locked,
    "out of memory": OutOfMemory,
    "late": Late,
    "budget refused": BudgetRefused,
    "detached": Detached,
}


def check(event: Mapping[str, Any], *, where: str) -> None:
    """Refuse an unknown or malformed event.

    Args:
        event: a line of the log.
        where: the file and the line, for error messages.

    Raises:
        InputError: for the first key or value that is not allowed.
    """
    name = event.get("event")
    if not isinstance(name, str) or name not in _KINDS:
        raise InputError(f"event is {shown(name)}", where=where, allowed=list(_KINDS))
    found = validated(_KINDS[name], event, where=where)
    plan = found.baseline if isinstance(found, Attached) else getattr(found, "plan", None)
    if plan is not None:
        Plan.from_json(plan, where=where)


def check_log(events: Sequence[Mapping[str, Any]], *, version: int, where: str) -> None:
    """Refuse a log of another version, with an invalid event, or with events in the wrong order.

    Args:
        events: the lines of the log.
        version: the version that it must have.
        where: the file, for error messages.

    Raises:
        InputError: if the log is refused; it names the line.
    """
    if not events or events[0].get("event") != "attached" or events[0].get("version") != version:
        raise InputError("is not a decision log of this version", where=where, allowed=f"version {version}")
    for number, event in enumerate(events, 1):
        place = f"{where} line {number}"
        check(event, where=place)
        if (event["event"] == "attached") != (number == 1):
            raise InputError("a run is attached twice", where=place, allowed="one event 'attached', the first")
        if number > 1 and event["step"] < events[number - 2]["step"]:
            raise InputError(f"step is {event['step']}", where=place, allowed="steps that never decrease")
