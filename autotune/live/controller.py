"""The controller of a live run: it reads the budget, profiles steps, asks the policy, and switches plans.

If anything here fails, the tuner detaches and the run continues with the user's baseline. ``live.tuner`` and
``mechanics.stepping`` cut batches and make updates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from autotune.agents.policy import DipOutlook, PlanningPolicy
from autotune.cost_model.profile import Profile
from autotune.gym.observation import Observation
from autotune.live.agreement import LOCKED_ELSEWHERE, Agreement, Decision, Needs
from autotune.live.attached import Attached, Step, StepAhead
from autotune.live.cut_trials import CutTrials
from autotune.live.deciding import Decider, RecordedPolicy, dips_of, reserve_of
from autotune.live.decision_log import DecisionLog, digest_of
from autotune.live.guard import Breaker, Situation, SlowdownCheck, gain_of, judge
from autotune.live.limits import Stage
from autotune.live.live_profiler import LiveProfiler
from autotune.live.live_window import Ran, Window, figures_of
from autotune.live.memory_budget import BudgetReader
from autotune.live.phases import Profiled, Unprofiled
from autotune.live.placement import Placements, usable
from autotune.live.rank_channel import Ranks
from autotune.live.run_figures import RunFigures
from autotune.live.step_room import StepRoom
from autotune.live.step_times import StepTimes, as_values, of_all_ranks
from autotune.live.tripwires import Reading, Wires, compiled_graphs
from autotune.measurement import Measurement
from autotune.mechanics import controls, devices
from autotune.mechanics.gradient_stats import GradientMonitor, GradientProbe
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.step_trace import Phase
from autotune.plan import Plan, Storage
from autotune.profiling.memory_scaling import Scaling
from autotune.profiling.own_time import OwnTime
from autotune.profiling.step_peaks import StepPeaks
from autotune.profiling.step_signature import Signature
from autotune.profiling.trial_passes import Outcome
from autotune.profiling.unit_calls import UnitCalls
from autotune.step_parts import PARTS, StepParts, advice

logger = logging.getLogger(__name__)

_PASSES: tuple[Phase, ...] = ("forward", "backward", "update")
# A policy plans again once batches have grown by this factor; the rules use every new profile.
_BEGIN_AGAIN = 1.5
# After memory ran out, plans may need at most this share of the memory that was predicted to suffice.
_LESS = 0.9
# Seconds that a policy may take to plan from a profile.
_BEGIN_TIMEOUT_S = 30.0


class Pilot:
    """The controller of one run.

    Attributes:
        plan: The plan that is applied.
        step: Number of optimizer steps since the tuner was attached.
        phase: The phase of the run, which makes the predictions.
        time: Counter of the time that the tuner itself takes.
        times: Where the time of each step goes.
        over_budget: Number of steps for which no plan was known to fit, or whose measured peak exceeded the budget.
        switches: Number of switches that were decided.
        placed: Number of times that the applied plan has changed, for any reason.
        heard: The passes of the running step whose beginning must be reported to :meth:`tell_phase`.

    Args:
        attached: The run.
        policy: The policy that decides.
        log: The decision log.
        ranks: The connection to the other ranks.
    """

    def __init__(self, attached: Attached, policy: Any, log: DecisionLog, ranks: Ranks) -> None:
        self.attached = attached
        self.log = log
        self.ranks = ranks
        self.breaker = Breaker.closed(attached.limits)
        self.decider = Decider(policy, attached.limits.decision_timeout_s)
        self.phase: Unprofiled | Profiled = Unprofiled(attached.space)
        self.plan = self.phase.baseline
        self.time = OwnTime(attached.total_steps)
        self.times = StepTimes(attached.device)
        if ranks.many:
            self.times.watch_collectives()
        # Where the time of the last window's steps went, and the advice that was given about the run.
        self._parts: StepParts | None = None
        self._advice: str | None = None
        self._dips: DipOutlook | None = None
        self.step = self.switches = self.placed = self.over_budget = 0
        # The predicted peak of the leanest plan if no plan is known to fit the running step; ``None`` if one is.
        self._least: float | None = None
        # Until all ranks have a profile, each asks for its own steps; then the first rank decides for all.
        self._agreement = Agreement(ranks)
        # With several ranks: the last step that they planned, the bytes of this rank's batch, and the plan.
        self._together = (-1, 0, self.plan)
        # What this rank had locked when it last told the others.
        self._locks_told: set[str] = set()
        self._follows = attached.limits.follow_batches and isinstance(policy, PlanningPolicy)
        # Batch bytes and values of k of the profile that the policy planned from, whether a newer profile exists, and
        # the profile in use.
        self._begun = 0
        self._begun_ks: set[int] = set()
        self._news = False
        self._taken: Profile | None = None
        self._switcher = controls.Switcher(attached.model, [unit.name for unit in attached.space.units])
        # Where all steps are cut and computed alike, they may call different units.
        alike = len(attached.space.accumulation_choices) == len(attached.space.precisions) == 1
        may_take_turns = alike and not ranks.many
        self._calls = UnitCalls(self._switcher, tells_apart=may_take_turns)
        # The signature of the running step.
        self._signature = Signature((), (0, 0))
        self._profiler = LiveProfiler(attached, may_take_turns=may_take_turns)
        self._switcher.hooks = self._profiler.probes.hooks
        self._monitor = GradientMonitor(attached.model, attached.space.units)
        self._probe: GradientProbe | None = None
        self.heard: tuple[Phase, ...] = ()
        # The steps since the last decision, and those of the window before it.
        self._window, self._past = Window(), Window()
        self._reference: Measurement | None = None
        self._latest: Measurement | None = None
        self._last_ran: Ran | None = None
        self._previous_loss: float | None = None
        self._since_switch = 10**9
        self._size = 0
        self._wires = Wires(attached.limits)
        self._check = SlowdownCheck()
        self._budget = BudgetReader(attached, log)
        self._peaks = StepPeaks(attached.device)
        self._step_room = StepRoom(attached, self._budget, self._peaks, self._profiler.knowledge, self._calls)
        self._pressure: float | None = None
        self._cut_trials = CutTrials()
        # What trial passes need on the device beside their plan.
        self._copied_bytes = 0
        self._budget.read_device(self._fragments)

    @property
    def placements(self) -> Placements | None:
        """The plans with their predicted peaks; ``None`` until the run is profiled."""
        return self.phase.placements

    @property
    def acting(self) -> bool:
        """Whether plans may be switched now."""
        profiled = isinstance(self.phase, Profiled)
        return self.attached.stage is Stage.ACT and profiled and self.breaker.allows(self.step)

    @property
    def wants_time(self) -> bool:
        """Whether the device must be synchronized to time the running step."""
        return self._profiler.watching

    @property
    def calls(self) -> int:
        """Usual calls of a unit per forward pass, divided by its calls when it was profiled."""
        return self._calls.usual

    @property
    def locks(self) -> dict[str, str]:
        """The reasons for locks, by unit or choice; if profiling failed, the reason is under ``profile``."""
        failed = self._profiler.failed
        return {**self._profiler.locks, **({} if failed is None else {"profile": failed})}

    def summary(self) -> dict[str, Any]:
        """Return figures of the run so far."""
        latest, budget = self._latest, self._budget.latest
        # A plan is chosen for its own batch; other batches of the window may be larger.
        peak = self.phase.peak_bytes(self.plan, self._size) if self._size else None
        peak = None if peak is None else peak + self._peaks.unforeseen
        gradient = None if latest is None else latest.gradient
        return RunFigures(
            steps=self.step,
            total_steps=self.attached.total_steps,
            run_s=self.time.run_s,
            stage=str(self.attached.stage),
            acting=self.acting,
            plan=self.plan,
            decided=self.phase.decided,
            switches=self.switches,
            placed=self.placed,
            trips=list(self.breaker.trips),
            over_budget_steps=self.over_budget,
            memory_budget_bytes=budget,
            predicted_peak_bytes=peak,
            measured_peak_bytes=self._profiler.knowledge.latest_peak,
            pressure=peak / budget if peak is not None and budget else None,
            predicted_s=None if self._last_ran is None else self._last_ran.predicted,
            measured_s=None if self._last_ran is None else self._last_ran.seconds,
            noise_scale=None if gradient is None else gradient.noise_scale,
            overhead_frac=self.overhead_frac(),
            parts=None if self._parts is None else self._parts.to_json(),
            advice=self._advice,
        ).to_dict()

    # Before, in and after a step.

    def change(self) -> str | None:
        """Return how the model's modules have changed since the tuner was attached; ``None`` if they have not."""
        return self._switcher.change()

    def before_step(self, ahead: StepAhead) -> None:
        """Read the budget, and apply the plan of the step.

        Args:
            ahead: The step.
        """
        learns, self._least = not self._profiler.done, None
        self._step_room.begin_step()
        if self._budget.latest is not None:
            self._profiler.knowledge.count_held(self.time.run_s / max(self.step, 1))
        if learns:
            # The share of reserved memory that steps leave unused is still being learnt.
            self._budget.read_device(self._fragments)
        budget = self._budget.read(self.step, self._fragments)
        # Until it is known what steps with more calls need, nothing fuller than the leanest plan is known to fit.
        allowed = 0 if budget is not None and self._calls.is_unmeasured else self._allowed
        lesson = self._profiler.plan_for(ahead, allowed) if learns else None
        if self._agreement.many and self.attached.stage is Stage.ACT:
            plan = self._plan_together(ahead, lesson)
        else:
            if self._profiler.complete and self._profiler.profile is not self._taken and not self._agreement.many:
                # First, because sizes are relative to the batch of the profile.
                self._take_profile()
            plan = lesson or self._plan_ahead(ahead, self._length_of(ahead.largest_bytes), self._room)
        # Planning from the first profile is part of learning, too.
        self.time.learns = learns or self._profiler.watching
        every = self.attached.limits.statistics_every
        sampled = every is not None and self.step % every == every - 1 and not self._profiler.watching
        self._apply(self._of_several(plan, ahead.largest_bytes) if sampled else plan)
        self._size = ahead.as_equal_pieces(ahead.largest_bytes, self.plan.accumulation_steps)
        self._signature = ahead.signature
        self._begin_to_count()
        self._calls.begin_step()
        self._profiler.begin()
        if self._profiler.watching:
            self._profiler.knowledge.count_held()
        # A peak says nothing about its plan if no plan fits the step, or if the step is watched.
        counts = self._least is None and not self._profiler.watching
        self._peaks.begin(self.plan, self._size, budget, counts=counts)
        if sampled:
            trained = [p for group in self.attached.optimizer.param_groups for p in group["params"]]
            alone = max(self.plan.accumulation_steps, self.attached.accumulation_steps) == 1
            self._probe = GradientProbe(trained, whole=alone)
            self._probe.__enter__()
        watched = self._profiler.watching or sampled
        self.heard = _PASSES if watched else _PASSES[:1] if self._calls.counting else ()

    @property
    def sampling(self) -> bool:
        """Whether the running step's gradient is read before its update."""
        return self._probe is not None

    @property
    def shadows(self) -> tuple[Plan, ...]:
        """The plans that the batch is tried under before the step itself; none for most steps."""
        return self._profiler.shadows

    @contextmanager
    def trying(self, plan: Plan) -> Iterator[list[Exception]]:
        """Run trial passes under a plan; yield the exceptions that units raise."""
        try:
            with self._calls.aside(), self._switcher.trying(plan) as failures:
                yield failures
        finally:
            self._switcher.apply(self.plan)

    def take_shadows(self, outcomes: Sequence[Outcome], *, copied_bytes: int, ran_out: bool) -> None:
        """Evaluate the trial passes; a choice that fails on one rank is locked on all.

        Args:
            outcomes: the outcomes of the passes under :attr:`shadows`, in the same order.
            copied_bytes: bytes of the copies on the host by which the model's state was restored.
            ran_out: whether memory ran out in a pass of any rank: if the step itself also needs a larger k, the passes
                are run again under that.
        """
        if not devices.is_accelerator(self.attached.device):
            self._copied_bytes = copied_bytes
        if ran_out and self._profiler.puts_off_shadows():
            return
        self._profiler.take_shadows(outcomes)
        names = ["accumulation_steps", *map(str, self.attached.space.precisions[1:])]
        for name in self._agreement.locked_elsewhere(names, self._profiler.locks):
            self._profiler.lock(name, LOCKED_ELSEWHERE)
        k, reason = self._profiler.space.accumulation_choices[0], self._profiler.locks.get("accumulation_steps")
        if reason is None:
            return
        if isinstance(self.phase, Profiled):
            logger.warning("step %d: batches are not cut any more: %s", self.step, reason)
            self.log.write("locked", self.step, what="accumulation_steps", reason=reason)
            self._narrow(self.phase, self.phase.decided.changed(accumulation_steps=k))
        if self.plan.accumulation_steps != k:
            # The step itself is not cut either.
            self._apply(self._profiler.leanest)

    def wait(self, batch_bytes: int) -> None:
        """Run a step, in which k and precisions cannot be switched, under a storage with which the whole batch fits.

        Args:
            batch_bytes: bytes of its batch, which is not cut.
        """
        self._calls.begin_step()
        if self.attached.stage is not Stage.ACT or self._budget.latest is None:
            return
        whole = self.plan.changed(accumulation_steps=self.phase.space.accumulation_choices[0])
        if not self._fits(whole, batch_bytes):
            self._apply(self.plan.changed(storage=self._profiler.leanest.storage))

    def lock_rounding(self, reason: str) -> None:
        """Leave k and precisions as they are from now on; only storage is switched.

        Args:
            reason: Why.
        """
        space, phase = self._profiler.space, self.phase
        for name in ("accumulation_steps", *map(str, space.precisions[1:])):
            if name not in self._profiler.locks:
                self._profiler.lock(name, reason)
        logger.warning("step %d: k and precisions are left as they are: %s", self.step, reason)
        self.log.write("locked", self.step, what="rounding", reason=reason)
        if isinstance(phase, Profiled):
            self._narrow(phase, phase.baseline.changed(storage=phase.decided.storage))
        self._apply(self._profiler.leanest)

    def lock_shadows(self, reason: str) -> None:
        """Lock the choices that trial passes were to test."""
        self._profiler.lock_shadows(reason)

    def tell_phase(self, name: Phase) -> None:
        """Note that a pass of a micro-batch begins."""
        self._profiler.phase(name)
        if name == "forward":
            self._calls.begin_pass()
            if self._probe is not None:
                self._probe.next_micro_batch()

    def go_on(self) -> None:
        """Note that a micro-batch's forward pass goes on, whose end was told."""
        self._profiler.go_on()

    def before_update(self, norm: float, micro_samples: Sequence[int], scales: Sequence[float]) -> None:
        """Read the gradient's statistics, after unscaling and before clipping."""
        if self._probe is None:
            return
        probe, self._probe = self._probe, None
        probe.__exit__(None, None, None)
        sample = probe.read()
        if len(sample.micro or scales[:1]) == len(scales):
            self._monitor.observe(sample, step=self.step, norm=norm, micro_samples=micro_samples, scales=scales)

    def after_step(self, step: Step) -> None:
        """Record a step, and make a decision if one is due."""
        self._end_probe()
        calls = self._calls.end_step(self._profiler.probed_units)
        peak, watched = self._peaks.end(counts=calls <= self._calls.usual), self._profiler.watching
        if self._peaks.news:
            self._peaks.correct(self.phase.peak_bytes)
        handed = self._calls.handed if step.later_bytes else [sum(self._calls.handed)]
        step = replace(step, handed=tuple(handed), handed_calls=self._calls.handed_calls, called=self._calls.called)
        step = self._profiler.knowledge.note_kind(step, self._signature)
        self._take_news(self._profiler.end(step))
        if self._calls.also_count(self._profiler.probes.left_out):
            self._switcher.apply(self.plan)
        if self._calls.takes_turns:
            self._profiler.knowledge.expect(self._calls.tell_apart())
            self._switcher.apply(self.plan)
        if self._calls.compares and calls <= self._calls.usual:
            self._profiler.knowledge.note_usual(step)
        self._look_at_profile()
        peak = self._profiler.step_peak or peak or 0
        most = max(calls, self._profiler.knowledge.take_odd_calls())
        expected = self.phase.peak_bytes(self.plan, self._size) if peak else None
        self._step_room.note_calls(self.step, most, peak=peak, expected=expected)
        exceeds, least = peak > (self._budget.latest or math.inf), self._least_of(step, measured=peak > 0)
        # Where batches do not tell what units are handed, the budget is called unreachable by what was measured alone.
        told = self._profiler.knowledge.handed.ratio(step) is None
        if least is not None and (exceeds or (not peak and least > (self._budget.latest or 0))):
            exceeds = True
            if told or peak:
                self._budget.warn_unreachable(self.step, least if told else min(least, peak))
        self.over_budget += exceeds
        barred = self._switcher.barred()
        self._take_news(bool(barred) and self._profiler.bar(barred))
        self.time.run_s += step.seconds
        self._take(step, ordinary=not watched)
        # Per byte, because under adaptive batching longer steps consume more batches.
        if not self._check.runs_baseline or self.plan == self.phase.baseline:
            self._check.note(step.seconds / max(step.all_bytes, 1))
        rounds = self.plan.precision != self.phase.baseline.precision
        reason = self._wires.after_step(stepped=step.stepped, rounds=rounds)
        if reason is not None:
            self.trip(reason)
        self.step += 1
        self._since_switch += 1
        if self.step % self.attached.limits.decide_every == 0:
            self._meet()

    def _least_of(self, step: Step, *, measured: bool) -> float | None:
        """Return the predicted peak of a step in bytes if no plan was known to fit it.

        Args:
            step: The step.
            measured: Whether its peak was measured, which counts for more.

        Returns:
            The peak; ``None`` if a plan was known to fit, or if what was traced tells too little of such a step.
        """
        if self._least is None:
            return None
        known, least, size = self._profiler.knowledge, self._least, float(self._size)
        ratio = known.handed.ratio(step)
        if ratio is not None or step.later_bytes:
            # It was not known before the step how large all its batches, or what units are handed, would be.
            size = step.batch_bytes * (ratio or 1.0)
            peaks = least, self.phase.peak_bytes(self.plan, size), known.peak_of(self.plan, size)
            least = min(peak for peak in peaks if peak is not None)
        traced = known.peak_of(self.plan, 0.0) or 0.0
        exceeds = traced > (self._budget.latest or 0) or known.has_peak(self.plan, size)
        if not measured and (known.takes_turns or not exceeds):
            # A larger step, or one of another kind, may need less than is predicted.
            return None
        return least + self._peaks.unforeseen

    def end_times(self, step: Step) -> None:
        """Note that the caller goes on after a step; steps that are watched or tried are not like others."""
        self.times.end(samples=step.samples, items=step.items, ordinary=not self.time.learns)

    def abandon_step(self) -> None:
        """Discard a step that was not finished."""
        self._end_probe()
        self.times.abandon()
        self._profiler.abandon()

    @property
    def ks(self) -> tuple[int, ...]:
        """The values of k that plans may choose from; none where no plan may be switched."""
        return self._profiler.space.accumulation_choices if self.attached.stage is Stage.ACT else ()

    def raise_k(self, k: int, reason: str) -> None:
        """Remove all smaller values of k after memory ran out in the running step, which is discarded.

        From now on, plans must also be predicted to need less memory than that step was.

        Args:
            k: The smallest value that is left.
            reason: The message of the out-of-memory error.
        """
        self.abandon_step()
        self.log.write("out of memory", self.step, plan=self.plan, smallest_k=k, reason=reason)
        # All ranks run the step again, under another plan.
        self._together = (-1, 0, self.plan)
        self._profiler.raise_k(k, reason)
        phase = self.phase
        if isinstance(phase, Unprofiled):
            self.phase = Unprofiled(self._profiler.space)
            return
        predicted = phase.placements.peak_bytes(self.plan, phase.share(self._size))
        if predicted < math.inf:
            self._budget.ceiling = int(min(predicted, self._budget.ceiling or math.inf) * _LESS)
        k = max(k, phase.decided.accumulation_steps)
        self._narrow(phase, phase.decided.changed(accumulation_steps=k))

    def _narrow(self, phase: Profiled, decided: Plan) -> None:
        """Continue with a plan among the values of k that are left; a policy plans again."""
        self._begun, self._news = 0, True
        if not self._profiler.complete:
            # No step with an allowed k was traced: costs are learnt again.
            self.phase = Unprofiled(self._profiler.space)
            return
        phase.decide_on(decided)
        if self._agreement.many:
            profile = replace(phase.placements.profile, accumulation_choices=self.ks)
            self._adopt(profile, phase.placements.scaling)
        else:
            self._take_profile()

    def _end_probe(self) -> None:
        """Remove the gradient probe of a step that did not reach :meth:`before_update`."""
        if self._probe is not None:
            self._probe.__exit__(None, None, None)
            self._probe = None

    def close(self) -> None:
        """Leave the model as it was found."""
        self.times.close()
        self.abandon_step()
        self._switcher.remove()
        self.plan = self.phase.baseline
        self.decider.close()

    # Plans.

    def trip(self, reason: str) -> None:
        """Go back to the baseline for a while; after too many trips, for good."""
        self.breaker.trip(self.step, reason)
        self.log.write("tripped", self.step, reason=reason, trips=len(self.breaker.trips), open=self.breaker.open)
        self.phase.decide_on(self.phase.fallback(self._room, self._length()))

    def _plan_together(self, ahead: StepAhead, lesson: Plan | None) -> Plan:
        """Return the plan of a step on several ranks, the same on all of them.

        Args:
            ahead: The step.
            lesson: The plan that this rank would learn from; ``None`` for an ordinary step.
        """
        profiler, agreement, size = self._profiler, self._agreement, ahead.largest_bytes
        step, planned_bytes, plan = self._together
        if step != self.step:
            apart = lesson is not None or profiler.locks.keys() != self._locks_told
            own = Needs(length=self._length_of(size), room=self._room, apart=apart)
            needs = agreement.most_demanding(own)
            plan = self._plan_ahead(ahead, needs.length, needs.room, lesson)
            if needs.apart:
                names, locks = self.attached.space.recomputable, profiler.locks
                plan, elsewhere = agreement.leanest(plan, names, locks.keys(), self.attached.space.precisions)
                self._take_news(profiler.bar(dict.fromkeys(elsewhere, LOCKED_ELSEWHERE)))
                self._locks_told = set(profiler.locks)
            plan = _without(plan, profiler.locks)
        elif size > planned_bytes and not self.attached.spread:
            # Only this rank begins again, or all do: the others cannot be asked.
            plan = profiler.leanest
        self._together = (self.step, size, plan)
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
        profiler = self._profiler
        size = ahead.largest_bytes * profiler.knowledge.handed.ahead(ahead.largest_bytes)
        plan = self._placed_plan(ahead, length, room)
        if lesson is not None:
            plan = lesson if isinstance(self.phase, Unprofiled) else plan.changed(storage=lesson.storage)
        elif self._is_news(ahead, length):
            plan = profiler.look_at(ahead)
        elif self._waits_for_calls:
            plan = profiler.wait_for_calls(ahead)
        elif self._check.runs_baseline and self._fits(self.phase.baseline, size):
            plan = self.phase.baseline
        elif (unseen := self._unseen(plan, ahead)) is not None:
            plan = unseen
        elif self._cut_trials.due(plan, profiler.space) and (other := self._other_cut(plan, ahead, room)) is not None:
            profiler.try_again(plan, other)
        else:
            profiler.also_watch(plan, ahead)
        return plan

    def _is_news(self, ahead: StepAhead, length: float) -> bool:
        """Return whether plans must fit a budget, and no step like this one, or nearly as large, was traced.

        Where no plan is predicted to fit, the leanest must have been traced with a batch as large.
        """
        # The budget also holds while no policy is trusted after a trip.
        acts = self.attached.stage is Stage.ACT and not self.breaker.open and not self._agreement.many
        if not acts or self._budget.latest is None or self.placements is None or not self._profiler.complete:
            return False
        known = self._profiler.knowledge
        if not known.knows(ahead.signature) or not self.placements.reaches(length):
            return True
        if known.handed.is_news:
            return True
        return self._least is not None and not self._profiler.knows_leanest(ahead)

    @property
    def _waits_for_calls(self) -> bool:
        """Whether a step with more calls of units than usual must be measured, so that the budget holds in the next."""
        able = self._profiler.complete and not self._agreement.many
        return able and self.acting and self._budget.latest is not None and self._calls.is_unmeasured

    def _other_cut(self, plan: Plan, ahead: StepAhead, room: float) -> Plan | None:
        """Return the plan of trial passes that show whether a plan's cut keeps the gradient; ``None`` for none.

        Larger pieces show more, because small ones may hold no samples that are coupled; smaller ones always fit.
        """
        k, lean = plan.accumulation_steps, self._profiler.leanest.storage
        coarser = plan.changed(accumulation_steps=max(k // 2, 1), storage=lean)
        finer = plan.changed(accumulation_steps=2 * k)
        # The trial's own plan runs too, beside the copies that restore the model's state.
        left = room - self._copied_bytes
        if not self.phase.fits(plan, ahead.as_equal_pieces(ahead.largest_bytes, k), left):
            return None
        if self.phase.fits(coarser, ahead.as_equal_pieces(ahead.largest_bytes, coarser.accumulation_steps), left):
            return coarser
        return finer if k < ahead.samples else None

    def _unseen(self, plan: Plan, ahead: StepAhead) -> Plan | None:
        """Return a plan to learn from, in place of the one that the step is to run under; ``None`` to keep that."""
        if self._allowed is None or not self.acting or self._agreement.many:
            return None
        return self._profiler.try_unseen(plan, ahead, self._allowed)

    def _placed_plan(self, ahead: StepAhead, length: float, room: float) -> Plan:
        """Return the plan for a batch: the decided one, with the storage that fits the batch and the budget best."""
        budget = self._budget.latest
        if self.attached.stage is Stage.OBSERVE or self.breaker.open:
            return self.phase.baseline
        if isinstance(self.phase, Unprofiled):
            # Nothing can be predicted yet: the user's own profiler runs, or other ranks have no profile.
            return self._profiler.leanest if budget is not None and self._profiler.probed else self.phase.baseline
        trusted = self._agreement.trusted(self.breaker.allows(self.step))
        found = self.phase.place(length, room, follows=self._follows and trusted, samples=ahead.cut_samples)
        if found.least_bytes is not None:
            leanest = self._profiler.leanest
            denser = self._profiler.knowledge.handed.ahead(ahead.largest_bytes)
            measured = self._measured_peak(leanest, ahead, denser)
            least = min(found.least_bytes, self._measured_peak(found.plan, ahead, denser), measured)
            # Steps with the usual calls, or as dense as their batches explain, may take more than is left for them.
            whole = usable(budget) - self._peaks.unforeseen
            shares = self._calls.extra > 1 or self._step_room.accumulated_bytes(self.plan.accumulation_steps) > 0
            limit = whole if shares else room
            fits = least <= limit or self._measured_peak(leanest, ahead) <= whole
            self._least = None if fits else least
            if self._calls.extra > 1 or measured <= min(room, found.least_bytes):
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
        measured = self._profiler.knowledge.peak_of(plan, size)
        return math.inf if measured is None else measured

    def _apply(self, plan: Plan) -> None:
        # Comparing plans is slow, and most are the same object.
        if plan is not self.plan and plan != self.plan:
            self._switcher.apply(plan)
            self.placed += 1
        elif not self._switcher.stands():
            # Other code has replaced the forward of a unit.
            self._switcher.apply(plan)
        self.plan = plan

    def _of_several(self, plan: Plan, size: int) -> Plan:
        """Return the plan with steps of several batches if one batch alone cannot show the gradient's noise."""
        more = next((k for k in self.phase.space.accumulation_choices if k > 1), None)
        if not self.attached.adaptive or not self.acting or plan.accumulation_steps > 1 or more is None:
            return plan
        several = plan.changed(accumulation_steps=more)
        return several if self._fits(several, size) else plan

    def _fits(self, plan: Plan, size: float) -> bool:
        return self.phase.fits(plan, size, self._room)

    @property
    def _room(self) -> float:
        """Bytes that a plan may be predicted to need: the usable budget less what steps needed beyond predictions."""
        return self._step_room.usable_bytes(self.plan.accumulation_steps)

    @property
    def _allowed(self) -> int | None:
        """The budget in bytes for a step with the usual calls of units, within which one with more calls fits too."""
        return self._step_room.allowed_bytes(self.plan.accumulation_steps)

    # Measurements.

    def _length_of(self, size: float) -> float:
        """Return the size of a batch relative to the profiled batch, with what the loop itself adds to it."""
        return self.phase.share(size) * self._profiler.knowledge.handed.ahead(round(size))

    @property
    def _fragments(self) -> int:
        return self._profiler.knowledge.fragments

    def _length(self) -> float:
        """Return the size of the last window's largest batch relative to the profiled batch."""
        return self.phase.share(self._past.largest_bytes) if self._past.sizes else 1.0

    def _take(self, step: Step, *, ordinary: bool) -> None:
        self._window.take(step)
        predicted = self.phase.seconds_of(self.plan) if ordinary else None
        if predicted is not None:
            seconds = step.seconds / max(self.phase.share(step.batch_bytes), 1e-9)
            self._window.compare(seconds, predicted, decided=self.plan == self.phase.decided)

    def _noise_scale(self) -> float | None:
        gradient = self._monitor.aged(self.step)
        return None if gradient is None else gradient.noise_scale

    def _measure(self) -> tuple[Measurement, int]:
        """Return the window since the last decision and its number of non-finite losses; begin a new window."""
        window = self._past = self._window
        self._window = Window()
        self._pressure = self._peaks.pressure
        self._budget.read_device(self._fragments)
        losses = window.loss_values()
        every = self.attached.limits.statistics_every
        measured = window.measurement(
            losses,
            peak_bytes=self._peaks.take() or self._profiler.knowledge.latest_peak,
            memory_budget_bytes=self._budget.take_least(),
            gradient=self._monitor.aged(self.step) if every is not None else None,
            learning_rate=float(self.attached.optimizer.param_groups[0]["lr"]),
            parts=self._take_parts(),
        )
        return measured, sum(not math.isfinite(loss) for loss in losses)

    def _take_parts(self) -> StepParts | None:
        """Return where the time of the last steps went, on all ranks; give advice once if a part is large."""
        own = self.times.take()
        found = own
        if self._agreement.gathers(len(PARTS)):
            found = of_all_ranks(own, self._agreement.gathered(as_values(own)))
        self._parts = found or self._parts
        told = advice(found)
        if told is not None and self._advice is None:
            self._advice = told
            self.log.write("advice", self.step, advice=told, parts=None if found is None else found.to_json())
            logger.info("step %d: %s", self.step, told)
        return found

    def _observe(self, window: Measurement) -> Observation:
        total = self.attached.total_steps
        self._reference = self._reference or window
        placements = self.placements
        observation = Observation(
            space=self.phase.space,
            plan=self.phase.decided,
            window=window,
            reference=self._reference,
            previous_loss=self._previous_loss,
            memory_budget_bytes=self._step_room.with_usual_calls(self._budget.announced),
            batch_size=1 if placements is None else placements.profile.batch_size,
            adaptive=self.attached.adaptive,
            progress=min(self.step / total, 1.0) if total else 0.0,
        )
        self._previous_loss = window.loss
        return observation

    # Profiles.

    def _take_news(self, news: bool) -> None:
        """Plan from a new profile if there is one: at once, or with several ranks at the next decision."""
        self._news = self._news or news
        if news and not self._agreement.many:
            self._take_profile()

    def _take_profile(self) -> None:
        """Adopt the latest profile; if batches have grown, a policy that plans from profiles plans again."""
        profile = self._taken = self._profiler.profile
        if profile is None:
            return
        self._news = False
        self._adopt(profile, self._profiler.growth.scaling)
        policy, size, ks = self.decider.policy, profile.tables[0].batch_bytes, set(profile.space.accumulation_choices)
        if isinstance(policy, PlanningPolicy) and (size > _BEGIN_AGAIN * self._begun or ks > self._begun_ks):
            self._begun, self._begun_ks = size, ks
            planner, budget = policy, self._allowed
            try:
                begun = self.decider.ask(lambda: planner.begin(profile, budget), _BEGIN_TIMEOUT_S)
            except any_error() as error:  # a policy that fails costs a trip, not the run
                self.trip(f"policy: {type(error).__name__}: {error}")
                return
            self._consider(begun, None)

    def _look_at_profile(self) -> None:
        """Stop to act if costs cannot be trusted any more: then all that may be is recomputed under a budget."""
        failed = self._profiler.failed
        if failed is None or isinstance(self.phase, Unprofiled):
            return
        if self._agreement.many:
            if self._profiler.complete:
                return
            # The others would wait for this rank at each step.
            raise RuntimeError(f"the run cannot be profiled any more: {failed}")
        self.phase = Unprofiled(self._profiler.space)
        self._check = SlowdownCheck()
        self.log.write("locked", self.step, what="profile", reason=failed)

    def _adopt(self, profile: Profile, scaling: Scaling) -> None:
        """Use a profile for predictions from now on."""
        phase = self.phase = Profiled(
            profile,
            self.phase,
            budget_bytes=self._allowed,
            scaling=scaling,
            largest_bytes=self._past.largest_bytes,
        )
        self._peaks.correct(phase.peak_bytes)
        if self._calls.counting and (self._profiler.knowledge.takes_turns or not self._calls.compares):
            calls_of = self._profiler.knowledge.calls_of
            self._calls.compare({name: calls_of(name) for name in self.phase.space.recomputable})
        autocast = self._profiler.probes.autocast
        self.log.write(
            "profiled",
            self.step,
            units=len(profile.units),
            kept_share=scaling.kept_share,
            square_share=scaling.square_share,
            autocast=None if autocast is None else str(autocast),
            locks=self.locks,
            scores=[asdict(score) for score in self._profiler.knowledge.scores],
            baseline={
                "seconds": phase.seconds_of(phase.baseline),
                "peak_bytes": phase.placements.peak_bytes(phase.baseline, 1.0),
            },
            static_bytes=profile.static_bytes,
            batch_bytes=profile.tables[0].batch_bytes,
        )

    def _begin_to_count(self) -> None:
        """Begin to count calls of units, and what they are handed, if more of it could exceed a budget."""
        acts = self.attached.stage is Stage.ACT and self._budget.latest is not None
        units = self.attached.space.recomputable
        if not acts or self._calls.counting or not units:
            return
        self._calls.count(units)
        self._switcher.apply(self.plan)

    # Decisions.

    def _meet(self) -> None:
        """Decide, once all ranks have a profile."""
        if not self._agreement.many:
            if isinstance(self.phase, Profiled):
                self._decide()
        elif self._agreement.all_profiled(self._profiler.complete):
            if self._agreement.is_first:
                self._decide_for_all()
            else:
                self._measure()
                self._follow(self._agreement.hear())

    def _decide_for_all(self) -> None:
        news = self._news or isinstance(self.phase, Unprofiled)
        if news:
            self._take_profile()
        self._decide()
        self.breaker.open = self.breaker.open or self.too_expensive()
        placements = self.placements
        self._agreement.tell(
            Decision(
                plan=self.phase.decided,
                open=self.breaker.open,
                trusts=self.breaker.allows(self.step),
                profile=placements.profile if news and placements is not None else None,
                scaling=self._profiler.growth.scaling,
            )
        )

    def _follow(self, decision: Decision) -> None:
        """Adopt the first rank's profile and decision."""
        if decision.profile is not None:
            self._adopt(decision.profile, decision.scaling)
        self.breaker.open = self.breaker.open or decision.open
        plan = self.phase.space.check(decision.plan)
        if plan != self.phase.decided:
            self._switch(plan)

    def _decide(self) -> None:
        window, non_finite = self._measure()
        self._latest, self._last_ran = window, self._past.ran() or self._last_ran
        if self._tripped(window, non_finite):
            return
        observation = self._observe(window)
        proposal: object = self.phase.decided
        if self.breaker.allows(self.step):
            proposal = self._asked(observation)
        if proposal is not None:
            self._consider(proposal, observation)

    def _asked(self, observation: Observation) -> object:
        policy, plan = self.decider.policy, self.phase.decided
        if isinstance(policy, RecordedPolicy):
            return policy.at(self.step) or plan
        try:
            proposal = self.decider.ask(lambda: policy.decide(observation, plan))
        except TimeoutError as error:
            self.log.write("late", self.step, reason=str(error))
            return None
        except any_error() as error:  # whatever a policy raises, the run goes on
            self.trip(f"policy: {type(error).__name__}: {error}")
            return None
        self._budget.reserve_frac, self._dips = reserve_of(policy), dips_of(policy)
        return proposal

    def _consider(self, proposal: object, observation: Observation | None) -> None:
        """Check a proposal against the rules, log the verdict, and switch if they allow it."""
        phase, budget = self.phase, self._budget.latest
        if isinstance(phase, Unprofiled):
            return
        now = Situation(
            space=phase.space,
            locks=self._profiler.locks,
            placements=phase.placements,
            usable_bytes=self._room,
            length=self._length(),
            current=phase.decided,
            since_switch=self._since_switch,
            switches=self.switches,
            noise_scale=self._noise_scale(),
        )
        ran = self._past.ran()
        verdict = judge(proposal, now, self.attached.limits)
        acts = self.attached.stage is Stage.ACT and self.breaker.allows(self.step)
        standing = self.summary()
        self.log.write(
            "decision",
            self.step,
            observation=None if observation is None else digest_of(observation),
            proposal=proposal,
            rules=verdict.rules,
            applied=acts and verdict.refused is None,
            predicted={
                "seconds": phase.seconds_of(verdict.plan),
                "peak_bytes": phase.placements.peak_bytes(verdict.plan, now.length),
                "gain": gain_of(verdict.plan, phase.decided, phase.placements, now.noise_scale),
            },
            measured=None if observation is None else figures_of(observation.window),
            ran=None if observation is None or ran is None else asdict(ran),
            memory_budget_bytes=budget,
            placed=self.placed,
            over_budget_steps=self.over_budget,
            overhead_frac=self.overhead_frac(),
            dips=None if self._dips is None else asdict(self._dips),
            # The plan of the last step, for viewers of the log.
            **{name: standing[name] for name in ("plan", "acting", "predicted_peak_bytes")},
        )
        if verdict.illegal:
            self.trip(f"illegal action: {verdict.refused}: {verdict.rules[verdict.refused or '']}")
        elif acts and verdict.refused is None and verdict.plan != phase.decided:
            self._switch(verdict.plan)

    def _switch(self, plan: Plan) -> None:
        self.phase.decide_on(plan)
        self.switches += 1
        self._since_switch = 0
        self.log.write("switched", self.step, plan=plan)

    def _tripped(self, window: Measurement, non_finite: int) -> bool:
        limits = self.attached.limits
        reason = self._wires.after_window(self._reading(window, non_finite))
        if not self.acting:
            return False
        if reason is None:
            reason = self._check.verdict(limits)
            # Ranks run the same plan, so one of them cannot run the baseline for comparison.
            possible = self._fits(self.phase.baseline, self._past.largest_bytes) and not self._agreement.many
            self._check.begin_if_slow(self._slowdown(), limits, possible=possible)
        if reason is not None:
            self._check = SlowdownCheck()
            self.trip(reason)
        return reason is not None

    def _reading(self, window: Measurement, non_finite: int) -> Reading:
        baseline, decided = self.phase.baseline, self.phase.decided
        return Reading(
            pressure=self._pressure,
            retries=self._peaks.retries,
            graphs=compiled_graphs(),
            placed=self.placed,
            non_finite=non_finite,
            rounds=(decided.accumulation_steps, decided.precision) != (baseline.accumulation_steps, baseline.precision),
        )

    def _slowdown(self) -> float | None:
        """Return the ratio of the window's measured to predicted step times; ``None`` under the baseline."""
        ran, should = self._past.ran(), self.phase.seconds_of(self.phase.baseline)
        if should is None or ran is None or self.plan == self.phase.baseline:
            return None
        return ran.seconds / max(ran.predicted, should)

    # Overhead.

    def spend(self, seconds: float) -> None:
        """Add to the tuner's own time."""
        self.time.spend(seconds)

    def overhead_frac(self) -> float:
        """Return the tuner's own share of the run's time."""
        return self.time.frac(self.step, self._profiler.probes.seconds)

    def too_expensive(self) -> bool:
        """Return whether the tuner takes a larger share of the run's time than allowed."""
        return self.time.is_too_expensive(self.step, self._profiler.probes.seconds, self.attached.limits.overhead_frac)


def _without(plan: Plan, locks: Collection[str]) -> Plan:
    """Return a plan that saves what is locked."""
    if all(plan.storage_of(name) is Storage.SAVE for name in locks):
        return plan
    return plan.changed(storage={name: Storage.SAVE if name in locks else one for name, one in plan.storage.items()})
