"""The plan of each step of a live run: one to learn from, or the decided one as its batch and the budget allow it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from autotune.live.agreement import LOCKED_ELSEWHERE, Needs
from autotune.live.attached import StepAhead
from autotune.live.late_trials import LateTrials
from autotune.live.limits import Stage
from autotune.live.live_run import LiveRun
from autotune.live.phases import Unprofiled
from autotune.live.placement import usable
from autotune.live.storage_trials import Group
from autotune.plan import Plan, Storage


class StepPlans:
    """Chooses the plan of each step.

    Attributes:
    Args:
        run: The run.
        follows: Whether each batch may get another plan than the decided one.
    """

    def __init__(self, run: LiveRun, *, follows: bool) -> None:
        self._run, self._follows = run, follows
        self._cut_trials, self._storage_trials = LateTrials(), LateTrials()
        # With several ranks: the last step that they planned, the bytes of this rank's batch, and the plan.
        self._together = (-1, 0, run.plan)
        # What this rank had locked when it last told the others.
        self._locks_told: set[str] = set()

    def plan_of(self, ahead: StepAhead, lesson: Plan | None) -> Plan:
        """Return the plan of a step.

        Args:
            ahead: The step.
            lesson: The plan that something would be learnt from; ``None`` for an ordinary step.
        """
        run = self._run
        if run.agreement.many and run.attached.stage is Stage.ACT:
            return self._plan_together(ahead, lesson)
        return lesson or self._plan_ahead(ahead, run.length_of(ahead.largest_bytes), run.room)

    def begin_again(self) -> None:
        """Note that all ranks run their step again, under another plan."""
        self._together = (-1, 0, self._run.plan)

    def _plan_together(self, ahead: StepAhead, lesson: Plan | None) -> Plan:
        """Return the plan of a step on several ranks, the same on all of them.

        Args:
            ahead: The step.
            lesson: The plan that this rank would learn from; ``None`` for an ordinary step.
        """
        run = self._run
        profiler, agreement, size = run.profiler, run.agreement, ahead.largest_bytes
        step, planned_bytes, plan = self._together
        if step != run.step:
            apart = lesson is not None or profiler.locks.keys() != self._locks_told
            own = Needs(length=run.length_of(size), room=run.room, apart=apart)
            needs = agreement.most_demanding(own)
            plan = self._plan_ahead(ahead, needs.length, needs.room, lesson)
            if needs.apart:
                names, locks = run.attached.space.recomputable, profiler.locks
                plan, elsewhere = agreement.leanest(plan, names, locks.keys(), run.attached.space.precisions)
                run.news = profiler.bar(dict.fromkeys(elsewhere, LOCKED_ELSEWHERE)) or run.news
                self._locks_told = set(profiler.locks)
            plan = _without(plan, profiler.locks)
        elif size > planned_bytes and not run.attached.spread:
            # Only this rank begins again, or all do: the others cannot be asked.
            plan = profiler.leanest
        self._together = (run.step, size, plan)
        profiler.run_under(plan)
        return plan

    def _plan_ahead(self, ahead: StepAhead, length: float, room: float, lesson: Plan | None = None) -> Plan:
        """Return the plan of a step that profiling does not need; the step may still be watched.

        Args:
            ahead: The step.
            length: The size of its batch, or of another rank's larger one, relative to the profiled batch.
            room: Bytes that the plan may be predicted to need.
            lesson: The plan that this rank would learn from, if other ranks have no profile either.
        """
        run = self._run
        profiler = run.profiler
        size = ahead.largest_bytes * profiler.knowledge.handed.ahead(ahead.largest_bytes)
        plan = self._placed_plan(ahead, length, room)
        if lesson is not None:
            plan = lesson if isinstance(run.phase, Unprofiled) else plan.changed(storage=lesson.storage)
        elif self._is_news(ahead, length):
            beyond = run.placements is not None and not run.placements.reaches(length)
            plan = profiler.look_at(ahead, beyond=beyond)
        elif run.profiler.complete and run.acting and not run.agreement.many and run.awaits_calls(ahead.largest_bytes):
            plan = profiler.wait_for_calls(ahead)
        elif run.check.runs_baseline and run.fits(run.phase.baseline, size):
            plan = run.phase.baseline
        elif (exact := self._exactly(plan)) is not plan and (doubted := profiler.doubted()) is not None:
            plan = self._without_doubts(exact, doubted, ahead, room)
        elif (unseen := self._unseen(plan, ahead)) is not None:
            plan = unseen
        elif plan.needs_loss_scaling:
            # Where fp16 overflows, the step is skipped, and passes beside it could not be compared.
            profiler.also_watch(plan, ahead)
        elif self._cuts(plan) and self._cut_trials.due() and (other := self._other_cut(exact, ahead, room)) is not None:
            # Rounding differs from pass to pass.
            profiler.try_again(exact, other)
            plan = exact
        elif exact is not plan and self._storage_trials.due() and self._fit([plan, exact], ahead, room):
            profiler.try_again(exact, plan)
            plan = exact
        else:
            profiler.also_watch(plan, ahead)
        return plan

    def _is_news(self, ahead: StepAhead, length: float) -> bool:
        """Return whether plans must fit a budget, and no step like this one, or nearly as large, was traced.

        Where no plan is predicted to fit, the leanest must have been traced with a batch as large.
        """
        run = self._run
        # The budget also holds while no policy is trusted after a trip.
        acts = run.attached.stage is Stage.ACT and not run.breaker.open and not run.agreement.many
        if not acts or run.budget.latest is None or run.placements is None or not run.profiler.complete:
            return False
        known = run.profiler.knowledge
        if not known.knows(ahead.signature) or not run.placements.reaches(length):
            return True
        if known.handed.is_news:
            return True
        return run.least is not None and not run.profiler.knows_leanest(ahead)

    def _without_doubts(self, exact: Plan, doubted: Group, ahead: StepAhead, room: float) -> Plan:
        """Return the plan of a step beside which storages in doubt are tried again, if that has room.

        Args:
            exact: The plan of the step with exact storages.
            doubted: What is tried.
            ahead: The step.
            room: Bytes that a plan may be predicted to need.
        """
        profiler, (storage, names) = self._run.profiler, doubted
        other = exact.storing(names, storage)
        if not self._fit([exact], ahead, room):
            return exact.changed(storage=profiler.leanest.storage)
        if self._fit([other], ahead, room) and not exact.needs_loss_scaling:
            profiler.try_doubted(exact, other)
        return exact

    def _cuts(self, plan: Plan) -> bool:
        """Return whether a plan cuts batches into more pieces than it must."""
        space = self._run.profiler.space
        return space.k_splits and plan.accumulation_steps > space.accumulation_choices[0]

    def _exactly(self, plan: Plan) -> Plan:
        """Return a plan with the leanest storage in place of approximate ones."""
        names = [name for name, one in plan.storage.items() if one.approximates]
        return plan.storing(names, self._run.profiler.space.storages[-1]) if names else plan

    def _fit(self, plans: Iterable[Plan], ahead: StepAhead, room: float) -> bool:
        """Return whether a step fits under each of some plans, beside the copies that restore the model's state."""
        fits, size = self._run.phase.fits, ahead.largest_bytes
        left = room - self._run.profiler.copied_bytes
        return all(fits(one, ahead.as_equal_pieces(size, one.accumulation_steps), left) for one in plans)

    def _other_cut(self, plan: Plan, ahead: StepAhead, room: float) -> Plan | None:
        """Return the plan of trial passes that show whether a plan's cut keeps the gradient; ``None`` for none.

        Larger pieces show more, because small ones may hold no samples that are coupled; smaller ones always fit.
        """
        run = self._run
        k, lean = plan.accumulation_steps, run.profiler.leanest.storage
        coarser = plan.changed(accumulation_steps=max(k // 2, 1), storage=lean)
        finer = plan.changed(accumulation_steps=2 * k)
        # The trial's own plan runs too, beside the copies that restore the model's state.
        if not self._fit([plan], ahead, room):
            return None
        if self._fit([coarser], ahead, room):
            return coarser
        return finer if k < ahead.samples else None

    def _unseen(self, plan: Plan, ahead: StepAhead) -> Plan | None:
        """Return a plan to learn from, in place of the one that the step is to run under; ``None`` to keep that."""
        run = self._run
        if run.allowed is None or not run.acting or run.agreement.many or run.placements is None:
            return None
        return run.profiler.try_unseen(plan, ahead, run.allowed, run.placements)

    def _placed_plan(self, ahead: StepAhead, length: float, room: float) -> Plan:
        """Return the plan for a batch: the decided one, with the storage that fits the batch and the budget best."""
        run = self._run
        budget = run.budget.latest
        if run.attached.stage is Stage.OBSERVE or run.breaker.open:
            return run.phase.baseline
        if isinstance(run.phase, Unprofiled):
            # Nothing can be predicted yet: the user's own profiler runs, or other ranks have no profile.
            return run.profiler.leanest if budget is not None and run.profiler.probed else run.phase.baseline
        trusted = run.agreement.trusted(run.breaker.allows(run.step))
        found = run.phase.place(length, room, follows=self._follows and trusted, samples=ahead.cut_samples)
        if found.least_bytes is not None:
            leanest = run.profiler.leanest
            denser = run.profiler.knowledge.handed.ahead(ahead.largest_bytes)
            measured = self._measured_peak(leanest, ahead, denser)
            least = min(found.least_bytes, self._measured_peak(found.plan, ahead, denser), measured)
            # Steps with the usual calls, or as dense as their batches explain, may take more than is left for them.
            whole = usable(budget) - run.peaks.unforeseen
            shares = run.calls.extra > 1 or run.step_room.accumulated_bytes(run.plan.accumulation_steps) > 0
            limit = whole if shares else room
            fits = least <= limit or self._measured_peak(leanest, ahead) <= whole
            run.least = None if fits else least
            if run.calls.extra > 1 or measured <= min(room, found.least_bytes):
                # What a unit keeps that is called last costs nothing in steps with the usual calls alone; and what was
                # measured counts for more than a prediction.
                return leanest
        return found.plan

    def _measured_peak(self, plan: Plan, ahead: StepAhead, denser: float = 1.0) -> float:
        """Return the peak that a step under a plan was measured to have; infinite if none was traced.

        Args:
            plan: The plan.
            ahead: The step whose batch it is wanted for.
            denser: What the step may be handed, divided by what its batch explains.
        """
        size = ahead.as_equal_pieces(round(ahead.largest_bytes * denser), plan.accumulation_steps)
        measured = self._run.profiler.knowledge.peak_of(plan, size)
        return math.inf if measured is None else measured

    def of_several(self, plan: Plan, size: int) -> Plan:
        """Return the plan with steps of several batches if one batch alone cannot show the gradient's noise."""
        run = self._run
        more = next((k for k in run.phase.space.accumulation_choices if k > 1), None)
        if not run.attached.adaptive or not run.acting or plan.accumulation_steps > 1 or more is None:
            return plan
        several = plan.changed(accumulation_steps=more)
        return several if run.fits(several, size) else plan


def _without(plan: Plan, locks: Collection[str]) -> Plan:
    """Return a plan that saves what is locked."""
    if all(plan.storage_of(name) is Storage.SAVE for name in locks):
        return plan
    return plan.changed(storage={name: Storage.SAVE if name in locks else one for name, one in plan.storage.items()})
