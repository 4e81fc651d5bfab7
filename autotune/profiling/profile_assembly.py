"""Assemble the costs of a step at one k from what its homogeneous plans showed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autotune.cost_model.profile import FIXED, Boundary, Cost, Segment, StepTable, choice_name
from autotune.mechanics.step_trace import Phase
from autotune.plan import Plan, PlanSpace, Precision, Storage
from autotune.profiling.attribution import Attribution, BoundaryKey, as_boundary


@dataclass(frozen=True, slots=True)
class Probe:
    """Name a homogeneous plan.

    Attributes:
        accumulation_steps: k.
        choice: what every unit chooses, for example ``bf16/recompute``.
        passes_16_bit: whether tensors pass between units in 16 bits.
    """

    accumulation_steps: int
    choice: str
    passes_16_bit: bool = False

    @property
    def precision(self) -> str:
        """Return the name of the precision."""
        return self.choice.partition("/")[0]


def homogeneous_plans(space: PlanSpace, ks: Sequence[int]) -> dict[Probe, Plan]:
    """Return the plans in which every unit takes the same choice; those of 16 bits with both kinds of borders.

    At each k those that save come first: what disturbs some of the steps parts times that should agree.
    """
    storages = space.storages if space.recomputable else space.storages[:1]
    return {
        Probe(k, choice_name(precision, storage), passes): space.plan(
            accumulation_steps=k, precision=precision, storage=storage
        )
        for k in ks
        for storage in storages
        for precision in space.precisions
        for passes in ((False, True) if precision.is_reduced else (False,))
    }


@dataclass(slots=True)
class Choice:
    """Collect what was seen under one homogeneous plan.

    Attributes:
        plan: the plan.
        attribution: who kept what, in its traced step.
        calls: the units that the step called, in order.
        batch_bytes: the batches that the step held.
        seconds: of each timed step, by phase and segment.
        totals: of each visit, the seconds of its timed steps.
        first_s: of each visit, the seconds of its first step.
    """

    plan: Plan
    attribution: Attribution | None = None
    calls: tuple[str, ...] = ()
    batch_bytes: int = 0
    seconds: list[dict[tuple[Phase, int], float]] = field(default_factory=list)
    totals: list[list[float]] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)

    @property
    def fastest(self) -> int:
        """Return the number of the fastest timed step."""
        steps = [total for visit in self.totals for total in visit]
        return steps.index(min(steps))

    def only(self, number: int) -> Choice:
        """Return the same with one timed step alone."""
        total = [total for visit in self.totals for total in visit][number]
        return replace(self, seconds=[self.seconds[number]], totals=[[total]])


def without_copies(choices: Mapping[Probe, Choice]) -> dict[Probe, Choice]:
    """Return what was traced without 16-bit borders that make no difference: where units return fp32 by themselves."""
    return {probe: choice for probe, choice in choices.items() if not is_copy(probe, choices)}


def is_copy(probe: Probe, choices: Mapping[Probe, Choice]) -> bool:
    """Tell whether 16-bit borders were seen to make no difference in a precision: then they make none in any plan."""
    if not probe.passes_16_bit:
        return False
    pairs = [(seen, replace(seen, passes_16_bit=False)) for seen in choices if seen.passes_16_bit]
    alike = [one for one, other in pairs if other in choices and known(choices[one]) == known(choices[other])]
    return any(one.precision == probe.precision for one in alike)


def unlikeness(choices: Mapping[Probe, Choice], recomputable: Collection[str]) -> float:
    """Return the largest factor between times that should agree, in the fastest step seen of each plan.

    Units run forward as long whether they save or recompute, and recomputing adds that to their backward pass.

    Args:
        choices: what was seen under every homogeneous plan.
        recomputable: names of the units whose storage can be chosen.
    """
    factors = [1.0]
    for probe, choice in choices.items():
        other = choice_name(Precision(probe.precision), Storage.RECOMPUTE)
        twin = choices.get(replace(probe, choice=other))
        if probe.choice == other or twin is None or not (choice.seconds and twin.seconds):
            continue
        (forward, backward), (again, longer) = (_passes(one, recomputable) for one in (choice, twin))
        pairs = [(forward, again), (forward + backward, longer)]
        factors += [max(one / two, two / one) for one, two in pairs if one and two]
    return max(factors)


def _passes(choice: Choice, names: Collection[str]) -> tuple[float, float]:
    """Return the seconds of some units' forward and backward passes in the fastest step."""
    seconds = choice.seconds[choice.fastest]
    own = [2 * number + 1 for number, unit in enumerate(choice.calls) if unit in names]
    return sum(seconds.get(("forward", i), 0.0) for i in own), sum(seconds.get(("backward", i), 0.0) for i in own)


def share_seconds(choices: Mapping[Probe, Choice], space: PlanSpace) -> None:
    """Give calls of units that are alike (kind, parameters, bytes saved) the median of what was timed of them."""
    kinds = {unit.name: (unit.kind, unit.num_parameters) for unit in space.units}
    for choice in choices.values():
        alike: dict[object, list[int]] = {}
        for number, unit in enumerate(choice.calls):
            if unit in kinds:
                index = 2 * number + 1
                alike.setdefault((kinds[unit], known(choice).saved[index]), []).append(index)
        for seconds in choice.seconds:
            for indices in alike.values():
                for phase in ("forward", "backward"):
                    shared = statistics.median(seconds.get((phase, index), 0.0) for index in indices)
                    seconds.update({(phase, index): shared for index in indices})


def all_tables(
    choices: Mapping[Probe, Choice], batch_size: int, space: PlanSpace
) -> tuple[tuple[StepTable, ...], dict[str, tuple[StepTable, ...]]]:
    """Return the costs of a step at every k.

    Args:
        choices: what was seen under every homogeneous plan.
        batch_size: samples in a batch.
        space: the plans.

    Returns:
        For plans of different precisions, ascending in k; and by the name of a 16-bit precision for those that use it
        everywhere, where that makes a difference. A k that was not seen is interpolated between two that were.
    """

    def tables(*, passing: str | None) -> tuple[StepTable, ...]:
        found = []
        for k in sorted({probe.accumulation_steps for probe in choices}):
            own = {
                probe.choice: choice
                for probe, choice in choices.items()
                if probe.accumulation_steps == k and passing == (probe.precision if probe.passes_16_bit else None)
            }
            if own:
                found.append(step_table(k, micro_batch_of(k, batch_size, space), own, space.recomputable))
        return with_all_ks(bounded(found), batch_size, space) if found else ()

    passing = dict.fromkeys(probe.precision for probe in choices if probe.passes_16_bit)
    return tables(passing=None), {precision: tables(passing=precision) for precision in passing}


def step_table(
    accumulation_steps: int, micro_batch: int, own: Mapping[str, Choice], recomputable: Collection[str]
) -> StepTable:
    """Return the costs of a step at one k.

    Args:
        accumulation_steps: k.
        micro_batch: samples in its largest micro-batch.
        own: what was seen at this k, by the name of the choice that all units took.
        recomputable: names of the units whose storage can be chosen.
    """
    calls = next(iter(own.values())).calls
    segments = tuple(_segment(index, calls, own, recomputable) for index in range(2 * len(calls) + 1))
    return StepTable(
        accumulation_steps=accumulation_steps,
        micro_batch=micro_batch,
        segments=segments,
        boundaries=_merged_boundaries(calls, own),
        update_peak_bytes=max(known(choice).update_peak for choice in own.values()),
        update_s=statistics.median(seconds[("update", -1)] for choice in own.values() for seconds in choice.seconds),
        batch_bytes=max(choice.batch_bytes for choice in own.values()),
    )


def known(choice: Choice) -> Attribution:
    """Return what a choice's trace showed."""
    assert choice.attribution is not None
    return choice.attribution


def bounded(tables: Sequence[StepTable]) -> tuple[StepTable, ...]:
    """Return the tables with costs for choices that ran out of memory, from two smaller micro-batches.

    Bytes are extrapolated along a straight line in the size of the micro-batch, which is what they follow nearly;
    seconds are taken from the nearest. Where no two others are known, the choice stays without a cost.

    Args:
        tables: of all k, ascending.
    """
    names: list[set[str]] = [
        set().union(*(table.segments[i].costs for table in tables)) for i in range(len(tables[0].segments))
    ]
    filled = []
    for number, table in enumerate(tables):
        if all(set(segment.costs) == known for segment, known in zip(table.segments, names, strict=True)):
            filled.append(table)
            continue
        segments = []
        for index, segment in enumerate(table.segments):
            costs = dict(segment.costs)
            for name in sorted(names[index] - set(costs)):
                known_at = [
                    (other.micro_batch, other.segments[index].costs[name])
                    for other in tables[number + 1 :]
                    if name in other.segments[index].costs
                ]
                if len(known_at) >= 2:
                    costs[name] = _extrapolated(table.micro_batch, known_at[0], known_at[1])
            segments.append(replace(segment, costs=costs))
        boundaries = _with_keepers_of(table, tables[number + 1 :])
        filled.append(replace(table, segments=tuple(segments), boundaries=boundaries))
    return tuple(filled)


def micro_batch_of(accumulation_steps: int, batch_size: int, space: PlanSpace) -> int:
    """Return the samples of the largest micro-batch at a k."""
    return -(-batch_size // accumulation_steps) if space.k_splits else batch_size


def with_all_ks(tables: Sequence[StepTable], batch_size: int, space: PlanSpace) -> tuple[StepTable, ...]:
    """Return the tables with those of every k that lies between two of them.

    Bytes follow the size of the micro-batch along a straight line, seconds follow k: what a batch needs in all, and
    what each micro-batch needs besides. A peak is the largest of several such lines, so that it lies below the chord.

    Args:
        tables: of some k, ascending.
        batch_size: samples in a batch.
        space: names all k.
    """
    known_ks = [table.accumulation_steps for table in tables]
    found = {table.accumulation_steps: table for table in tables}
    for k in space.accumulation_choices:
        low = max((number for number, own in enumerate(known_ks) if own < k), default=None)
        if k in found or low is None or low + 1 == len(tables):
            continue
        table = _between(tables[low], tables[low + 1], k, micro_batch_of(k, batch_size, space))
        if table is not None:
            found[k] = table
    return tuple(found[k] for k in sorted(found))


def _between(low: StepTable, high: StepTable, k: int, micro_batch: int) -> StepTable | None:
    """Return the table of a k between two others; ``None`` where these do not look alike."""
    shapes = [
        (
            [(segment.unit, set(segment.costs)) for segment in table.segments],
            [boundary.born for boundary in table.boundaries],
        )
        for table in (low, high)
    ]
    if shapes[0] != shapes[1]:
        return None
    of_k = (k - low.accumulation_steps) / (high.accumulation_steps - low.accumulation_steps)
    narrower = low.micro_batch - high.micro_batch
    of_size = (low.micro_batch - micro_batch) / narrower if narrower else of_k

    def line(first: int, second: int) -> int:
        return math.ceil(first + (second - first) * of_size)

    def peaks(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
        own = line(first[0], second[0])
        # A step of one micro-batch has no later one: it differs from the first by what does not depend on its size.
        alone = low.accumulation_steps == 1
        return own, max(0, second[1] + own - second[0]) if alone else line(first[1], second[1])

    def between(first: Cost, second: Cost) -> Cost:
        return Cost(
            forward_s=first.forward_s + (second.forward_s - first.forward_s) * of_k,
            backward_s=first.backward_s + (second.backward_s - first.backward_s) * of_k,
            saved_bytes=line(first.saved_bytes, second.saved_bytes),
            forward_peak_bytes=peaks(first.forward_peak_bytes, second.forward_peak_bytes),
            backward_peak_bytes=peaks(first.backward_peak_bytes, second.backward_peak_bytes),
        )

    pairs = zip(low.segments, high.segments, strict=True)
    # A step of one micro-batch may leave no gradients, where ranks share them out at once: the other one tells.
    segments = [
        replace(other, costs={name: between(cost, other.costs[name]) for name, cost in one.costs.items()})
        for one, other in pairs
    ]
    boundaries = [
        replace(
            one,
            last_use=max(one.last_use, other.last_use),
            size_bytes=line(one.size_bytes, other.size_bytes),
            held=one.held or other.held,
        )
        for one, other in zip(_with_keepers_of(low, [high]), high.boundaries, strict=True)
    ]
    return StepTable(
        accumulation_steps=k,
        micro_batch=micro_batch,
        segments=tuple(segments),
        boundaries=tuple(boundaries),
        update_peak_bytes=math.ceil(low.update_peak_bytes + (high.update_peak_bytes - low.update_peak_bytes) * of_k),
        update_s=low.update_s + (high.update_s - low.update_s) * of_k,
        batch_bytes=math.ceil(low.batch_bytes + (high.batch_bytes - low.batch_bytes) * of_k),
    )


def _with_keepers_of(table: StepTable, others: Sequence[StepTable]) -> tuple[Boundary, ...]:
    """Return a table's boundaries with keepers that only other tables' choices showed."""
    boundaries = list(table.boundaries)
    for other in others:
        if len(other.boundaries) != len(boundaries):
            continue
        for index, (own, seen) in enumerate(zip(boundaries, other.boundaries, strict=True)):
            keepers = {
                segment: tuple(dict.fromkeys((*own.keepers.get(segment, ()), *seen.keepers.get(segment, ()))))
                for segment in {**own.keepers, **seen.keepers}
            }
            boundaries[index] = replace(own, keepers=keepers)
    return tuple(boundaries)


def _extrapolated(micro_batch: int, near: tuple[int, Cost], far: tuple[int, Cost]) -> Cost:
    (near_size, one), (far_size, two) = near, far
    if near_size == far_size:
        return one
    share = (micro_batch - near_size) / (near_size - far_size)

    def line(a: int, b: int) -> int:
        return round(a + (a - b) * share)

    def lines(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        return line(a[0], b[0]), line(a[1], b[1])

    return Cost(
        forward_s=one.forward_s,
        backward_s=one.backward_s,
        saved_bytes=line(one.saved_bytes, two.saved_bytes),
        forward_peak_bytes=lines(one.forward_peak_bytes, two.forward_peak_bytes),
        backward_peak_bytes=lines(one.backward_peak_bytes, two.backward_peak_bytes),
    )


def _segment(index: int, calls: Sequence[str], own: Mapping[str, Choice], recomputable: Collection[str]) -> Segment:
    costs = {name: _cost(index, choice) for name, choice in own.items()}
    gradients = next(known(choice).gradients[index] for choice in own.values())
    if index % 2 == 0:
        return Segment(unit=None, gradient_bytes=gradients, costs={FIXED: most(list(costs.values()))})
    unit = calls[index // 2]
    costs = no_free_recomputation(costs) if unit in recomputable else without_storage(costs)
    return Segment(unit=unit, gradient_bytes=gradients, costs=costs)


def no_free_recomputation(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """Return the costs with recomputation at least as long as saving: less can only be noise."""
    raised = dict(costs)
    for name, cost in costs.items():
        precision, _, storage = name.partition("/")
        saving = costs.get(f"{precision}/{Storage.SAVE}")
        if Storage(storage).recomputes and saving is not None and cost.seconds < saving.seconds:
            raised[name] = replace(cost, backward_s=cost.backward_s + saving.seconds - cost.seconds)
    return raised


def without_storage(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """Return the costs of a unit that always saves: what was seen in both kinds of plans, as one."""
    by_precision: dict[str, list[Cost]] = {}
    for name, cost in costs.items():
        by_precision.setdefault(name.partition("/")[0], []).append(cost)
    return {f"{precision}/{Storage.SAVE}": most(found) for precision, found in by_precision.items()}


def most(costs: Sequence[Cost]) -> Cost:
    """Return the cost of a piece that no choice changes: median seconds, largest bytes."""
    return Cost(
        forward_s=statistics.median(cost.forward_s for cost in costs),
        backward_s=statistics.median(cost.backward_s for cost in costs),
        saved_bytes=max(cost.saved_bytes for cost in costs),
        forward_peak_bytes=largest([cost.forward_peak_bytes for cost in costs]),
        backward_peak_bytes=largest([cost.backward_peak_bytes for cost in costs]),
    )


def largest(pairs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the largest of each, in first and in later micro-batches."""
    return max(first for first, _ in pairs), max(later for _, later in pairs)


def _cost(index: int, choice: Choice) -> Cost:
    seen = known(choice)

    def median(phase: Phase) -> float:
        return statistics.median(seconds.get((phase, index), 0.0) for seconds in choice.seconds)

    return Cost(
        forward_s=median("forward"),
        backward_s=median("backward"),
        saved_bytes=seen.saved[index],
        forward_peak_bytes=seen.forward_peaks[index],
        backward_peak_bytes=seen.backward_peaks[index],
    )


def _merged_boundaries(calls: Sequence[str], own: Mapping[str, Choice]) -> tuple[Boundary, ...]:
    """Return the boundaries as all traces of one k together show them."""
    keys: dict[BoundaryKey, None] = {key: None for choice in own.values() for key in known(choice).boundaries}
    merged = []
    for key in sorted(keys):
        seen = {name: passing for name, choice in own.items() if (passing := known(choice).boundaries.get(key))}
        boundary = as_boundary(key, list(seen.values()))
        keepers: dict[int, list[str]] = {}
        for name, passing in seen.items():
            for segment in passing.keepers:
                keepers.setdefault(segment, []).append(name)
        # What the code between units keeps, it keeps under every plan.
        held = boundary.held or any(segment % 2 == 0 for segment in keepers)
        units = {segment: tuple(names) for segment, names in sorted(keepers.items()) if segment % 2}
        merged.append(replace(boundary, held=held, keepers=units))
    return tuple(merged)
