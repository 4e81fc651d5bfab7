"""Take a profile from the steps of a live run: two or three traced ones and a few timed ones.

Storage changes no bit of training, so its choices are seen on the run's own steps. What has not been run (a plan that
may not fit) is bounded from above by what has: while a unit is recomputed in backward, all that it would save is alive.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autotune.cost_model.profile import FIXED, Boundary, Calibration, Cost, Profile, Segment, StepTable, choice_name
from autotune.cost_model.time_model import summed_seconds
from autotune.mechanics.step_trace import Phase, StepTrace
from autotune.plan import Plan, PlanSpace, Precision, Storage
from autotune.profiling.attribution import Attribution, attribute
from autotune.profiling.profile_assembly import largest, most, no_free_recomputation, without_storage
from autotune.units import Unit

# On top of bytes that are bounded and not seen.
_UNSEEN_MARGIN = 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a traced step showed of one plan at one k.

    Attributes:
        plan: the plan.
        calls: the units that its step called, in order.
        attribution: who kept what.
        batch_bytes: the batch that it is brought to.
        traced_bytes: the batch that it held.
        static_bytes: model and optimizer state.
        seconds: by phase and segment; tracing makes them longer, so that they stand in until a choice was timed.
    """

    plan: Plan
    calls: tuple[str, ...]
    attribution: Attribution
    batch_bytes: int
    traced_bytes: int
    static_bytes: int
    seconds: Mapping[tuple[Phase, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """The seconds of a step that was watched and not traced.

    Attributes:
        plan: the plan that it ran under.
        batch_bytes: the batch that it held.
        seconds: by phase and segment.
    """

    plan: Plan
    batch_bytes: int
    seconds: Mapping[tuple[Phase, int], float]


_Step = TypeVar("_Step", Seen, Timed)
# A unit's kind, and its parameters.
_Kind = tuple[str, int]


def seen_of(
    plan: Plan,
    trace: StepTrace,
    seconds: dict[tuple[Phase, int], float],
    *,
    batch_bytes: int,
    static_bytes: int,
    gradients: Sequence[int] | None,
) -> Seen:
    """Return what a traced step showed.

    Args:
        plan: the plan that it ran under.
        trace: the trace.
        seconds: of each phase and segment, in all micro-batches.
        batch_bytes: the batch that it held.
        static_bytes: model and optimizer state.
        gradients: what each segment's backward pass leaves, as another trace showed it.
    """
    recomputed = list(plan.recomputed)
    return Seen(
        plan=plan,
        calls=trace.calls,
        attribution=attribute(trace, recomputed, gradients),
        batch_bytes=batch_bytes,
        traced_bytes=batch_bytes,
        static_bytes=static_bytes,
        seconds=seconds,
    )


class _Clock:
    """Answer how long a segment's pass takes under a choice, at one k and one size of batch.

    What was timed counts; what was only traced is brought to the same scale by what was both.

    Args:
        calls: the units that a step calls, in order.
        seen: traced steps.
        timed: timed steps.
        reference_bytes: the size of batch; seconds are taken to be in proportion to it.
        kinds: what units that cost the same have in common, by unit.
    """

    def __init__(
        self,
        calls: Sequence[str],
        seen: Sequence[Seen],
        timed: Sequence[Timed],
        reference_bytes: int,
        kinds: Mapping[str, _Kind],
    ) -> None:
        self._calls = calls
        self._kinds = kinds
        self._timed = self._medians([(one.plan, one.seconds, reference_bytes / one.batch_bytes) for one in timed])
        traced = [(one.plan, one.seconds, reference_bytes / one.traced_bytes) for one in seen]
        self._traced = self._medians(traced)
        # Of an update a trace shows what lies between batches alone.
        both = {key for key in self._timed.keys() & self._traced.keys() if key[0] != "update"}
        longer = sum(self._traced[key] for key in both)
        self._scale = sum(self._timed[key] for key in both) / longer if longer > 0 else 1.0

    def seconds(self, phase: Phase, segment: int, choice: str) -> float:
        """Return the seconds of a pass, over all micro-batches of a step; 0 if it was never seen."""
        key = phase, segment, choice
        return self._timed.get(key, self._scale * self._traced.get(key, 0.0))

    def corrected(self, segment: int, costs: Mapping[str, Cost], seen: Collection[str]) -> dict[str, Cost]:
        """Return a segment's costs with the seconds of choices that were run, though none of their traces is known.

        Args:
            segment: the segment.
            costs: by choice.
            seen: choices whose traces are known; the others' seconds are bounds.
        """

        def seconds(phase: Phase, name: str, otherwise: float) -> float:
            key = phase, segment, name
            ran = key in self._timed or (name not in seen and key in self._traced)
            return self.seconds(*key) if ran else otherwise

        found = {
            name: replace(
                cost,
                forward_s=seconds("forward", name, cost.forward_s),
                backward_s=seconds("backward", name, cost.backward_s),
            )
            for name, cost in costs.items()
        }
        return dict(no_free_recomputation(found))

    def _medians(
        self, steps: Sequence[tuple[Plan, Mapping[tuple[Phase, int], float], float]]
    ) -> dict[tuple[Phase, int, str], float]:
        found: dict[tuple[Phase, int, str], list[float]] = {}
        for plan, seconds, share in steps:
            for (phase, segment), value in seconds.items():
                found.setdefault((phase, segment, _choice(plan, self._calls, segment)), []).append(value * share)
        return self._alike({key: statistics.median(values) for key, values in found.items()})

    def _alike(self, seconds: dict[tuple[Phase, int, str], float]) -> dict[tuple[Phase, int, str], float]:
        """Return the seconds with what a 16-bit precision does to a unit's the same for all units of its kind.

        Of many units that are alike, some would else look faster in it by chance, and be chosen for that.
        """
        sums: dict[tuple[Phase, _Kind, str], tuple[float, float]] = {}
        pairs = {}
        for (phase, segment, name), value in seconds.items():
            precision, _, storage = name.partition("/")
            own = seconds.get((phase, segment, f"{Precision.INHERIT}/{storage}"))
            kind = None if segment < 0 or segment % 2 == 0 else self._kinds.get(self._calls[segment // 2])
            if kind is None or own is None or precision == Precision.INHERIT:
                continue
            first, other = sums.get((phase, kind, name), (0.0, 0.0))
            sums[phase, kind, name] = first + own, other + value
            pairs[phase, segment, name] = own, (phase, kind, name)
        shared = {key: own * sums[like][1] / max(sums[like][0], 1e-12) for key, (own, like) in pairs.items()}
        return seconds | shared


def _choice(plan: Plan, calls: Sequence[str], segment: int) -> str:
    """Return what a plan chooses for a segment; code between units, and the update, have no choice."""
    if segment < 0 or segment % 2 == 0:
        return FIXED
    unit = calls[segment // 2]
    return choice_name(plan.precision_of(unit), plan.storage_of(unit))


def build_profile(
    job: str,
    device: str,
    space: PlanSpace,
    seen: Sequence[Seen],
    timed: Sequence[Timed] = (),
    *,
    batch_size: int,
    batching: str,
    length_spread: float = 0.0,
    growth: float = 2.0,
) -> Profile:
    """Return a profile of what was seen so far, with bounds for what was not.

    Args:
        job: what the run is called.
        device: what the device is called.
        space: the plans that the run allows.
        seen: what was seen, at least one plan; of each k, precisions the same everywhere.
        timed: steps that were timed, under any plans of those k.
        batch_size: samples in a batch.
        batching: ``fixed`` or ``adaptive``.
        length_spread: of the batches' bytes; see :class:`autotune.cost_model.profile.Profile`.
        growth: exponent with which memory grows with a batch's size.
    """
    own = seen
    if batching == "adaptive":
        seen = [*seen, *_longer(seen, space.accumulation_choices)]
    else:
        seen = own = [*seen, *_whole(seen)]
    reference_bytes = max(one.batch_bytes for one in seen)
    ks = sorted({one.plan.accumulation_steps for one in seen})
    kinds = {unit.name: (unit.kind, unit.num_parameters) for unit in space.units}
    tables = tuple(
        _table(
            k,
            [_at_size(one, reference_bytes, growth) for one in seen if one.plan.accumulation_steps == k],
            _Clock(own[0].calls, _clocked(own, k, batching), _clocked(timed, k, batching), reference_bytes, kinds),
            space,
            batch_size,
        )
        for k in ks
    )
    called = {segment.unit for segment in tables[0].segments}
    profile = Profile(
        job=job,
        device=device,
        fingerprint="",
        batching=batching,
        batch_size=batch_size,
        units=tuple(unit for unit in space.units if unit.name in called),
        accumulation_choices=tuple(ks),
        precisions=tuple(dict.fromkeys(_precision(one.plan) for one in seen)),
        static_bytes=max(one.static_bytes for one in seen),
        tables=tables,
        uniform_tables={},
        calibration=Calibration(),
        noise_frac=0.0,
        switch_s=0.0,
        seconds=0.0,
        steps=len(seen),
        length_spread=length_spread,
    )
    return _fitted(profile, timed, reference_bytes)


def _whole(seen: Sequence[Seen]) -> list[Seen]:
    """Return what precisions would show at most at each k that only others were seen at, from the next larger one."""
    found = []
    for precision in dict.fromkeys(_precision(one.plan) for one in seen):
        alike = [one for one in seen if _precision(one.plan) == precision]
        known = {one.plan.accumulation_steps for one in alike}
        for k in {one.plan.accumulation_steps for one in seen} - known:
            more = min((other for other in known if other > k), default=max(known))
            for one in alike:
                if one.plan.accumulation_steps == more:
                    size = int(one.batch_bytes * max(more / k, 1))
                    grown = _at_size(one, size, 1.0)
                    found.append(
                        replace(grown, plan=one.plan.changed(accumulation_steps=k), batch_bytes=one.batch_bytes)
                    )
    return found


def _longer(seen: Sequence[Seen], ks: Sequence[int]) -> list[Seen]:
    """Return what steps of more batches would show: each batch after the first is like the second.

    Args:
        seen: what was seen; steps of several batches among it.
        ks: batches that a step may have.
    """
    several = sorted({one.plan.accumulation_steps for one in seen} - {1})
    if not several:
        return []
    own = [one for one in seen if one.plan.accumulation_steps == several[0]]
    return [_of_batches(one, k) for k in ks if k > several[0] and k not in several for one in own]


def _clocked(steps: Sequence[_Step], k: int, batching: str) -> list[_Step]:
    """Return the steps that tell the time of those at one k.

    Under adaptive batching these are all, each as if it had k batches: steps of each k alone, run when the machine was
    as busy as it happened to be, would tell k apart by that.
    """
    if batching == "adaptive":
        return [_of_batches(one, k) for one in steps]
    return [one for one in steps if one.plan.accumulation_steps == k]


def _of_batches(one: _Step, k: int) -> _Step:
    """Return a step as it would be with k batches and one update."""
    factor = k / one.plan.accumulation_steps
    seconds = {key: value * (1.0 if key[0] == "update" else factor) for key, value in one.seconds.items()}
    return replace(one, plan=one.plan.changed(accumulation_steps=k), seconds=seconds)


def _fitted(profile: Profile, timed: Sequence[Timed], reference_bytes: int) -> Profile:
    """Return the profile with its sums scaled to the whole steps that were timed."""
    ratios = [
        sum(one.seconds.values()) * reference_bytes / one.batch_bytes / total
        for one in timed
        if (total := summed_seconds(profile, one.plan)) > 0
    ]
    return replace(profile, calibration=Calibration(scale=statistics.median(ratios))) if ratios else profile


def _precision(plan: Plan) -> Precision:
    return next(iter(plan.precision.values()), Precision.INHERIT)


def _table(k: int, scaled: Sequence[Seen], clock: _Clock, space: PlanSpace, batch_size: int) -> StepTable:
    """Return the costs at one k, bounds filled in."""
    calls = scaled[0].calls
    reference_bytes = max(one.batch_bytes for one in scaled)
    segments = []
    by_name = {unit.name: unit for unit in space.units}
    sightings = [_sightings(index, calls, scaled, clock) for index in range(2 * len(calls) + 1)]
    kinds = [_kind(by_name.get(calls[index // 2])) if index % 2 else None for index in range(len(sightings))]
    costs = _refined(sightings, kinds)
    classes: dict[tuple[str, int], list[float]] = {}
    for kind, known in zip(kinds, costs, strict=True):
        if kind is not None:
            _note_ratio(classes, kind, known)
    gradients = scaled[0].attribution.gradients
    for index, known in enumerate(costs):
        unit = by_name.get(calls[index // 2]) if index % 2 else None
        if unit is None:
            one = Segment(unit=None, gradient_bytes=gradients[index], costs={FIXED: most(list(known.values()))})
        else:
            filled = _filled(known, unit, classes) if unit.recomputable else without_storage(known)
            costs_of = clock.corrected(index, filled, known)
            one = Segment(unit=unit.name, gradient_bytes=gradients[index], costs=costs_of)
        segments.append(one)
    return StepTable(
        accumulation_steps=k,
        micro_batch=-(-batch_size // k) if space.k_splits else batch_size,
        segments=tuple(segments),
        boundaries=_boundaries(scaled, calls, by_name),
        update_peak_bytes=max(one.attribution.update_peak for one in scaled),
        update_s=clock.seconds("update", -1, FIXED),
        batch_bytes=reference_bytes,
    )


def _at_size(one: Seen, reference_bytes: int, growth: float) -> Seen:
    """Return what was seen as it would be, at most, with a batch of the reference's size, which is no smaller."""
    factor = (reference_bytes / max(one.batch_bytes, 1)) ** growth
    if factor <= 1.0 + 1e-9:
        return one
    seen = one.attribution

    def grown(values: Iterable[int]) -> tuple[int, ...]:
        return tuple(int(value * factor) for value in values)

    pairs = {
        name: tuple((int(first * factor), int(later * factor)) for first, later in getattr(seen, name))
        for name in ("forward_peaks", "backward_peaks")
    }
    attribution = replace(
        seen,
        saved=grown(seen.saved),
        boundaries={key: replace(b, size=int(b.size * factor)) for key, b in seen.boundaries.items()},
        **pairs,  # type: ignore[arg-type]
    )
    return replace(one, attribution=attribution, batch_bytes=reference_bytes)


def _kind(unit: Unit | None) -> tuple[str, int] | None:
    """Return what units that cost the same have in common."""
    return None if unit is None else (unit.kind, unit.num_parameters)


def _sightings(index: int, calls: Sequence[str], seen: Sequence[Seen], clock: _Clock) -> dict[str, tuple[Cost, int]]:
    """Return what was seen of a segment at the largest batch, and how large that was, by the choice its unit had."""
    found: dict[str, list[tuple[int, Cost]]] = {}
    for one in seen:
        name = _choice(one.plan, calls, index)
        found.setdefault(name, []).append((one.traced_bytes, _cost(index, name, one.attribution, clock)))
    biggest = {name: max(size for size, _ in entries) for name, entries in found.items()}
    return {
        name: (most([cost for size, cost in entries if size == biggest[name]]), biggest[name])
        for name, entries in found.items()
    }


def _refined(
    sightings: Sequence[Mapping[str, tuple[Cost, int]]], kinds: Sequence[tuple[str, int] | None]
) -> list[dict[str, Cost]]:
    """Return each segment's costs; where a like unit was seen with a larger batch, its bytes are the better bound."""
    best: dict[tuple[tuple[str, int], str], tuple[int, list[Cost]]] = {}
    for kind, own in zip(kinds, sightings, strict=True):
        for name, (cost, size) in own.items():
            if kind is None:
                continue
            known = best.get((kind, name))
            if known is None or size > known[0]:
                best[kind, name] = size, [cost]
            elif size == known[0]:
                known[1].append(cost)
    refined = []
    for kind, own in zip(kinds, sightings, strict=True):
        costs = {name: cost for name, (cost, _) in own.items()}
        for name, (cost, size) in own.items():
            if kind is not None and best[kind, name][0] > size:
                costs[name] = _lower(cost, most(best[kind, name][1]))
        refined.append(costs)
    return refined


def _lower(own: Cost, like: Cost) -> Cost:
    """Return a cost with the bytes of a like unit's, margin added, where they are fewer."""

    def less(one: int, other: int) -> int:
        return min(one, int(other * _UNSEEN_MARGIN))

    def lesser(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
        return less(one[0], other[0]), less(one[1], other[1])

    return replace(
        own,
        saved_bytes=less(own.saved_bytes, like.saved_bytes),
        forward_peak_bytes=lesser(own.forward_peak_bytes, like.forward_peak_bytes),
        backward_peak_bytes=lesser(own.backward_peak_bytes, like.backward_peak_bytes),
    )


def _cost(index: int, choice: str, seen: Attribution, clock: _Clock) -> Cost:
    return Cost(
        forward_s=clock.seconds("forward", index, choice),
        backward_s=clock.seconds("backward", index, choice),
        saved_bytes=seen.saved[index],
        forward_peak_bytes=seen.forward_peaks[index],
        backward_peak_bytes=seen.backward_peaks[index],
    )


def _note_ratio(classes: dict[tuple[str, int], list[float]], kind: tuple[str, int], costs: Mapping[str, Cost]) -> None:
    """Note what a unit that was seen both ways saves, over what its recomputation showed to be alive."""
    for precision in {name.partition("/")[0] for name in costs}:
        save, again = costs.get(f"{precision}/{Storage.SAVE}"), costs.get(f"{precision}/{Storage.RECOMPUTE}")
        if save is not None and again is not None and max(again.backward_peak_bytes) > 0:
            ratio = save.saved_bytes / max(again.backward_peak_bytes)
            classes.setdefault(kind, []).append(ratio)


def _filled(
    costs: Mapping[str, Cost], unit: Unit, classes: Mapping[tuple[str, int], Sequence[float]]
) -> dict[str, Cost]:
    """Return the costs with a bound for each storage that was not seen, and recomputation never free."""
    filled = dict(costs)
    for precision in dict.fromkeys(name.partition("/")[0] for name in costs):
        save, again = f"{precision}/{Storage.SAVE}", f"{precision}/{Storage.RECOMPUTE}"
        if save not in filled:
            ratios = classes.get((unit.kind, unit.num_parameters), ())
            filled[save] = _save_bound(filled[again], min(max(ratios) * _UNSEEN_MARGIN, 1.0) if ratios else 1.0)
        elif again not in filled:
            filled[again] = _recompute_bound(filled[save])
    return dict(no_free_recomputation(filled))


def _save_bound(again: Cost, ratio: float) -> Cost:
    """Return at most what saving costs, from what recomputing did: then all that would be saved was alive too."""
    alive = again.backward_peak_bytes
    return Cost(
        forward_s=again.forward_s,
        backward_s=max(again.backward_s - again.forward_s, 0.0),
        saved_bytes=int(max(alive) * ratio),
        forward_peak_bytes=largest([alive, again.forward_peak_bytes]),
        backward_peak_bytes=alive,
    )


def _recompute_bound(save: Cost) -> Cost:
    """Return at most what recomputing costs, from what saving did: one more forward pass, within backward."""
    return Cost(
        forward_s=save.forward_s,
        backward_s=save.backward_s + save.forward_s,
        saved_bytes=0,
        forward_peak_bytes=save.forward_peak_bytes,
        backward_peak_bytes=largest([save.forward_peak_bytes, save.backward_peak_bytes]),
    )


def _boundaries(seen: Sequence[Seen], calls: Sequence[str], units: Mapping[str, Unit]) -> tuple[Boundary, ...]:
    """Return what passes between segments, kept by whoever was seen to keep it under any choice, or receives it."""
    merged = []
    for key in sorted({key for one in seen for key in one.attribution.boundaries}):
        sized = [
            (one.traced_bytes, one.attribution.boundaries[key]) for one in seen if key in one.attribution.boundaries
        ]
        passings = [passing for _, passing in sized]
        reference = max(size for size, _ in sized)
        keepers = {segment for passing in passings for segment in passing.keepers}
        users = {segment for passing in passings for segment in passing.users}
        last = [passing.last_use for passing in passings if passing.last_use is not None]
        held = any(passing.stays and not passing.keepers for passing in passings)
        names = {}
        for segment in sorted(segment for segment in keepers | users if segment % 2):
            unit = units.get(calls[segment // 2])
            recomputed = unit is not None and unit.recomputable
            precisions = dict.fromkeys(str(_precision(one.plan)) for one in seen)
            names[segment] = tuple(
                f"{precision}/{storage}"
                for precision in precisions
                for storage in Storage
                if (segment in keepers and not storage.recomputes)
                or (segment in users and recomputed and storage.recomputes)
            )
        merged.append(
            Boundary(
                born=key[0],
                last_use=max(last) if last else max(users, default=key[0]),
                size_bytes=max(passing.size for size, passing in sized if size == reference),
                held=held or any(segment % 2 == 0 for segment in keepers),
                keepers={segment: choices for segment, choices in names.items() if choices},
            )
        )
    return tuple(merged)
