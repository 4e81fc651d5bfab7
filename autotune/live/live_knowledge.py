"""What the traced and timed steps of a live run have shown, and the profile made from them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autotune.cost_model.profile import Profile
from autotune.live.attached import Attached, Step, StepAhead
from autotune.live.handed_sizes import DENSER, HandedSizes, size_of
from autotune.live.prediction_scores import Expected, Score
from autotune.live.step_uses import Tracing
from autotune.mechanics import devices
from autotune.mechanics.cutting import unevenness
from autotune.mechanics.step_trace import Phase, StepTrace
from autotune.plan import Plan, PlanSpace
from autotune.profiling.attribution import attribute
from autotune.profiling.held_bytes import Held, HeldBytes
from autotune.profiling.live_profile import LiveTrace, live_profile
from autotune.profiling.memory_scaling import Growth
from autotune.profiling.step_record import TimedStep, recomputed_units, silent_units
from autotune.profiling.step_signature import Signature
from autotune.profiling.turns import Calls, common_order, moved, moved_seconds, places_in

# Numbers of timed steps after which the profile is made again; no more steps than the last number are timed.
RENEWED_AFTER = (2, 4, 8, 16, 32)
# After this many traced steps in a row with other calls, these are the usual ones.
_ODD = 8
# Traced steps with other calls that are remembered for each plan.
_MOST_ODD = 32
# Kinds of steps, by the units that they call, that may take turns; and for how many steps after the last one of a kind
# another one is expected. The loop may have ended the very first kind for good: it is expected for this many times as
# many steps as it had.
_KINDS, _EXPECTED, _EXPECTED_TIMES, _EXPECTED_AT_LEAST = 8, 1000, 4, 32


class Knowledge:
    """What traced and timed steps have shown.

    Attributes:
        growth: How memory grows with a batch's size.
        seen: The traced step of each plan, as the profile uses it.
        signatures: The signatures of traced steps; the first is that of the steps in the profile.
        scores: Scores of predicted peaks.
        untraced: Number of steps, while steps take turns, of a kind that was not traced until then.
        traces: The number of traced steps.
        timed: The timed steps.
        latest_peak: Measured peak of the last traced step in bytes; ``None`` before the first.
        handed: What units were handed in recent steps.
        forgotten: How often the traced steps were discarded.
        fragments: The most bytes that a traced step reserved beyond what it allocated at its peak; 0 on a CPU.

    Args:
        attached: The run.
        may_take_turns: Whether steps may call different units.
    """

    def __init__(self, attached: Attached, *, may_take_turns: bool = False) -> None:
        self._attached = attached
        self._may_take_turns = may_take_turns
        # By the units that they call, the kinds of steps that came: the number of the last one. Of the first kinds,
        # only some of the units are known.
        self._last: dict[frozenset[str], int] = {}
        self._first_kinds: list[frozenset[str]] = []
        # What units were handed per byte of its batches in the first step of each kind.
        self._handed_by: dict[frozenset[str], float] = {}
        self._steps = self._told_apart = self.untraced = 0
        self.scores: list[Score] = []
        self.traces = 0
        self.timed: list[TimedStep] = []
        self.latest_peak: int | None = None
        self.fragments = 0
        # Calls per forward pass in a traced step with more than usual, divided by those; and how many traced steps in a
        # row had other calls than those in the profile.
        self._odd_calls, self._odd = 1, 0
        self._static = 0
        self._holds, self._present = HeldBytes(attached.model, attached.optimizer), Held()
        self._times: Counter[Plan] = Counter()
        self._batch_bytes: deque[int] = deque(maxlen=64)
        self.handed = HandedSizes(lambda: self.growth.scaling)
        self.forgotten = -1
        self.forget()

    def forget(self) -> None:
        """Discard the traced steps, because the run's steps are now unlike them."""
        self.forgotten += 1
        self.growth = Growth()
        self.seen: dict[Plan, LiveTrace] = {}
        # The same for each kind of steps that take turns, by the units that it calls.
        self._kinds: dict[Calls, dict[Plan, LiveTrace]] = {}
        self._traced_kinds = set[frozenset[str]]()
        self.signatures: list[Signature] = []
        # The most that the model and its optimizer held when a step was traced.
        self._held = Held()
        # The most bytes that the loop kept from one step until some time in the next, and how much more the latest
        # trace has shown than those before it: on a CPU, one that follows an untraced step shows nothing.
        self._older = self._newly_older = 0
        # For each traced plan, the peak of its last traced step, and the most memory per byte of a batch.
        # What traced steps needed beyond static bytes, and the bytes of their batches, as of equal pieces and as they
        # are.
        self._peaks: dict[Plan, tuple[int, int, int]] = {}
        self._densities: dict[Plan, float] = {}
        # For each plan, what traced steps with more calls than usual needed beyond static bytes, and the bytes of their
        # batches, as of equal pieces.
        self._odd_peaks: dict[Plan, deque[tuple[int, int]]] = {}
        self.handed.forget()

    def note_handed(self, step: Step) -> bool:
        """Record what units were handed in a step.

        Returns:
            Whether traced steps were discarded, because steps have begun to show that batches do not tell what units
            are handed, or have ceased to.
        """
        if not self.handed.note(step):
            return False
        known = bool(self.seen)
        self.scores.clear()
        self.forget()
        return known

    def note_usual(self, step: Step) -> None:
        """Record a step with the usual calls."""
        self.handed.note_usual(step)

    def note_kind(self, step: Step, signature: Signature) -> Step:
        """Record the kind of a step, if steps of several kinds take turns.

        Args:
            step: The step.
            signature: Its signature. Where that is unlike those in the profile, no plan rests on the kind.

        Returns:
            The step, with what its units would have been handed in a step of the first kind.
        """
        self._steps += 1
        if not self.plans_with(signature):
            self._last.pop(step.called, None)
        elif step.called and not (self._has_many_kinds and self._has_traced(step.called)):
            if step.called not in self._last:
                # It may need more than was predicted.
                self.scores.clear()
                self._forget_handed()
            self._last[step.called] = self._steps
            self.untraced += not self._has_traced(step.called)
        if step.called not in self._last or not step.handed_bytes:
            return step
        usual = self._handed_by.setdefault(step.called, step.handed_bytes / size_of(step))
        first = next(iter(self._handed_by.values()))
        return replace(step, handed=tuple(round(one * first / usual) for one in step.handed))

    def _forget_handed(self) -> None:
        """Discard what units were handed, because other units count from now on, or other kinds of steps."""
        self.handed.begin_again()
        if not self.handed.varies:
            self._handed_by.clear()

    def expect(self, kinds: list[frozenset[str]]) -> None:
        """Note the first kinds of steps that take turns, each by some of the units that it calls."""
        self._first_kinds = kinds
        self._told_apart = self._steps
        self._last = dict.fromkeys(kinds, self._steps)
        self._forget_handed()

    @property
    def awaits_kind(self) -> bool:
        """Whether a kind of steps that may come again was not traced yet, so that only the leanest plan is safe."""
        first = min(max(_EXPECTED_TIMES * self._told_apart, _EXPECTED_AT_LEAST), _EXPECTED)
        return any(
            self._steps - last <= (first if kind in self._first_kinds[:1] else _EXPECTED) and not self._has_traced(kind)
            for kind, last in self._last.items()
        )

    @property
    def _has_many_kinds(self) -> bool:
        """Whether there are so many kinds of steps that chance seems to leave out units."""
        return len(self._last) > _KINDS + len(self._first_kinds)

    def _has_traced(self, kind: frozenset[str]) -> bool:
        """Return whether a kind was traced; of many kinds, whether each of its units was."""
        traced = self._traced_kinds.union(map(frozenset, self._kinds))
        if self._has_many_kinds:
            return kind <= frozenset[str]().union(*traced)
        known = frozenset[str]().union(*self._first_kinds)
        return kind in traced or (kind in self._first_kinds and any(one & known == kind for one in traced))

    @property
    def traced_in_all(self) -> set[Plan]:
        """The plans that were traced in every kind of steps; of many kinds, in any."""
        return set(self.seen) if len(self._kinds) > _KINDS else set(self.seen).intersection(*self._kinds.values())

    @property
    def takes_turns(self) -> bool:
        """Whether steps of several kinds were traced."""
        return len(self._kinds) > 1

    @property
    def static_bytes(self) -> int:
        """Bytes that are allocated before and after each step, from the last trace."""
        return self._static

    def count_held(self, step_s: float | None = None) -> None:
        """Count what the model and its optimizer hold, before a step.

        Args:
            step_s: mean seconds of a step, by which it is seldom counted if that takes long; ``None`` counts now.
        """
        if not self._attached.spread:
            self._present = self._holds.count() if step_s is None else self._holds.latest(step_s)

    @property
    def grown_bytes(self) -> int:
        """Bytes that a step needs beyond what it did when it was traced, because what stays between steps has grown."""
        return self._present.beyond(self._held) if self.seen else 0

    @property
    def _outgrown(self) -> bool:
        """Whether the model has grown since, so that traced steps do not tell of the next one."""
        return bool(self.seen) and self._present.outgrows(self._held)

    def take_odd_calls(self) -> int:
        """Return the most calls per forward pass of a step traced since the last call, divided by the usual ones."""
        found, self._odd_calls = self._odd_calls, 1
        return found

    def needs_more(self, shared: int) -> float | None:
        """Return what traced steps with more calls needed at most over one with the usual calls under the same plan.

        Args:
            shared: bytes beyond static ones that further calls do not add to, such as gradients.

        Returns:
            The ratio; ``None`` if no plan was traced with both.
        """
        found = []
        for plan in self._odd_peaks.keys() & self._peaks.keys():
            usual, usual_bytes, _ = self._peaks[plan]
            for more, size in self._odd_peaks[plan]:
                alike = usual * self.growth.scaling.at(size / max(usual_bytes, 1))
                kept = min(shared, alike / 2)
                found.append((more - kept) / max(alike - kept, 1))
        return max(found, default=None)

    def leave_out(self, names: Collection[str]) -> None:
        """Discard the times of steps that recomputed units which may no longer be recomputed.

        Args:
            names: The units.
        """

        def holds(plan: Plan) -> bool:
            return not set(names).intersection(plan.recomputed)

        self.timed = [one for one in self.timed if holds(one.plan)]

    def knows(self, signature: Signature) -> bool:
        """Return whether the traced steps show the memory of a step with this signature."""
        return not self._outgrown and any(known.tells_of(signature) for known in self.signatures)

    def plans_with(self, signature: Signature) -> bool:
        """Return whether a step with this signature is like those in the profile; ``True`` if there are none."""
        return not self.signatures or self.signatures[0].scales_to(signature)

    def calls_of(self, name: str) -> int:
        """Return how often a unit was called in a traced forward pass."""
        return max((calls.count(name) for calls in self._kinds), default=0)

    def peak_of(self, plan: Plan, batch_bytes: float) -> float | None:
        """Return the peak of a plan in bytes, from its last traced step; ``None`` if there was none.

        Args:
            plan: The plan.
            batch_bytes: Bytes of the batch that it is wanted for, as of equal pieces; a smaller one than the traced one
                counts as that.
        """
        if plan not in self._peaks:
            return None
        needed, traced_bytes, _ = self._peaks[plan]
        return self._static + needed * max(self.growth.scaling.at(batch_bytes / max(traced_bytes, 1)), 1.0)

    def has_peak(self, plan: Plan, batch_bytes: float) -> bool:
        """Return whether a plan was last traced with a batch as large.

        Args:
            plan: The plan.
            batch_bytes: Bytes of the batch, as of equal pieces.
        """
        return plan in self._peaks and self._peaks[plan][1] >= batch_bytes

    def times_of(self, plan: Plan) -> int:
        """Return how often a plan was timed."""
        return self._times[plan]

    def traced_bytes(self, plan: Plan, otherwise: int) -> int:
        """Return the bytes of the batch with which a plan was traced, as of equal pieces.

        Args:
            plan: The plan.
            otherwise: What to return if it was not traced.
        """
        own = self.seen.get(plan)
        return otherwise if own is None else own.batch_bytes

    def expected_peak(self, plan: Plan, space: PlanSpace, ks: tuple[int, ...], ahead: StepAhead) -> float:
        """Return an upper bound of a plan's peak in bytes, assuming it falls with k as in the user's own precision.

        What a step needs is linear in the size of its largest micro-batch: two values of k that were traced with
        batches of one size show the line, and one shows the steepest line there can be.

        Args:
            plan: The plan.
            space: The plans that are allowed.
            ks: The values of k that the batch can be cut into, ascending.
            ahead: The step.

        Returns:
            The bound. If too little was traced to tell, it is 0 for the largest k, which must be tried first, and
            otherwise infinite.
        """
        if len(ks) == 1 or not space.k_splits:
            return 0.0
        own, large = dict.fromkeys((unit.name for unit in space.units), space.precisions[0]), ks[-1]
        pieces = {k: unevenness(ahead.cut_samples, k) / k for k in ks}

        def needed_at(k: int, like: Plan) -> float | None:
            peak = self.peak_of(like.changed(accumulation_steps=k), ahead.as_equal_pieces(ahead.batch_bytes, k))
            return None if peak is None else peak - self._static

        alike = {k: plan.changed(accumulation_steps=k, precision=own) for k in ks}
        traced = {k: needed for k in ks if (needed := needed_at(k, alike[k])) is not None}
        known, piece = needed_at(large, plan), pieces[plan.accumulation_steps]
        if large not in traced or known is None:
            return 0.0 if plan.accumulation_steps == large else math.inf
        bounds = [needed * piece / pieces[k] for k, needed in traced.items() if pieces[k] <= piece]
        for k, other in itertools.combinations(traced, 2):
            if self._peaks[alike[k]][2] == self._peaks[alike[other]][2] and piece > pieces[k] > pieces[other]:
                slope = (traced[k] - traced[other]) / (pieces[k] - pieces[other])
                bounds.append(traced[k] + max(slope, 0.0) * (piece - pieces[k]))
        return self._static + min(bounds) * max(known, 0) / max(traced[large], 1)

    def note_batch(self, num_bytes: int) -> None:
        """Record the size of a step's batch."""
        self._batch_bytes.append(num_bytes)

    def note_trace(
        self, use: Tracing, trace: StepTrace, seconds: dict[tuple[Phase, int], float], step: Step, signature: Signature
    ) -> bool:
        """Record a traced step.

        Args:
            use: The use of the step, which traced it.
            trace: Its trace.
            seconds: Its seconds by phase and segment.
            step: The step.
            signature: Its signature.

        Returns:
            Whether it added to what was known.

        Raises:
            RuntimeError: If it shows that the run cannot be profiled.
        """
        plan, k = use.plan, use.plan.accumulation_steps
        self.traces += not use.waits
        trace, beyond = self._with_older(use, trace)
        needed = step.batch_bytes + beyond
        self.latest_peak = self._static + needed
        size = use.ahead.as_equal_pieces(use.ahead.batch_bytes, k, later=True)
        if self.seen and (self._is_odd(trace.calls, signature, plan, (needed, size)) or use.waits):
            return False
        # Without traced steps, what a prediction was made from was discarded in this step.
        known = bool(self.seen)
        comparable = known and self.plans_with(signature)
        # Where batches do not tell what units are handed, steps count by that.
        denser = self.handed.denser(step) if comparable and not self.handed.varies else 1.0
        if denser > DENSER or self._outgrown:
            # The loop itself makes its batches larger, computes in a wider format, or has other parameters.
            self.forget()
        if not self.seen and trace.calls not in {one.calls for one in self.timed}:
            # Times by segment are those of other calls.
            self._forget_times()
        whole, later = use.ahead.batch_bytes, step.later_bytes or use.ahead.batch_bytes
        # A batch that the loop itself makes smaller counts as a smaller one.
        if comparable or self.handed.varies:
            whole, later = self.handed.counted(step, (whole, later))
        most = max(whole, later)
        if use.is_of_later:
            # All from the traced one on are taken to be as large.
            whole = later = later if use.by_size else whole
        seen = self._seen_in(use, trace, seconds, whole=whole, later=later)
        if use.expected is not None and known and denser <= DENSER:
            self._score(use.expected, plan, max(step.batch_bytes, most))
        former_law = self.growth.within, self.growth.scaling
        largest = use.ahead.as_equal_pieces(most, k, later=True)
        belongs = self._is_densest(plan, beyond / max(largest, 1), signature)
        self._note_peak(plan, trace.calls, (needed, largest, most))
        if not belongs:
            return False
        self._traced_kinds.add(step.called)
        self.handed.note_trace(step)
        # Growth is that of the first pieces.
        self.growth.note(plan, seen.batch_bytes, seen.attribution, trace.calls)
        of_kind = self._kinds.setdefault(trace.calls, {})
        former = of_kind.get(plan)
        if former is not None and former.batch_bytes > seen.batch_bytes:
            # A smaller batch only shows how memory grows.
            return former_law != (self.growth.within, self.growth.scaling)
        self.seen[plan] = of_kind[plan] = seen
        self._held = max(self._held, self._present, key=lambda held: held.total)
        return True

    def _with_older(self, use: Tracing, trace: StepTrace) -> tuple[StepTrace, int]:
        """Return a step's trace with what was alive before it and freed in it, and the most bytes beyond static ones.

        Args:
            use: The use of the step, which traced it.
            trace: Its trace.
        """
        self._static = use.static_bytes
        held = devices.allocated(self._attached.device)
        if held is not None:
            self.fragments = max(self.fragments, held.reserved_peak - held.peak)
        older = use.older_bytes()
        self._newly_older, self._older = max(older - self._older, 0), max(older, self._older)
        changes = ((trace.times[0] - 1, use.gradient_bytes + older), *trace.changes)
        level = max(itertools.accumulate(change for _, change in changes))
        return replace(trace, changes=changes), max(level, 0)

    def _seen_in(
        self, use: Tracing, trace: StepTrace, seconds: dict[tuple[Phase, int], float], *, whole: int, later: int
    ) -> LiveTrace:
        """Return what the profile is made from.

        Args:
            use: The use of the step, which traced it.
            trace: Its trace.
            seconds: Its seconds by phase and segment.
            whole: Bytes by which its first batch counts.
            later: The same for its largest later batch.
        """
        plan, k = use.plan, use.plan.accumulation_steps
        equal = use.ahead.as_equal_pieces(whole, k)
        alike = self._kinds.get(trace.calls, {}).values()
        gradients = next((one.attribution.gradients for one in alike), None)
        share = use.ahead.as_equal_pieces(later, k, later=True) / max(equal, 1)
        return LiveTrace(
            plan=plan,
            calls=trace.calls,
            attribution=attribute(trace, recomputed_units(plan), gradients, silent_units(plan), share),
            batch_bytes=equal,
            traced_bytes=use.ahead.batch_bytes,
            static_bytes=use.static_bytes,
            seconds=seconds,
        )

    def _note_peak(self, plan: Plan, calls: Calls, found: tuple[int, int, int]) -> None:
        """Record what a plan needed; of several kinds of steps, the one that needs the most per byte counts."""
        known, known_bytes, _ = self._peaks.get(plan, (0, 1, 0))
        if not self._kinds.keys() - {calls} or found[0] * known_bytes >= known * found[1]:
            self._peaks[plan] = found

    def note_times(
        self, plan: Plan, calls: tuple[str, ...], seconds: Mapping[tuple[Phase, int], float], step: Step
    ) -> bool:
        """Record a timed step.

        Args:
            plan: The plan that it ran under.
            calls: The units that its first forward pass called, in order.
            seconds: Its seconds by phase and segment.
            step: The step.

        Returns:
            Whether the profile should be made again.
        """
        if calls not in self._kinds:
            return False
        self._times[plan] += 1
        size = round(step.batch_bytes * (self.handed.ratio(step) or 1.0))
        self.timed.append(TimedStep(plan=plan, batch_bytes=max(size, 1), seconds=seconds, calls=calls))
        return len(self.timed) in RENEWED_AFTER

    def profile(self, space: PlanSpace, batch_size: int) -> Profile | None:
        """Return the profile of all recorded steps; ``None`` if none with an allowed k was traced.

        Args:
            space: The plans that are allowed.
            batch_size: Samples in a batch.
        """
        order = self._order()
        places = {calls: places_in(order, calls) for calls in self._kinds}
        ks = space.accumulation_choices
        seen = [
            _in_order(one, order, places[calls])
            for calls, traces in self._kinds.items()
            for one in traces.values()
            if one.plan.accumulation_steps in ks and _has_storages(space, one.plan)
        ]
        if not seen:
            return None
        logs = [math.log(max(size, 1)) for size in self._batch_bytes]
        profile = live_profile(
            self._attached.name,
            str(self._attached.device),
            space,
            seen,
            [
                replace(one, calls=order, seconds=moved_seconds(one.seconds, places[one.calls]))
                for one in self.timed
                if one.calls in places and _has_storages(space, one.plan)
            ],
            batch_size=max(batch_size, 1),
            length_spread=statistics.pstdev(logs) if len(logs) > 1 else 0.0,
            growth=self.growth.within,
        )
        # A traced step may have had a storage in units in which it is locked now.
        return profile.locking(space.locked)

    def _order(self, *others: Calls) -> Calls:
        """Return the calls of all kinds of steps, and of others, in one order; none if there is no such order."""
        return common_order([*self._kinds, *others] or [()]) or ()

    def _is_odd(self, calls: tuple[str, ...], signature: Signature, plan: Plan, needed: tuple[int, int]) -> bool:
        """Return whether a traced step made more calls than usual; if it made fewer, the former ones were odd.

        Args:
            calls: The units that it called, in order.
            signature: Its signature.
            plan: The plan that it ran under.
            needed: Bytes that it needed beyond static ones, and those of its batch, as of equal pieces.

        Raises:
            RuntimeError: If neither holds, so that units are called in no order that plans could count on.
        """
        usual, self._odd = next((one for one in self._kinds if set(one) == set(calls)), ()), self._odd + 1
        if calls == usual:
            self._odd = 0
        elif self._odd > _ODD or not self.plans_with(signature):
            # The usual calls have changed.
            self._forget_calls()
        elif not usual and self._may_take_turns and self._order(calls):
            self._odd = 0
        elif (more := _times_more(calls, usual)) is not None:
            self._odd_calls = max(self._odd_calls, more)
            self._odd_peaks.setdefault(plan, deque(maxlen=_MOST_ODD)).append(needed)
            return True
        elif (more := _times_more(usual, calls)) is not None:
            self._odd_calls = max(self._odd_calls, more)
            odd = {plan: deque([(needed, size)], _MOST_ODD) for plan, (needed, size, _) in self._peaks.items()}
            self._forget_calls()
            self._odd_peaks = odd
        else:
            raise RuntimeError("the units are called differently from step to step")
        return False

    def _forget_calls(self) -> None:
        """Discard traced and timed steps, because steps call units in another order from now on."""
        self.forget()
        self._forget_times()
        self._odd = 0

    def _forget_times(self) -> None:
        self.timed.clear()
        self._times.clear()

    def _is_densest(self, plan: Plan, density: float, signature: Signature) -> bool:
        """Record how much memory a step needed per byte; return whether its trace belongs in the profile."""
        if not self.knows(signature):
            # One that covers the first, and is not known, has a tensor that grew by more than the batch: the leanest
            # plan may not show what that means for others.
            grew = bool(self.signatures) and signature.covers(self.signatures[0])
            if grew or (self.signatures and density > DENSER * self._densities.get(plan, 0.0)):
                self.forget()
            self.signatures.append(signature)
        self._densities[plan] = max(density, self._densities.get(plan, 0.0))
        return self.plans_with(signature)

    def _score(self, expected: Expected, plan: Plan, largest: int) -> None:
        """Score the prediction for a step, unless its batch is larger than the predicted one."""
        assert self.latest_peak is not None
        if plan == expected.plan and largest <= expected.largest_bytes:
            # Memory that the loop itself has allocated since the prediction, or keeps from step to step, is not due to
            # the plan.
            measured = self.latest_peak - max(self._static - expected.static_bytes, 0) - self._newly_older
            self.scores.append(Score(predicted_bytes=int(expected.peak_bytes), measured_bytes=measured))


def _has_storages(space: PlanSpace, plan: Plan) -> bool:
    """Return whether a space has the approximate storages of a plan, if only in other units."""
    return all(one in space.storages for one in plan.storage.values() if one.approximates)


def _in_order(trace: LiveTrace, order: Calls, places: Sequence[int]) -> LiveTrace:
    """Return a trace as one of a step that calls the units of all kinds of steps.

    Args:
        trace: The trace.
        order: The units that all kinds call, in order.
        places: The number of each of the trace's segments in such a step.
    """
    if order == trace.calls:
        return trace
    return replace(
        trace,
        calls=order,
        kind=frozenset(trace.calls),
        attribution=moved(trace.attribution, places),
        seconds=moved_seconds(trace.seconds, places),
    )


def _times_more(calls: tuple[str, ...], usual: tuple[str, ...]) -> int | None:
    """Return how many times as often units were called, at most; ``None`` unless all were at least as often."""
    those, others = Counter(calls), Counter(usual)
    if those.keys() != others.keys() or not those > others:
        return None
    return max(math.ceil(those[name] / others[name]) for name in others)
