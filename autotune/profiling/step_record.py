"""Records of a job's steps, from which all profiles are assembled.

Offline profiling, live profiling and estimation each make such a record in their own way;
:mod:`autotune.profiling.profile_assembly` turns it into a profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.cost_model.profile import FIXED, choice_name
from autotune.mechanics.step_trace import Phase
from autotune.plan import Plan, Precision, Storage
from autotune.profiling.attribution import Attribution


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """The memory of one traced step.

    Attributes:
        plan: the plan that it ran under.
        calls: the units that it called, in order.
        attribution: the memory of each segment.
        batch_bytes: bytes of the batch to which the attribution was scaled.
        traced_bytes: bytes of the step's actual batch.
        kind: the units among them that it called itself, if other kinds of steps call the rest; ``None`` for all.
    """

    plan: Plan
    calls: tuple[str, ...]
    attribution: Attribution
    batch_bytes: int
    traced_bytes: int
    kind: frozenset[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """The seconds of one step, or the medians of several steps of one plan.

    Attributes:
        plan: the plan that it ran under.
        batch_bytes: bytes of its batch.
        seconds: seconds by phase and segment, over all micro-batches.
        traced: whether it was traced, which makes it slower; such times are used only where no others are known.
        calls: the units that it called, in order; empty where all steps call the same.
    """

    plan: Plan
    batch_bytes: int
    seconds: Mapping[tuple[Phase, int], float]
    traced: bool = False
    calls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsAtK:
    """The steps from which the costs at one k are assembled.

    Attributes:
        accumulation_steps: k.
        traces: traced steps, at least one; all call the same units.
        timed: timed steps.
        borders: name of the 16-bit precision in which tensors pass between units; ``None`` for fp32.
    """

    accumulation_steps: int
    traces: Sequence[TracedStep]
    timed: Sequence[TimedStep]
    borders: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Everything that was observed in a job's steps.

    Attributes:
        job: name of the job.
        device: name of the device.
        batch_size: samples of each batch that this process trains on.
        static_bytes: bytes of model and optimizer state.
        steps: the steps, by k and borders.
        length_spread: standard deviation of the logarithm of a batch's bytes.
        is_sparse: whether only a few plans were run, as in a live run. Then choices that were not run are bounded from
            above by those that were. Otherwise they are extrapolated from other k, and missing k are interpolated.
    """

    job: str
    device: str
    batch_size: int
    static_bytes: int
    steps: Sequence[StepsAtK]
    length_spread: float
    is_sparse: bool = False


def choice_at(plan: Plan, calls: Sequence[str], segment: int) -> str:
    """Return the name of a plan's choice for a segment.

    Args:
        plan: the plan.
        calls: the units that a step calls, in order.
        segment: number of the segment; -1 for the update.

    Returns:
        For example ``bf16/recompute``; ``fixed`` for code between units and for the update.
    """
    if segment < 0 or segment % 2 == 0:
        return FIXED
    unit = calls[segment // 2]
    return choice_name(plan.precision_of(unit), plan.storage_of(unit))


def recomputed_units(plan: Plan) -> list[str]:
    """Return the names of the units that a plan recomputes."""
    return list(plan.recomputed)


def silent_units(plan: Plan) -> list[str]:
    """Return the names of the units that keep other things than what autograd saves, which a trace may not see."""
    return [name for name, storage in plan.storage.items() if storage is not Storage.SAVE and not storage.recomputes]


def common_precision(plan: Plan) -> Precision:
    """Return the precision of a plan whose units all have the same."""
    return next(iter(plan.precision.values()), Precision.INHERIT)
