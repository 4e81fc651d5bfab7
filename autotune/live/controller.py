"""The controller of a live run: before each step it applies a plan, and after it, what the step has shown is recorded.

If anything here fails, the tuner detaches and the run continues with the user's baseline. ``live.tuner`` and
``mechanics.stepping`` cut batches and make updates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from autotune.agents.policy import PlanningPolicy
from autotune.live.agreement import LOCKED_ELSEWHERE
from autotune.live.attached import Attached, Step, StepAhead
from autotune.live.decision_log import DecisionLog
from autotune.live.decisions import Decisions
from autotune.live.limits import Stage
from autotune.live.live_run import LiveRun
from autotune.live.phases import Profiled, Unprofiled
from autotune.live.rank_channel import Ranks
from autotune.live.run_figures import RunFigures
from autotune.live.step_plans import StepPlans
from autotune.mechanics import devices
from autotune.mechanics.gradient_stats import GradientProbe
from autotune.mechanics.step_trace import Phase
from autotune.plan import Plan
from autotune.profiling.step_signature import Signature
from autotune.profiling.trial_passes import Outcome
from autotune.profiling.trial_state import copied_bytes

logger = logging.getLogger(__name__)

_PASSES: tuple[Phase, ...] = ("forward", "backward", "update")
# After memory ran out, plans may need at most this share of the memory that was predicted to suffice.
_LESS = 0.9


class Controller:
    """The controller of one run.

    Attributes:
        run: The run's instruments and state.
        heard: The passes of the running step whose beginning must be reported to :meth:`tell_phase`.

    Args:
        attached: The run as it was attached to.
        policy: The policy that decides.
        log: The decision log.
        ranks: The connection to the other ranks.
    """

    def __init__(self, attached: Attached, policy: Any, log: DecisionLog, ranks: Ranks) -> None:
        self._policy = policy
        self.heard: tuple[Phase, ...] = ()
        self._begin(LiveRun(attached, log, ranks))

    def _begin(self, run: LiveRun) -> None:
        follows = run.attached.limits.follow_batches and isinstance(self._policy, PlanningPolicy)
        self.run, self._decisions, self._plans = run, Decisions(run, self._policy), StepPlans(run, follows=follows)
        # The signature of the running step, and the probe of its gradient, if that is sampled.
        self._signature = Signature((), (0, 0))
        self._probe: GradientProbe | None = None
        run.budget.read_device(run.fragments)
        self._closed = False

    def begin_again(self, attached: Attached) -> None:
        """Learn the run from the beginning, between two steps, because it is not as it was attached to.

        Args:
            attached: The run as it is.
        """
        former = self.run
        self.close()
        self._begin(LiveRun(attached, former.log, former.ranks, former))

    @property
    def wants_time(self) -> bool:
        """Whether the device must be synchronized to time the running step."""
        return self.run.profiler.watching

    def summary(self) -> dict[str, Any]:
        """Return figures of the run so far."""
        run, decisions = self.run, self._decisions
        budget, peak, ran = run.budget.latest, run.predicted_peak_bytes, decisions.last_ran
        gradient = None if decisions.latest is None else decisions.latest.gradient
        return RunFigures(
            steps=run.step,
            total_steps=run.attached.total_steps,
            run_s=run.time.run_s,
            stage=str(run.attached.stage),
            acting=run.acting,
            plan=run.plan,
            decided=run.phase.decided,
            switches=decisions.switches,
            placed=run.placed,
            trips=list(run.breaker.trips),
            over_budget_steps=run.over_budget,
            memory_budget_bytes=budget,
            predicted_peak_bytes=peak,
            measured_peak_bytes=run.profiler.knowledge.latest_peak,
            pressure=peak / budget if peak is not None and budget else None,
            predicted_s=None if ran is None else ran.predicted,
            measured_s=None if ran is None else ran.seconds,
            noise_scale=None if gradient is None else gradient.noise_scale,
            overhead_frac=run.overhead_frac(),
            parts=None if decisions.parts is None else decisions.parts.to_json(),
            advice=decisions.advice,
        ).to_dict()

    def before_step(self, ahead: StepAhead) -> None:
        """Read the budget, and apply the plan of the step.

        Args:
            ahead: The step.
        """
        run = self.run
        learns, run.least = not run.profiler.done, None
        run.step_room.begin_step()
        if run.budget.latest is not None:
            run.profiler.knowledge.count_held(run.time.run_s / max(run.step, 1))
        if learns:
            # The share of reserved memory that steps leave unused is still being learnt.
            run.budget.read_device(run.fragments)
        budget = run.budget.read(run.step, run.fragments)
        # Until it is known what steps with more calls need, nothing fuller than the leanest plan is known to fit.
        allowed = 0 if run.awaits_calls(ahead.largest_bytes) else run.allowed
        lesson = run.profiler.plan_for(ahead, allowed) if learns else None
        if run.profiler.complete and not run.agreement.many:
            # First, because sizes are relative to the batch of the profile.
            self._decisions.take_newest_profile()
        plan = self._plans.plan_of(ahead, lesson)
        # Planning from the first profile is part of learning, too.
        run.time.learns = learns or run.profiler.watching
        every = run.attached.limits.statistics_every
        sampled = every is not None and run.step % every == every - 1 and not run.profiler.watching
        run.apply(self._plans.of_several(plan, ahead.largest_bytes) if sampled else plan)
        run.size = ahead.as_equal_pieces(ahead.largest_bytes, run.plan.accumulation_steps)
        self._signature = ahead.signature
        self._begin_to_count()
        run.calls.begin_step()
        run.profiler.begin()
        if run.profiler.watching:
            run.profiler.knowledge.count_held()
        # A peak says nothing about its plan if no plan fits the step, or if the step is watched.
        counts = run.least is None and not run.profiler.watching
        run.peaks.begin(run.plan, run.size, budget, counts=counts)
        if sampled:
            trained = [p for group in run.attached.optimizer.param_groups for p in group["params"]]
            alone = max(run.plan.accumulation_steps, run.attached.accumulation_steps) == 1
            self._probe = GradientProbe(trained, whole=alone)
            self._probe.__enter__()
        watched = run.profiler.watching or sampled
        self.heard = _PASSES if watched else _PASSES[:1] if run.calls.counting else ()

    @property
    def sampling(self) -> bool:
        """Whether the running step's gradient is read before its update."""
        return self._probe is not None

    @property
    def shadows(self) -> tuple[Plan, ...]:
        """The plans that the batch is tried under before the step itself; none for most steps."""
        return self.run.profiler.shadows

    @contextmanager
    def trying(self, plan: Plan) -> Iterator[list[Exception]]:
        """Run trial passes under a plan; yield the exceptions that units raise."""
        run = self.run
        try:
            with run.calls.aside(), run.switcher.trying(plan) as failures:
                yield failures
        finally:
            # The loop's body may have detached the tuner.
            if not self._closed:
                run.switcher.apply(run.plan)

    @property
    def tries_storages(self) -> bool:
        """Whether the plans in :attr:`shadows` differ in the storages of units alone."""
        plans = self.shadows
        return all(plan.changed(storage=plans[0].storage) == plans[0] for plan in plans)

    def take_shadows(self, outcomes: Sequence[Outcome], *, copied: int, again: bool) -> None:
        """Evaluate the trial passes; a choice that fails on one rank is locked on all.

        Args:
            outcomes: the outcomes of the passes under :attr:`shadows`, in the same order.
            copied: bytes of the copies on the host by which the model's state was restored.
            again: whether the passes should be run again with a later batch, and under a larger k if the step itself
                needs one: memory ran out, or no parameter got a gradient, on any rank.
        """
        run = self.run
        if not devices.is_accelerator(run.attached.device):
            run.profiler.note_copies(copied)
        known = run.profiler.locks.get("accumulation_steps")
        if again and run.profiler.puts_off_shadows():
            return
        run.profiler.take_shadows(outcomes)
        names = ["accumulation_steps", *map(str, run.attached.space.precisions[1:])]
        for name in run.agreement.locked_elsewhere(names, run.profiler.locks):
            run.profiler.lock(name, LOCKED_ELSEWHERE)
        k, reason = run.profiler.space.accumulation_choices[0], run.profiler.locks.get("accumulation_steps")
        if reason is None or reason == known:
            return
        if isinstance(run.phase, Profiled):
            logger.warning("step %d: batches are not cut any more: %s", run.step, reason)
            run.log.write("locked", run.step, what="accumulation_steps", reason=reason)
            self._decisions.narrow(run.phase, run.phase.decided.changed(accumulation_steps=k))
        if run.plan.accumulation_steps != k:
            # The step itself is not cut either.
            run.apply(run.profiler.leanest)

    def wait(self, batch_bytes: int) -> None:
        """Run a step, in which k and precisions cannot be switched, under a storage with which the whole batch fits.

        Args:
            batch_bytes: bytes of its batch, which is not cut.
        """
        run = self.run
        run.calls.begin_step()
        if run.attached.stage is not Stage.ACT or run.budget.latest is None:
            return
        whole = run.plan.changed(accumulation_steps=run.phase.space.accumulation_choices[0])
        if not run.fits(whole, batch_bytes):
            run.apply(run.plan.changed(storage=run.profiler.leanest.storage))

    def lock_rounding(self, reason: str) -> None:
        """Leave k and precisions as they are from now on; only storage is switched.

        Args:
            reason: Why.
        """
        run = self.run
        space, phase = run.profiler.space, run.phase
        for name in ("accumulation_steps", *map(str, space.precisions[1:])):
            if name not in run.profiler.locks:
                run.profiler.lock(name, reason)
        logger.warning("step %d: k and precisions are left as they are: %s", run.step, reason)
        run.log.write("locked", run.step, what="rounding", reason=reason)
        if isinstance(phase, Profiled):
            self._decisions.narrow(phase, phase.baseline.changed(storage=phase.decided.storage))
        run.apply(run.profiler.leanest)

    def lock_shadows(self, reason: str) -> None:
        """Lock the choices that trial passes were to test."""
        self.run.profiler.lock_shadows(reason)

    def note_writes(self, names: Collection[str]) -> None:
        """Take the weights and large buffers that the model writes to, which trial passes copy.

        Args:
            names: their names.
        """
        run = self.run
        if not devices.is_accelerator(run.attached.device):
            run.profiler.note_copies(copied_bytes(run.attached.model, names))

    def tell_phase(self, name: Phase) -> None:
        """Note that a pass of a micro-batch begins."""
        run = self.run
        run.profiler.phase(name)
        if name == "forward":
            run.calls.begin_pass()
            if self._probe is not None:
                self._probe.next_micro_batch()

    def go_on(self) -> None:
        """Note that a micro-batch's forward pass goes on, whose end was told."""
        self.run.profiler.go_on()

    def before_update(self, norm: float, micro_samples: Sequence[int], scales: Sequence[float]) -> None:
        """Read the gradient's statistics, after unscaling and before clipping."""
        if self._probe is None:
            return
        probe, self._probe = self._probe, None
        probe.__exit__(None, None, None)
        sample = probe.read()
        if len(sample.micro or scales[:1]) == len(scales):
            self.run.monitor.observe(sample, step=self.run.step, norm=norm, micro_samples=micro_samples, scales=scales)

    def after_step(self, step: Step) -> None:
        """Record a step, and make a decision if one is due."""
        run = self.run
        self._end_probe()
        calls = run.calls.end_step(run.profiler.probed_units)
        peak, watched = run.peaks.end(counts=calls <= run.calls.usual), run.profiler.watching
        if run.peaks.news:
            run.peaks.correct(run.phase.peak_bytes)
        handed = run.calls.handed if step.later_bytes else [sum(run.calls.handed)]
        step = replace(step, handed=tuple(handed), handed_calls=run.calls.handed_calls, called=run.calls.called)
        step = run.profiler.knowledge.note_kind(step, self._signature)
        self._decisions.take_news(run.profiler.end(step))
        if run.calls.also_count(run.profiler.probes.left_out):
            run.switcher.apply(run.plan)
        if run.calls.takes_turns:
            run.profiler.knowledge.expect(run.calls.tell_apart())
            run.switcher.apply(run.plan)
        if run.calls.compares and calls <= run.calls.usual:
            run.profiler.knowledge.note_usual(step)
        self._decisions.look_at_profile()
        peak = run.profiler.step_peak or peak or 0
        most = max(calls, run.profiler.knowledge.take_odd_calls())
        expected = run.phase.peak_bytes(run.plan, run.size) if peak else None
        run.step_room.note_calls(run.step, most, peak=peak, expected=expected)
        exceeds, least = peak > (run.budget.latest or math.inf), self._least_of(step, measured=peak > 0)
        # Where batches do not tell what units are handed, the budget is called unreachable by what was measured alone.
        told = run.profiler.knowledge.handed.ratio(step) is None
        if least is not None and (exceeds or (not peak and least > (run.budget.latest or 0))):
            exceeds = True
            if told or peak:
                run.budget.warn_unreachable(run.step, least if told else min(least, peak))
        run.over_budget += exceeds
        barred = run.switcher.barred()
        self._decisions.take_news(bool(barred) and run.profiler.bar(barred))
        run.time.run_s += step.seconds
        self._decisions.note_step(step, ordinary=not watched)

    def _least_of(self, step: Step, *, measured: bool) -> float | None:
        """Return the predicted peak of a step in bytes if no plan was known to fit it.

        Args:
            step: The step.
            measured: Whether its peak was measured, which counts for more.

        Returns:
            The peak; ``None`` if a plan was known to fit, or if what was traced tells too little of such a step.
        """
        run = self.run
        if run.least is None:
            return None
        known, least, size = run.profiler.knowledge, run.least, float(run.size)
        ratio = known.handed.ratio(step)
        if ratio is not None or step.later_bytes:
            # It was not known before the step how large all its batches, or what units are handed, would be.
            size = step.batch_bytes * (ratio or 1.0)
            peaks = least, run.phase.peak_bytes(run.plan, size), known.peak_of(run.plan, size)
            least = min(peak for peak in peaks if peak is not None)
        traced = known.peak_of(run.plan, 0.0) or 0.0
        exceeds = traced > (run.budget.latest or 0) or known.has_peak(run.plan, size)
        if not measured and (known.takes_turns or not exceeds):
            # A larger step, or one of another kind, may need less than is predicted.
            return None
        return least + run.peaks.unforeseen

    def end_times(self, step: Step) -> None:
        """Note that the caller goes on after a step; steps that are watched or tried are not like others."""
        self.run.times.end(samples=step.samples, items=step.items, ordinary=not self.run.time.learns)

    def abandon_step(self) -> None:
        """Discard a step that was not finished."""
        self._end_probe()
        self.run.times.abandon()
        self.run.profiler.abandon()

    def raise_k(self, k: int, reason: str) -> None:
        """Remove all smaller values of k after memory ran out in the running step, which is discarded.

        From now on, plans must also be predicted to need less memory than that step was.

        Args:
            k: The smallest value that is left.
            reason: The message of the out-of-memory error.
        """
        run = self.run
        self.abandon_step()
        run.log.write("out of memory", run.step, plan=run.plan, smallest_k=k, reason=reason)
        self._plans.begin_again()
        run.profiler.raise_k(k, reason)
        phase = run.phase
        if isinstance(phase, Unprofiled):
            run.phase = Unprofiled(run.profiler.space)
            return
        predicted = phase.placements.peak_bytes(run.plan, phase.share(run.size))
        if predicted < math.inf:
            run.budget.ceiling = int(min(predicted, run.budget.ceiling or math.inf) * _LESS)
        k = max(k, phase.decided.accumulation_steps)
        self._decisions.narrow(phase, phase.decided.changed(accumulation_steps=k))

    def _end_probe(self) -> None:
        """Remove the gradient probe of a step that did not reach :meth:`before_update`."""
        if self._probe is not None:
            self._probe.__exit__(None, None, None)
            self._probe = None

    def close(self) -> None:
        """Leave the model as it was found."""
        run, self._closed = self.run, True
        run.times.close()
        self.abandon_step()
        run.switcher.remove()
        run.plan = run.phase.baseline
        self._decisions.close()

    def _begin_to_count(self) -> None:
        """Begin to count calls of units, and what they are handed, if more of it could exceed a budget."""
        run = self.run
        acts = run.attached.stage is Stage.ACT and run.budget.latest is not None
        units = run.attached.space.recomputable
        if not acts or run.calls.counting or not units:
            return
        run.calls.count(units)
        run.switcher.apply(run.plan)
