"""Assemble a profile from a record of steps.

All sources of profiles share this code. It runs nothing, and does not depend on how the steps were obtained.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autotune.choices import STORAGES
from autotune.cost_model.profile import FIXED, Boundary, Calibration, Cost, Profile, Segment, StepTable
from autotune.mechanics.step_trace import Phase
from autotune.plan import PlanSpace, Precision, Storage
from autotune.profiling.attribution import Passing, as_boundary
from autotune.profiling.step_record import StepRecord, StepsAtK, TimedStep, TracedStep, choice_at, common_precision
from autotune.profiling.unseen_costs import (
    SizedCost,
    UnitKind,
    kind_of,
    lowered_by_like_units,
    micro_batch_of,
    most,
    none_faster_than_saving,
    saving_ratios,
    with_all_ks,
    with_bounds,
    with_missing_choices,
)
from autotune.units import Unit

# A pass of a segment under a choice.
_Pass = tuple[Phase, int, str]


def assemble(record: StepRecord, space: PlanSpace) -> Profile:
    """Return the profile that follows from a record of steps.

    Args:
        record: the record; at least one step in it has fp32 borders.
        space: the plans that are allowed.

    Returns:
        The profile, without what only the source of the steps knows: calibration to whole plans, noise, warnings etc.
    """
    regimes: dict[str | None, tuple[StepTable, ...]] = {}
    for steps in sorted(record.steps, key=lambda one: one.accumulation_steps):
        micro_batch = micro_batch_of(steps.accumulation_steps, record.batch_size, space)
        table = _step_table(steps, space, micro_batch, is_sparse=record.is_sparse)
        regimes[steps.borders] = (*regimes.get(steps.borders, ()), table)
    if not record.is_sparse:
        regimes = {
            borders: with_all_ks(with_missing_choices(tables), record.batch_size, space)
            for borders, tables in regimes.items()
        }
    tables = regimes.pop(None, ())
    ks = tuple(table.accumulation_steps for table in tables)
    traces = [trace for steps in record.steps for trace in steps.traces]
    called = {name for trace in traces for name in trace.calls}
    precisions = {one: None for trace in traces for one in trace.plan.precision.values() or (Precision.INHERIT,)}
    return Profile(
        job=record.job,
        device=record.device,
        fingerprint="",
        batching="fixed" if space.k_splits else "adaptive",
        batch_size=record.batch_size,
        units=tuple(unit for unit in space.units if unit.name in called),
        accumulation_choices=ks,
        precisions=tuple(dict.fromkeys(one for one in (*space.precisions, *precisions) if one in precisions)),
        static_bytes=record.static_bytes,
        tables=tables,
        # A k that could be interpolated in one precision alone is in no plan.
        uniform_tables={
            borders: tuple(one for one in found if one.accumulation_steps in ks)
            for borders, found in regimes.items()
            if borders is not None
        },
        calibration=Calibration(),
        noise_frac=0.0,
        switch_s=0.0,
        seconds=0.0,
        steps=len(traces),
        length_spread=record.length_spread,
        locked=space.locked,
    )


def _step_table(steps: StepsAtK, space: PlanSpace, micro_batch: int, *, is_sparse: bool) -> StepTable:
    """Return the costs of a step at one k."""
    traces, calls = steps.traces, steps.traces[0].calls
    by_name = {unit.name: unit for unit in space.units}
    batch_bytes = max(trace.batch_bytes for trace in traces)
    units = [by_name.get(calls[index // 2]) if index % 2 else None for index in range(2 * len(calls) + 1)]
    seconds = seconds_by_choice(steps.timed, calls, batch_bytes, space.units if is_sparse else ())
    kinds = _by_kind(traces)
    seen = [lowered_by_like_units([_costs(index, own, seconds) for index in range(len(units))], units) for own in kinds]
    ratios = [saving_ratios(costs, units) for costs in seen]
    segments = []
    for index, unit in enumerate(units):
        named: dict[str, list[Cost]] = {}
        for costs in seen:
            found = costs[index]
            if unit is not None:
                found = found if unit.recomputable else _without_storage(found)
                if found and is_sparse and unit.recomputable:
                    found = with_bounds(found, [one for pairs in ratios for one in pairs.get(kind_of(unit), ())])
            for name, cost in found.items():
                named.setdefault(name, []).append(cost)
        found = {name: most(costs) for name, costs in named.items()}
        if unit is not None:
            found = none_faster_than_saving(
                {
                    name: replace(
                        cost,
                        forward_s=seconds.get(("forward", index, name), cost.forward_s),
                        backward_s=seconds.get(("backward", index, name), cost.backward_s),
                    )
                    for name, cost in found.items()
                }
            )
        gradient_bytes = max(own[0].attribution.gradients[index] for own in kinds)
        segments.append(Segment(unit=None if unit is None else unit.name, gradient_bytes=gradient_bytes, costs=found))
    return StepTable(
        accumulation_steps=steps.accumulation_steps,
        micro_batch=micro_batch,
        segments=tuple(segments),
        boundaries=_boundaries(traces, by_name, is_sparse=is_sparse),
        update_peak_bytes=max(trace.attribution.update_peak for trace in traces),
        update_s=seconds.get(("update", -1, FIXED), 0.0),
        batch_bytes=batch_bytes,
    )


def _by_kind(traces: Sequence[TracedStep]) -> list[list[TracedStep]]:
    """Return the traces of each kind of steps."""
    kinds: dict[frozenset[str] | None, list[TracedStep]] = {}
    for trace in traces:
        kinds.setdefault(trace.kind, []).append(trace)
    return list(kinds.values())


# Seconds.


def seconds_by_choice(
    steps: Sequence[TimedStep], calls: Sequence[str], batch_bytes: int, alike: Collection[Unit] = ()
) -> dict[_Pass, float]:
    """Return the seconds of each pass of each segment under each choice that was run.

    If a pass was only traced, its seconds are divided by the factor by which tracing slowed the other passes.

    Args:
        steps: timed and traced steps.
        calls: the units that each step called, in order.
        batch_bytes: bytes of the batch to scale the seconds to; seconds are proportional to a batch's bytes.
        alike: units for which each 16-bit precision is assumed to have the same effect on all units of a kind.

    Returns:
        Seconds summed over all micro-batches of a step, by phase, segment and choice.
    """
    timed, traced = (
        _shared_by_kind(
            _medians([step for step in steps if step.traced is is_traced], calls, batch_bytes),
            calls,
            {unit.name: kind_of(unit) for unit in alike},
        )
        for is_traced in (False, True)
    )
    # A trace shows only the part of an update that lies between micro-batches.
    both = [key for key in timed if key in traced and key[0] != "update"]
    longer = sum(traced[key] for key in both)
    scale = sum(timed[key] for key in both) / longer if longer > 0 else 1.0
    return {key: scale * value for key, value in traced.items()} | timed


def _medians(steps: Sequence[TimedStep], calls: Sequence[str], batch_bytes: int) -> dict[_Pass, float]:
    found: dict[_Pass, list[float]] = {}
    for step in steps:
        for (phase, segment), value in step.seconds.items():
            key = phase, segment, choice_at(step.plan, calls, segment)
            found.setdefault(key, []).append(value * (batch_bytes / step.batch_bytes))
    return {key: statistics.median(values) for key, values in found.items()}


def _shared_by_kind(
    seconds: dict[_Pass, float], calls: Sequence[str], kinds: Mapping[str, UnitKind]
) -> dict[_Pass, float]:
    """Return the seconds, with each 16-bit precision changing all units of a kind by the same factor.

    Otherwise some of many like units would seem faster in a precision by chance, and be assigned to it.
    """
    sums: dict[tuple[Phase, UnitKind, str], tuple[float, float]] = {}
    pairs = {}
    for (phase, segment, name), value in seconds.items():
        precision, _, storage = name.partition("/")
        own = seconds.get((phase, segment, f"{Precision.INHERIT}/{storage}"))
        kind = None if segment < 0 or segment % 2 == 0 else kinds.get(calls[segment // 2])
        if kind is None or own is None or precision == Precision.INHERIT:
            continue
        first, other = sums.get((phase, kind, name), (0.0, 0.0))
        sums[phase, kind, name] = first + own, other + value
        pairs[phase, segment, name] = own, (phase, kind, name)
    shared = {key: own * sums[like][1] / max(sums[like][0], 1e-12) for key, (own, like) in pairs.items()}
    return seconds | shared


# Memory.


def _costs(index: int, traces: Sequence[TracedStep], seconds: Mapping[_Pass, float]) -> dict[str, SizedCost]:
    """Return the costs of a segment by choice, each from the steps with the largest batch under that choice."""
    found: dict[str, list[TracedStep]] = {}
    for trace in traces:
        if index % 2 and trace.kind is not None and trace.calls[index // 2] not in trace.kind:
            # Steps of this kind do not call the unit.
            continue
        found.setdefault(choice_at(trace.plan, trace.calls, index), []).append(trace)
    costs = {}
    for name, own in found.items():
        size = max(trace.traced_bytes for trace in own)
        largest = [
            Cost(
                forward_s=seconds.get(("forward", index, name), 0.0),
                backward_s=seconds.get(("backward", index, name), 0.0),
                saved_bytes=trace.attribution.saved[index],
                forward_peak_bytes=trace.attribution.forward_peaks[index],
                backward_peak_bytes=trace.attribution.backward_peaks[index],
            )
            for trace in own
            if trace.traced_bytes == size
        ]
        costs[name] = SizedCost(most(largest), size)
    return costs


def _without_storage(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """Return the costs of a unit that always saves: one per precision, whatever storage the plan had."""
    by_precision: dict[str, list[Cost]] = {}
    for name, cost in costs.items():
        by_precision.setdefault(name.partition("/")[0], []).append(cost)
    return {f"{precision}/{Storage.SAVE}": most(found) for precision, found in by_precision.items()}


def _boundaries(traces: Sequence[TracedStep], units: Mapping[str, Unit], *, is_sparse: bool) -> tuple[Boundary, ...]:
    """Return the boundaries, merged from all traces of one k."""
    merged = []
    for key in sorted({key for trace in traces for key in trace.attribution.boundaries}):
        seen = [(trace, passing) for trace in traces if (passing := trace.attribution.boundaries.get(key))]
        largest = {
            kind: max(trace.traced_bytes for trace, _ in seen if trace.kind == kind)
            for kind in {trace.kind for trace, _ in seen}
        }
        boundary = as_boundary(key, [passing for _, passing in seen])
        # Views of one block in some trace: what keeps one of them keeps all.
        alike = {one for _, passing in seen for one in passing.shares}
        keeping = [
            (trace, one) for trace in traces for k in alike or {key} if (one := trace.attribution.boundaries.get(k))
        ]
        merged.append(
            replace(
                boundary,
                size_bytes=max(passing.size for trace, passing in seen if trace.traced_bytes == largest[trace.kind]),
                # Code between units keeps the same tensors under every plan.
                held=boundary.held or any(segment % 2 == 0 for _, passing in seen for segment in passing.keepers),
                keepers=_possible_keepers(traces, keeping, units) if is_sparse else _seen_keepers(keeping),
            )
        )
    return tuple(merged)


def _seen_keepers(seen: Sequence[tuple[TracedStep, Passing]]) -> dict[int, tuple[str, ...]]:
    """Return the segments that kept a boundary in a trace, and under which choices."""
    keepers: dict[int, dict[str, None]] = {}
    for trace, passing in seen:
        # A recomputing unit that is frozen, and whose inputs have no gradient, keeps nothing.
        for segment in passing.keepers if passing.stays else ():
            keepers.setdefault(segment, {})[choice_at(trace.plan, trace.calls, segment)] = None
    return {segment: tuple(names) for segment, names in sorted(keepers.items()) if segment % 2}


def _possible_keepers(
    traces: Sequence[TracedStep], seen: Sequence[tuple[TracedStep, Passing]], units: Mapping[str, Unit]
) -> dict[int, tuple[str, ...]]:
    """Return the segments that may keep a boundary, and under which choices: an upper bound for choices not run.

    A segment that receives the boundary may keep it unless the segment saves. A segment that kept it in any step may
    keep it unless the segment recomputes.
    """
    calls = traces[0].calls
    keepers = {segment for _, passing in seen for segment in passing.keepers}
    users = {segment for _, passing in seen for segment in passing.users}
    precisions = dict.fromkeys(common_precision(trace.plan) for trace in traces)
    names = {}
    for segment in sorted(segment for segment in keepers | users if segment % 2):
        unit = units.get(calls[segment // 2])
        known = STORAGES if unit is not None and unit.recomputable else STORAGES[:1]
        storages = [storage for storage in known if segment in _may_keep(storage, keepers, users)]
        names[segment] = tuple(f"{precision}/{storage}" for precision in precisions for storage in storages)
    return {segment: choices for segment, choices in names.items() if choices}


def _may_keep(storage: Storage, keepers: set[int], users: set[int]) -> set[int]:
    if storage.recomputes:
        return users
    return keepers if storage is Storage.SAVE else users | keepers
