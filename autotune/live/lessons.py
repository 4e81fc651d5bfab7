"""The order in which a live run's costs are learnt, and the plans of the steps that show them.

First a step probes which units may be recomputed. Then k and precisions are tested in trial passes. Then a few steps
are traced and a few timed. Under a budget, a step runs under the leanest plan until the run is profiled, or under a
fuller one that the traces predict to fit.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from autotune.live.allowed_plans import AllowedPlans, K
from autotune.live.asked_budget import BudgetFunction, Size
from autotune.live.attached import Attached, StepAhead
from autotune.live.limits import Stage
from autotune.live.live_knowledge import Knowledge
from autotune.live.placement import Placements, usable
from autotune.live.prediction_scores import Expected
from autotune.live.probe_results import ProbeResults
from autotune.live.step_uses import Probing, Shadowing, Timing, Tracing, Use
from autotune.live.storage_trials import StorageTrials
from autotune.mechanics import devices
from autotune.mechanics.memory_meter import tensor_bytes
from autotune.plan import Plan, Precision, Storage
from autotune.profiling.step_signature import Signature

# Traced steps under plans that store more and more, up to the fullest that fits.
TRACES = 4
# Timed steps of one plan.
TIMED_EACH = 3
# A constant budget of so many times what saving needs has no use for other storages.
_AMPLE = 2
# Traced steps that show one of the storages between saving and recomputing.
_BETWEEN = 4
# Attempts at traced steps: a step that shows nothing (an epoch's last, short one) is repeated.
_ATTEMPTS = 8
# The largest number of steps that are traced because they are unlike all traced steps.
_NEW_SHAPES = 48
# The largest number of steps in a row that are traced to find one of a kind that was not traced.
_AWAITED = 256
# Steps after the first whose batches are cut in trial passes as well.
_MORE_CUTS = 2
# What a batch shows of a plan counts up to batches that are larger by this factor.
_MUCH_LARGER = 2
# Steps to wait for a batch that can be cut.
_CUT_WAITS = 8
# Plans that are traced once a batch comes that shows them, after the profile was made; and the most steps from one that
# was looked at in vain to the next: looking takes up to a millisecond.
_LATE_PLANS, _LATE_EVERY = 12, 32
# Steps to wait for one with the profiled shape.
_WAITS = 32


class Lessons:
    """The choice of what each step of a live run is used for.

    Attributes:
        ahead: The next step.
        budget_bytes: The current memory budget; ``None`` for none.
        trials: The trials of approximate storages.
        by_size: Whether of the batches that the loop accumulates the largest is traced, and not the first.
        copied_bytes: Bytes that trial passes need on the device beside their plan: copies of what the model writes to.

    Args:
        attached: The run.
        allowed: The plans that are allowed.
        probes: The results of probes.
        knowledge: What traced and timed steps have shown.
    """

    def __init__(self, attached: Attached, allowed: AllowedPlans, probes: ProbeResults, knowledge: Knowledge) -> None:
        self._attached = attached
        self._allowed = allowed
        self._probes = probes
        self._knowledge = knowledge
        self.trials, self.by_size = StorageTrials(allowed), False
        # Until the first step has shown it, every buffer may be written to.
        self.copied_bytes = 0 if devices.is_accelerator(attached.device) else tensor_bytes(attached.model.buffers())
        self._acts = attached.stage is Stage.ACT
        self._new_shapes = self._late_plans = self._until_late = self._awaited = self._num_untraced = 0
        self._late_every, self._whole_bytes = 1, 0
        self._likeliest: Placements | None = None
        self._traced_between: Counter[tuple[Storage, Precision]] = Counter()
        self.ahead = StepAhead(
            batch_bytes=0, largest_bytes=0, samples=0, cut_samples=0, signature=Signature((), (0, 0))
        )
        self.budget_bytes: int | None = None

    @property
    def saves_memory(self) -> bool:
        """Whether steps must use as little memory as possible."""
        return self._acts and (self.budget_bytes is not None or isinstance(self._attached.budget, BudgetFunction))

    @property
    def awaits_kind(self) -> bool:
        """Whether steps must be lean until one of a kind that was not traced yet comes again."""
        return self.saves_memory and self._knowledge.awaits_kind

    @property
    def first_plan(self) -> Plan:
        """The plan of the first steps."""
        space = self._allowed.space
        return self._allowed.plan(space.accumulation_choices[0], space.precisions[0], lean=self.saves_memory)

    @property
    def leanest(self) -> Plan:
        """The plan that needs the least memory in the user's own precision, once trial passes allow to cut batches."""
        space = self._allowed.space
        k = self._ks[-1] if space.k_splits else space.accumulation_choices[0]
        return self._allowed.plan(k, space.precisions[0], lean=True)

    # What is learnt, and when.

    def all(self) -> Iterator[Use | None]:
        """Yield the use of each step, until everything is learnt; ``None`` for an ordinary step."""
        allowed = self._allowed
        # The first step creates the optimizer's state, so it is not traced.
        yield self._whole(self._probing(allowed.space.recomputable) if self._acts else None)
        while self._probes.uncalled:
            # A step may leave out a unit by chance.
            yield self._whole(self._probing(self._probes.uncalled))
        if self._attached.bucket_bytes:
            # DistributedDataParallel rebuilds its buckets in the second step, while the first ones are still alive.
            yield self._whole(Use(self.first_plan))
        if self._acts:
            if self._probes.autocast is not None:
                for precision in allowed.space.precisions[1:]:
                    allowed.lock(
                        str(precision), f"the run computes in {self._probes.autocast} by an autocast of its own"
                    )
            cuts, trial = self._cuts, self._trial()
            if trial is not None:
                yield self._whole(trial)
            yield from self._more_cuts(tried=cuts)
        yield from self.costs()

    def _more_cuts(self, *, tried: bool) -> Iterator[Use | None]:
        """Yield further trial passes: the loss may couple samples only in some steps.

        They compare the whole batch with its halves, since small pieces may hold no samples that are coupled. Once
        batches may be cut, one that is larger than the whole ones so far may need too much memory for that: until a
        smaller one comes, it is tried in small pieces.

        Args:
            tried: Whether a batch was cut in trial passes already.
        """
        left, waited = _MORE_CUTS + (not tried), 0
        while left and waited < _CUT_WAITS and self._may_cut:
            fits = not tried or not self.saves_memory or self.ahead.batch_bytes <= self._whole_bytes
            if not self._cuts:
                waited += 1
                yield self._whole(Use(self.first_plan))
            elif fits:
                left, tried = left - 1, True
                yield self._whole(Shadowing(self.first_plan, [self._halved(self.first_plan)]))
            else:
                waited += 1
                reference = self.first_plan.changed(accumulation_steps=self._finest_cut)
                yield Shadowing(reference, [self._halved(reference)])
        if not tried and self._may_cut:
            self._allowed.lock(K, "the run's first batches cannot be cut into samples")

    def _whole(self, use: Use | None) -> Use | None:
        """Note that the next step's batch runs whole, whatever memory it needs; return the use of the step."""
        self._whole_bytes = max(self._whole_bytes, self.ahead.batch_bytes)
        return use

    @staticmethod
    def _halved(plan: Plan) -> Plan:
        return plan.changed(accumulation_steps=2 * plan.accumulation_steps)

    def costs(self) -> Iterator[Use]:
        """Yield the uses of the steps that show costs."""
        traced = timed = waited = 0
        self._likeliest = None
        while True:
            precisions = self._allowed.space.precisions
            use: Use | None = None
            signature, known = self.ahead.signature, self._knowledge
            if known.untraced > self._num_untraced or not known.awaits_kind:
                self._awaited, self._num_untraced = 0, known.untraced
            if self.saves_memory and known.seen and not known.knows(signature):
                use = self.new_shape(self.leanest) or Use(self.leanest)
            elif self.awaits_kind and known.seen:
                self._awaited += 1
                use = self.tracing(self.leanest) if self._awaited <= _AWAITED else Use(self.leanest)
            elif self.saves_memory and not known.plans_with(signature) and waited < _WAITS:
                # A batch of another shape would mix its costs with the known ones.
                waited += 1
                use = Use(self.leanest)
            if use is None and traced < _ATTEMPTS + 2 * len(self._ks) * len(precisions):
                use = self._untraced()
                traced += isinstance(use, Tracing)
            if use is None and timed < _ATTEMPTS * len(precisions):
                use = self._untimed()
                timed += use is not None
            if use is None:
                return
            yield use

    def again(self, use: Use, upcoming: Iterator[Use | None]) -> Iterator[Use | None]:
        """Yield again a use whose step was not finished, and then the uses that follow it.

        Args:
            use: The use.
            upcoming: The uses that follow it.
        """
        if isinstance(use, Probing):
            yield self._probing(self._probes.uncalled or self._allowed.space.recomputable)
        elif isinstance(use, Shadowing) and not use.storages and (trial := self._trial()) is not None:
            # Storages that were not tried are tried again in any case.
            yield trial
        yield from upcoming

    # The uses.

    def new_shape(self, plan: Plan) -> Use | None:
        """Return a traced step because the next one is unlike all traced steps; ``None`` after too many of them."""
        if self._new_shapes == _NEW_SHAPES:
            return None
        self._new_shapes += 1
        return self.tracing(plan)

    def late_plan(self, planned: Plan, placements: Placements) -> Use | None:
        """Return a step that shows what is not known yet and fits the next batch; ``None`` if there is nothing.

        While costs were learnt, the batches may have been too large for it, or the budget too low.

        Args:
            planned: The plan that the step is to run under. It is traced if few plans of its k that save were.
            placements: The plans of the profile.
        """
        self._until_late -= 1
        if not self.saves_memory or self._late_plans == _LATE_PLANS or self._until_late > 0:
            return None
        plan = next(self._unseen(), planned)
        if plan is planned and (plan in self._knowledge.seen or self._knows_saving_at(plan.accumulation_steps)):
            use = self._between(placements)
        else:
            use = self.tracing(plan)
        if use is None:
            self._until_late = self._late_every = min(2 * self._late_every, _LATE_EVERY)
        else:
            # The number of trials is limited in itself.
            self._late_plans, self._late_every = self._late_plans + isinstance(use, Tracing), 1
        return use

    def _knows_saving_at(self, k: int) -> bool:
        """Return whether enough plans of a k that save were traced."""
        lean, of_k = self._allowed.leanest.storage, [p for p in self._knowledge.seen if p.accumulation_steps == k]
        return sum(plan.storage != lean for plan in of_k) >= TRACES - 1

    def tracing(self, plan: Plan, expected: Expected | None = None, *, waits: bool = False) -> Use:
        """Return a traced step.

        Args:
            plan: The plan that it runs under.
            expected: The peak that is predicted for it; ``None`` for none.
            waits: Whether only a step with more calls of units than usual is of interest.
        """
        names = [unit.name for unit in self._allowed.space.units]
        # Where batches do not tell what units are handed, steps count by that.
        by_size = self.by_size and not self._knowledge.handed.varies
        return Tracing(plan, self._attached, names, self.ahead, expected, waits=waits, by_size=by_size)

    def timing(self, plan: Plan) -> Use:
        """Return a timed step under a plan."""
        return Timing(plan, self._attached, [unit.name for unit in self._allowed.space.units])

    def _probing(self, names: Sequence[str]) -> Use:
        return Probing(self.first_plan, self._attached.model, names)

    def _trial(self) -> Use | None:
        """Return a step with trial passes under other plans; ``None`` if there are none."""
        others = self._others(self.first_plan)
        return Shadowing(self.first_plan, others) if others else None

    # The plans.

    @property
    def _ks(self) -> tuple[int, ...]:
        """The values of k that the next batch can be cut into."""
        space = self._allowed.space
        choices = space.accumulation_choices
        return tuple(k for k in choices if k <= self.ahead.samples or k == choices[0] or not space.k_splits)

    @property
    def _may_cut(self) -> bool:
        """Whether k cuts batches, and plans may choose among several values."""
        return self._allowed.space.k_splits and len(self._allowed.space.accumulation_choices) > 1

    @property
    def _cuts(self) -> bool:
        """Whether k cuts batches, and the next one can be cut."""
        return self._allowed.space.k_splits and len(self._ks) > 1

    @property
    def _finest_cut(self) -> int:
        """The largest k whose pieces can be cut in two, without pieces smaller than those of plans."""
        samples, least = self.ahead.samples, self.ahead.samples // self._ks[-1]
        finest = (k for k in self._ks if k < samples and max(samples // (2 * k), 1) >= least)
        return max(finest, default=self._ks[0])

    def _others(self, plan: Plan) -> list[Plan]:
        """Return the plans whose gradients are to be compared with a plan's."""
        # If memory ran out for whole batches, they are cut already: then each piece is cut in two.
        cut = self._halved(plan.changed(accumulation_steps=self._ks[0]))
        names = [unit.name for unit in self._allowed.space.units]
        others = self._allowed.space.precisions[1:]
        return [*([cut] if self._cuts else []), *(plan.changed(precision=dict.fromkeys(names, p)) for p in others)]

    def _untraced(self) -> Use | None:
        """Return the next step to trace; ``None`` if no more is needed.

        Each precision is traced, with the values of k that differ in cost. If memory is limited, the largest k of each
        precision comes first, plans that may not fit are left out, and plans that store more and more follow.
        """
        known = self._knowledge
        first = self.leanest if self.saves_memory else self.first_plan
        if first not in known.seen or known.growth.told_by(first, self.ahead.batch_bytes):
            return self.tracing(first)
        plan = next(self._unseen(), None)
        if plan is not None:
            return self.tracing(plan)
        return self._fuller() or self._between(self._placements()) if self.saves_memory else None

    def _unseen(self) -> Iterator[Plan]:
        """Yield the plans that should be known, are not at the next batch's size, and are expected to fit it.

        If k cuts a batch, a larger one only saves memory; if a step consumes k batches, all after the first cost the
        same.
        """
        space, known, room = self._allowed.space, self._knowledge, usable(self.budget_bytes)
        ks = (self._ks[::-1] if self.saves_memory else self._ks[:1]) if space.k_splits else self._ks[:2]
        for plan in (self._allowed.plan(k, p, lean=self.saves_memory) for p in space.precisions for k in ks):
            shown = _MUCH_LARGER * known.traced_bytes(plan, 0) >= self.ahead.as_equal_pieces(
                self.ahead.batch_bytes, plan.accumulation_steps
            )
            if not shown and known.expected_peak(plan, space, self._ks, self.ahead) <= room:
                yield plan

    def _between(self, placements: Placements | None) -> Use | None:
        """Return a step that shows a storage between saving and recomputing in further units.

        Beside the units of which it is known, as many have the storage as could be saved. They keep no more than by
        saving; but in the backward pass of one of them, all that is alive while it is recomputed may be alive in
        addition.

        Args:
            placements: The plans whose peaks are predicted; ``None`` if none are.

        Returns:
            The use: a traced step, or one with trial passes if the storage is approximate; ``None`` if all that has
            room is known, after enough steps, and where saving leaves much room.
        """
        space = self._allowed.space
        between = [one for one in space.storages[1:] if not one.recomputes]
        if placements is None or not between:
            return None
        lean, length = self._likeliest_lean(placements), self._length(placements)
        fullest = placements.peak_bytes(lean.storing(space.recomputable, space.storages[0]), length)
        if isinstance(self._attached.budget, Size) and _AMPLE * fullest <= usable(self.budget_bytes):
            return None
        alike = [plan for plan in self._knowledge.seen if plan.precision == lean.precision]
        known = {pair for plan in alike for pair in plan.storage.items()}
        for storage in between:
            told = storage, next(iter(lean.precision.values()))
            if self._traced_between[told] == _BETWEEN or (storage.approximates and lean.needs_loss_scaling):
                # Where fp16 overflows, gradients cannot be compared.
                continue
            own = [n for n in space.recomputable if (n, storage) in known and self.trials.suits(n, storage)]
            like = lean.storing(own, storage)
            # Only upper bounds are known of what units keep that no traced plan saves; and what is kept last is freed
            # first.
            others = [name for name in reversed(space.recomputable) if name not in own]
            others.sort(key=lambda name: (name, space.storages[0]) not in known)
            names = self._with_room(like, others, storage, placements)
            if untried := self.trials.next(storage, names):
                return Shadowing(lean, [lean.storing(untried, storage)])
            if good := [name for name in names if self.trials.suits(name, storage)]:
                self._traced_between[told] += 1
                return self.tracing(like.storing(good, storage))
        return None

    def _likeliest_lean(self, placements: Placements) -> Plan:
        """Return the leanest plan with the k and the commonest precision of the plan that would be chosen now."""
        length, room = self._length(placements), usable(self.budget_bytes)
        found = placements.fastest(room, length, samples=self.ahead.cut_samples) or self._allowed.leanest
        (precision, _), *_ = Counter(found.precision.values()).most_common(1)
        return self._allowed.plan(found.accumulation_steps, precision, lean=True)

    def _with_room(self, like: Plan, names: Sequence[str], storage: Storage, placements: Placements) -> Sequence[str]:
        """Return the first units of those that may have a storage, as many as could be saved in a plan's place.

        Args:
            like: The plan.
            names: The units.
            storage: The storage.
            placements: The plans whose peaks are predicted.
        """
        space, length = self._allowed.space, self._length(placements)
        names = [name for name in names if storage in space.storages_of(name)]
        room = usable(self.budget_bytes) - placements.alive_bytes(length)
        room -= self.copied_bytes * storage.approximates

        def exceeds(count: int) -> bool:
            saving = like.storing(names[:count], space.storages[0])
            return placements.peak_bytes(saving, length, self.ahead.cut_samples) > room

        return names[: bisect_left(range(1, len(names) + 1), True, key=exceeds)]

    def _fuller(self) -> Use | None:
        """Return a traced step under the fastest plan that is predicted to fit; ``None`` after enough of them.

        If the last one needed more memory than predicted, one more step checks the corrected prediction.
        """
        seen, scores = self._knowledge.traced_in_all, self._knowledge.scores
        short = bool(scores) and scores[-1].is_short
        leanest = self._allowed.leanest
        if sum(plan.storage != leanest.storage for plan in seen) >= TRACES - 1 and not short:
            return None
        placements = self._placements()
        if placements is None:
            return None
        length = self._length(placements)
        found = placements.fastest(usable(self.budget_bytes), length, samples=self.ahead.cut_samples)
        if found is not None and found in seen and not short:
            found = self._alike(found, placements, length)
        if found is None:
            return None
        expected = Expected(
            plan=found,
            largest_bytes=self.ahead.largest_bytes,
            peak_bytes=placements.peak_bytes(found, length, self.ahead.cut_samples),
            static_bytes=placements.profile.static_bytes,
        )
        return self.tracing(found, expected)

    def _alike(self, plan: Plan, placements: Placements, length: float) -> Plan | None:
        """Return a plan that saves a unit that no traced plan saves, and recomputes another one in its place.

        Until a unit was saved, only an upper bound of what it keeps is known.

        Returns:
            The plan; ``None`` if there is none that is predicted to fit.
        """
        saves, room = self._allowed.space.storages[0], usable(self.budget_bytes)
        known = {name for one in self._knowledge.seen for name, storage in one.storage.items() if storage is saves}
        unknown = [name for name in plan.recomputed if name not in known]
        others = [name for name in self._allowed.space.recomputable if name not in plan.recomputed]
        for name, other in itertools.product(unknown, others):
            changed = {**plan.storage, name: saves, other: plan.storage_of(name)}
            alike = plan.changed(storage=changed)
            if placements.peak_bytes(alike, length, self.ahead.cut_samples) <= room:
                return alike
        return None

    def _untimed(self) -> Use | None:
        """Return a timed step in the precision with the fewest timed steps; ``None`` if no more is needed.

        Tracing slows each precision down by a different factor. Under adaptive batching k depends on the time of an
        update, which traces do not show. Policies plan from the first profile, so these times are needed before it.
        Precisions take turns, so that a busy machine affects all alike.
        """
        precisions = self._allowed.space.precisions
        if not self._attached.adaptive and len(precisions) == 1:
            return None
        known = self._knowledge
        counts = {
            plan: sum(one.plan.precision == plan.precision for one in known.timed)
            for plan in map(self._smallest_k, precisions)
            if plan in known.seen
        }
        least = min(counts, key=lambda plan: counts[plan], default=None)
        if least is None or counts[least] >= TIMED_EACH:
            return None
        return self.timing(self._likely(least) if self.saves_memory else least)

    def _smallest_k(self, precision: Precision) -> Plan:
        """Return the plan in a precision with the smallest k that was measured to fit, or else with the smallest k."""
        ks = self._ks if self._allowed.space.k_splits else self._ks[:1]
        plans = [self._allowed.plan(k, precision, lean=self.saves_memory) for k in ks]
        room, peak_of = usable(self.budget_bytes), self._knowledge.peak_of
        for plan in plans:
            peak = peak_of(plan, self.ahead.as_equal_pieces(self.ahead.batch_bytes, plan.accumulation_steps))
            if peak is not None and peak <= room:
                return plan
        return plans[0]

    def _likely(self, like: Plan) -> Plan:
        """Return a plan with the storage that the next batch would most likely get; unchanged if that is unknown."""
        self._likeliest = placements = self._likeliest or self._placements()
        if placements is None:
            return like
        length, room = self._length(placements), usable(self.budget_bytes)
        rows, samples = placements.group(self._allowed.leanest), self.ahead.cut_samples
        found = placements.fastest(room, length, rows, samples=samples)
        plan = like if found is None else like.changed(storage=found.storage)
        return plan if placements.peak_bytes(plan, length, samples) <= room else like

    def _placements(self) -> Placements | None:
        """Return the plans of a profile of all steps seen so far; ``None`` if no step was traced."""
        profile = self._knowledge.profile(self._allowed.space, self.ahead.samples)
        scaling = self._knowledge.growth.scaling
        return None if profile is None else Placements(profile, self.budget_bytes, scaling)

    def _length(self, placements: Placements) -> float:
        size = self.ahead.largest_bytes
        return size * self._knowledge.handed.ahead(size) / placements.profile.tables[0].batch_bytes
