"""Homogeneous plans, in which every unit has the same choice, and their traced and timed steps."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np

from autotune.cost_model.profile import choice_name
from autotune.mechanics.step_trace import Phase
from autotune.plan import Plan, PlanSpace, Precision, Storage
from autotune.profiling.step_record import StepsAtK, TimedStep, TracedStep
from autotune.profiling.unseen_costs import kind_of

Value = TypeVar("Value")
# The update, as a phase and a segment.
UPDATE: tuple[Phase, int] = ("update", -1)


@dataclass(frozen=True, slots=True)
class PlanName:
    """The name of a homogeneous plan.

    Attributes:
        accumulation_steps: k.
        choice: the choice of every unit, for example ``bf16/recompute``.
        passes_16_bit: whether tensors pass between units in 16 bits.
    """

    accumulation_steps: int
    choice: str
    passes_16_bit: bool = False

    @property
    def precision(self) -> str:
        """Return the name of the precision."""
        return self.choice.partition("/")[0]

    @property
    def storage(self) -> str:
        """Return the name of the storage."""
        return self.choice.partition("/")[2]


class WatchedStep(NamedTuple):
    """The seconds of a step, in total and by phase and segment."""

    total_s: float
    seconds: dict[tuple[Phase, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """Consecutive steps of one plan.

    Attributes:
        steps: the timed steps.
        first_s: seconds of the step before them, which warms up; ``None`` if there was none.
    """

    steps: Sequence[WatchedStep]
    first_s: float | None = None

    @property
    def totals(self) -> list[float]:
        """Return the seconds of the timed steps."""
        return [step.total_s for step in self.steps]


@dataclass(frozen=True, slots=True)
class PlanSteps:
    """The steps of one homogeneous plan: one traced step, and visits of timed steps."""

    traced: TracedStep
    visits: list[Visit] = field(default_factory=list)

    @property
    def timed(self) -> list[WatchedStep]:
        """Return the timed steps of all visits."""
        return [step for visit in self.visits for step in visit.steps]

    @property
    def fastest(self) -> WatchedStep:
        """Return the fastest timed step."""
        return min(self.timed, key=lambda step: step.total_s)

    def only(self, step: WatchedStep) -> PlanSteps:
        """Return a copy with a single timed step."""
        return replace(self, visits=[Visit(steps=[step])])

    def medians(self) -> list[TimedStep]:
        """Return the median seconds of each pass, and every step's update, which does not depend on the plan."""
        timed = [step.seconds for step in self.timed]
        passes = dict.fromkeys(key for seconds in timed for key in seconds if key != UPDATE)
        medians = {key: statistics.median(seconds.get(key, 0.0) for seconds in timed) for key in passes}
        plan, size = self.traced.plan, self.traced.traced_bytes
        updates = [{UPDATE: seconds[UPDATE]} for seconds in timed]
        return [TimedStep(plan=plan, batch_bytes=size, seconds=seconds) for seconds in (medians, *updates)]


def homogeneous_plans(space: PlanSpace, ks: Sequence[int]) -> dict[PlanName, Plan]:
    """Return the homogeneous plans of a space; 16-bit plans with both fp32 and 16-bit borders.

    At each k, the plans that save come first. Plans whose times should agree are thus run far apart, so that a
    disturbance of some steps shows as a difference between them.

    Args:
        space: the plans that are allowed.
        ks: the values of k to use.
    """
    storages = space.storages if space.recomputable else space.storages[:1]
    return {
        PlanName(k, choice_name(precision, storage), passes): space.plan(
            accumulation_steps=k, precision=precision, storage=storage
        )
        for k in ks
        for storage in storages
        for precision in space.precisions
        for passes in ((False, True) if precision.is_16_bit else (False,))
    }


def steps_by_k(found: Mapping[PlanName, PlanSteps]) -> list[StepsAtK]:
    """Return the steps of homogeneous plans, grouped by k and borders."""
    groups: dict[tuple[int, str | None], list[PlanSteps]] = {}
    for name, steps in found.items():
        borders = name.precision if name.passes_16_bit else None
        groups.setdefault((name.accumulation_steps, borders), []).append(steps)
    return [
        StepsAtK(
            accumulation_steps=k,
            traces=[steps.traced for steps in own],
            timed=[timed for steps in own for timed in steps.medians()],
            borders=borders,
        )
        for (k, borders), own in groups.items()
    ]


def without_copies(found: Mapping[PlanName, PlanSteps]) -> dict[PlanName, PlanSteps]:
    """Return the steps without those whose 16-bit borders make no difference, as when units return fp32 anyway."""
    return {name: steps for name, steps in found.items() if not is_copy(name, found)}


def is_copy(name: PlanName, found: Mapping[PlanName, PlanSteps]) -> bool:
    """Return whether a plan's 16-bit borders make no difference, as in some traced plan of the same precision.

    Args:
        name: the plan.
        found: the steps traced so far.
    """
    if not name.passes_16_bit:
        return False
    pairs = [(seen, replace(seen, passes_16_bit=False)) for seen in found if seen.passes_16_bit]
    return any(
        one.precision == name.precision
        and other in found
        and found[one].traced.attribution == found[other].traced.attribution
        for one, other in pairs
    )


def disagreement(found: Mapping[PlanName, PlanSteps], recomputable: Collection[str]) -> float:
    """Return the largest ratio of times that should agree, in the fastest step of each plan.

    Forward passes of units take as long whether they save or recompute, and recomputation adds the same time to
    their backward passes.

    Args:
        found: the timed steps of every homogeneous plan.
        recomputable: names of the units whose storage can be chosen.
    """
    factors = [1.0]
    for name, steps in found.items():
        twin = found.get(replace(name, choice=choice_name(Precision(name.precision), Storage.SAVE)))
        if not Storage(name.storage).recomputes or twin is None or not (steps.timed and twin.timed):
            continue
        (forward, backward), (again, longer) = (_pass_seconds(one, recomputable) for one in (twin, steps))
        pairs = [(forward, again), (forward + backward, longer)]
        factors += [max(one / two, two / one) for one, two in pairs if one and two]
    return max(factors)


def _pass_seconds(steps: PlanSteps, names: Collection[str]) -> tuple[float, float]:
    """Return the seconds of some units' forward and backward passes in the fastest step."""
    seconds = steps.fastest.seconds
    own = [2 * number + 1 for number, unit in enumerate(steps.traced.calls) if unit in names]
    return sum(seconds.get(("forward", i), 0.0) for i in own), sum(seconds.get(("backward", i), 0.0) for i in own)


def share_seconds(found: Mapping[PlanName, PlanSteps], space: PlanSpace) -> None:
    """Replace the seconds of calls of like units (same kind, parameters and saved bytes) by their median.

    Args:
        found: the timed steps of every homogeneous plan; modified in place.
        space: the plans that are allowed.
    """
    kinds = {unit.name: kind_of(unit) for unit in space.units}
    for steps in found.values():
        alike: dict[object, list[int]] = {}
        for number, unit in enumerate(steps.traced.calls):
            if unit in kinds:
                index = 2 * number + 1
                alike.setdefault((kinds[unit], steps.traced.attribution.saved[index]), []).append(index)
        for step in steps.timed:
            for indices in alike.values():
                for phase in ("forward", "backward"):
                    shared = statistics.median(step.seconds.get((phase, index), 0.0) for index in indices)
                    step.seconds.update({(phase, index): shared for index in indices})


def spread_choices(choices: Sequence[Value], count: int) -> tuple[Value, ...]:
    """Return at most ``count`` of the choices, evenly spaced, including the first and the last.

    Args:
        choices: the choices, in order.
        count: maximum number of choices, at least 2.
    """
    if len(choices) <= count:
        return tuple(choices)
    indices = np.linspace(0, len(choices) - 1, count).round().astype(int)
    return tuple(choices[index] for index in dict.fromkeys(indices.tolist()))
