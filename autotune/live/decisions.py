"""The decisions of a live run: what its steps have shown is measured, the policy is asked, and plans are switched."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, replace
from typing import Any

from autotune.agents.policy import DipOutlook, PlanningPolicy
from autotune.cost_model.profile import Profile
from autotune.gym.observation import Observation
from autotune.live.agreement import Decision
from autotune.live.attached import Step
from autotune.live.deciding import Decider, RecordedPolicy, dips_of, reserve_of
from autotune.live.decision_log import digest_of
from autotune.live.guard import Situation, SlowdownCheck, gain_of, judge
from autotune.live.limits import Stage
from autotune.live.live_run import LiveRun
from autotune.live.live_window import Ran, Window, figures_of
from autotune.live.phases import Profiled, Unprofiled
from autotune.live.step_times import as_values, of_all_ranks
from autotune.live.tripwires import Reading, Wires, compiled_graphs
from autotune.measurement import Measurement
from autotune.mechanics.loop_signals import any_error
from autotune.plan import Plan
from autotune.profiling.memory_scaling import Scaling
from autotune.step_parts import PARTS, StepParts, advice

logger = logging.getLogger(__name__)

# A policy plans again once batches have grown by this factor; the rules use every new profile.
_BEGIN_AGAIN = 1.5
# Seconds that a policy may take to plan from a profile.
_BEGIN_TIMEOUT_S = 30.0


class Decisions:
    """Decides about a run, from the steps between two decisions.

    Attributes:
        latest: The window before the last decision; ``None`` before the first.
        last_ran: The measured and predicted time of the last window that had ordinary steps.
        parts: Where the time of the last window's steps went; ``None`` if it is not known.
        advice: The advice that was given about the run; ``None`` if none was.
        switches: Number of switches that were decided.

    Args:
        run: The run.
        policy: The policy that decides.
    """

    def __init__(self, run: LiveRun, policy: Any) -> None:
        self._run = run
        self._decider = Decider(policy, run.attached.limits.decision_timeout_s)
        self._dips: DipOutlook | None = None
        # Batch bytes and values of k of the profile that the policy planned from, and the profile in use.
        self._begun = 0
        self._begun_ks: set[int] = set()
        self._taken: Profile | None = None
        # The steps since the last decision, and those of the window before it.
        self._window, self._past = Window(), Window()
        self._reference: Measurement | None = None
        self._previous_loss: float | None = None
        self._pressure: float | None = None
        self._since_switch = 10**9
        self._wires = Wires(run.attached.limits)
        self.latest: Measurement | None = None
        self.last_ran: Ran | None = None
        self.parts: StepParts | None = None
        self.advice: str | None = None
        self.switches = 0

    def close(self) -> None:
        """Let the policy's thread end."""
        self._decider.close()

    def note_step(self, step: Step, *, ordinary: bool) -> None:
        """Record a step, and make a decision if one is due.

        Args:
            step: The step.
            ordinary: Whether it was neither watched nor tried.
        """
        run = self._run
        self._window.take(step)
        predicted = run.phase.seconds_of(run.plan) if ordinary else None
        if predicted is not None:
            seconds = step.seconds / max(run.phase.share(step.batch_bytes), 1e-9)
            self._window.compare(seconds, predicted, decided=run.plan == run.phase.decided)
        # Per byte, because under adaptive batching longer steps consume more batches.
        if not run.check.runs_baseline or run.plan == run.phase.baseline:
            run.check.note(step.seconds / max(step.all_bytes, 1))
        rounds = run.plan.precision != run.phase.baseline.precision
        reason = self._wires.after_step(stepped=step.stepped, rounds=rounds)
        if reason is not None:
            self.trip(reason)
        run.step += 1
        self._since_switch += 1
        if run.step % run.attached.limits.decide_every == 0:
            self._meet()

    def take_newest_profile(self) -> None:
        """Adopt the latest profile if it is not in use."""
        if self._run.profiler.profile is not self._taken:
            self._take_profile()

    def take_news(self, news: bool) -> None:
        """Plan from a new profile if there is one: at once, or with several ranks at the next decision."""
        run = self._run
        run.news = run.news or news
        if news and not run.agreement.many:
            self._take_profile()

    def _take_profile(self) -> None:
        """Adopt the latest profile; if batches have grown, a policy that plans from profiles plans again."""
        run = self._run
        profile = self._taken = run.profiler.profile
        if profile is None:
            return
        run.news = False
        self._adopt(profile, run.profiler.growth.scaling)
        policy, size, ks = self._decider.policy, profile.tables[0].batch_bytes, set(profile.space.accumulation_choices)
        if isinstance(policy, PlanningPolicy) and (size > _BEGIN_AGAIN * self._begun or ks > self._begun_ks):
            self._begun, self._begun_ks = size, ks
            planner, budget = policy, run.allowed
            try:
                begun = self._decider.ask(lambda: planner.begin(profile, budget), _BEGIN_TIMEOUT_S)
            except any_error() as error:  # a policy that fails costs a trip, not the run
                self.trip(f"policy: {type(error).__name__}: {error}")
                return
            self._consider(begun, None)

    def look_at_profile(self) -> None:
        """Stop to act if costs cannot be trusted any more: then all that may be is recomputed under a budget."""
        run = self._run
        failed = run.profiler.failed
        if failed is None or isinstance(run.phase, Unprofiled):
            return
        if run.agreement.many:
            if run.profiler.complete:
                return
            # The others would wait for this rank at each step.
            raise RuntimeError(f"the run cannot be profiled any more: {failed}")
        run.phase = Unprofiled(run.profiler.space)
        run.check = SlowdownCheck()
        run.log.write("locked", run.step, what="profile", reason=failed)

    def _adopt(self, profile: Profile, scaling: Scaling) -> None:
        """Use a profile for predictions from now on."""
        run = self._run
        phase = run.phase = Profiled(
            profile,
            run.phase,
            budget_bytes=run.allowed,
            scaling=scaling,
            largest_bytes=self._past.largest_bytes,
        )
        run.peaks.correct(phase.peak_bytes)
        if run.calls.counting and (run.profiler.knowledge.takes_turns or not run.calls.compares):
            calls_of = run.profiler.knowledge.calls_of
            run.calls.compare({name: calls_of(name) for name in run.phase.space.recomputable})
        autocast = run.profiler.probes.autocast
        run.log.write(
            "profiled",
            run.step,
            units=len(profile.units),
            kept_share=scaling.kept_share,
            square_share=scaling.square_share,
            autocast=None if autocast is None else str(autocast),
            locks=run.locks,
            scores=[asdict(score) for score in run.profiler.knowledge.scores],
            baseline={
                "seconds": phase.seconds_of(phase.baseline),
                "peak_bytes": phase.placements.peak_bytes(phase.baseline, 1.0),
            },
            static_bytes=profile.static_bytes,
            batch_bytes=profile.tables[0].batch_bytes,
        )

    def narrow(self, phase: Profiled, decided: Plan) -> None:
        """Continue with a plan among the values of k that are left; a policy plans again."""
        run = self._run
        self._begun, run.news = 0, True
        if not run.profiler.complete:
            # No step with an allowed k was traced: costs are learnt again.
            run.phase = Unprofiled(run.profiler.space)
            return
        phase.decide_on(decided)
        if run.agreement.many:
            profile = replace(phase.placements.profile, accumulation_choices=run.ks)
            self._adopt(profile, phase.placements.scaling)
        else:
            self._take_profile()

    def trip(self, reason: str) -> None:
        """Go back to the baseline for a while; after too many trips, for good."""
        run = self._run
        run.breaker.trip(run.step, reason)
        run.log.write("tripped", run.step, reason=reason, trips=len(run.breaker.trips), open=run.breaker.open)
        run.phase.decide_on(run.phase.fallback(run.room, self._length()))

    # Internal.

    def _length(self) -> float:
        """Return the size of the last window's largest batch relative to the profiled batch."""
        return self._run.phase.share(self._past.largest_bytes) if self._past.sizes else 1.0

    def _meet(self) -> None:
        """Decide, once all ranks have a profile."""
        run = self._run
        if not run.agreement.many:
            if isinstance(run.phase, Profiled):
                self._decide()
        elif run.agreement.all_profiled(run.profiler.complete):
            if run.agreement.is_first:
                self._decide_for_all()
            else:
                self._measure()
                self._follow(run.agreement.hear())

    def _decide_for_all(self) -> None:
        run = self._run
        news = run.news or isinstance(run.phase, Unprofiled)
        if news:
            self._take_profile()
        self._decide()
        run.breaker.open = run.breaker.open or run.too_expensive()
        placements = run.placements
        run.agreement.tell(
            Decision(
                plan=run.phase.decided,
                open=run.breaker.open,
                trusts=run.breaker.allows(run.step),
                profile=placements.profile if news and placements is not None else None,
                scaling=run.profiler.growth.scaling,
            )
        )

    def _follow(self, decision: Decision) -> None:
        """Adopt the first rank's profile and decision."""
        run = self._run
        if decision.profile is not None:
            self._adopt(decision.profile, decision.scaling)
        run.breaker.open = run.breaker.open or decision.open
        plan = run.phase.space.check(decision.plan)
        if plan != run.phase.decided:
            self._switch(plan)

    def _decide(self) -> None:
        run = self._run
        window, non_finite = self._measure()
        self.latest, self.last_ran = window, self._past.ran() or self.last_ran
        if self._tripped(window, non_finite):
            return
        observation = self._observe(window)
        proposal: object = run.phase.decided
        if run.breaker.allows(run.step):
            proposal = self._asked(observation)
        if proposal is not None:
            self._consider(proposal, observation)

    def _asked(self, observation: Observation) -> object:
        run = self._run
        policy, plan = self._decider.policy, run.phase.decided
        if isinstance(policy, RecordedPolicy):
            return policy.at(run.step) or plan
        try:
            proposal = self._decider.ask(lambda: policy.decide(observation, plan))
        except TimeoutError as error:
            run.log.write("late", run.step, reason=str(error))
            return None
        except any_error() as error:  # whatever a policy raises, the run goes on
            self.trip(f"policy: {type(error).__name__}: {error}")
            return None
        run.budget.reserve_frac, self._dips = reserve_of(policy), dips_of(policy)
        return proposal

    def _consider(self, proposal: object, observation: Observation | None) -> None:
        """Check a proposal against the rules, log the verdict, and switch if they allow it."""
        run = self._run
        phase, budget = run.phase, run.budget.latest
        if isinstance(phase, Unprofiled):
            return
        now = Situation(
            space=phase.space,
            locks=run.profiler.locks,
            placements=phase.placements,
            usable_bytes=run.room,
            length=self._length(),
            current=phase.decided,
            since_switch=self._since_switch,
            switches=self.switches,
            noise_scale=self._noise_scale(),
        )
        ran = self._past.ran()
        verdict = judge(proposal, now, run.attached.limits)
        acts = run.attached.stage is Stage.ACT and run.breaker.allows(run.step)
        run.log.write(
            "decision",
            run.step,
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
            placed=run.placed,
            over_budget_steps=run.over_budget,
            overhead_frac=run.overhead_frac(),
            dips=None if self._dips is None else asdict(self._dips),
            # The plan of the last step, for viewers of the log.
            plan=run.plan,
            acting=run.acting,
            predicted_peak_bytes=run.predicted_peak_bytes,
        )
        if verdict.illegal:
            self.trip(f"illegal action: {verdict.refused}: {verdict.rules[verdict.refused or '']}")
        elif acts and verdict.refused is None and verdict.plan != phase.decided:
            self._switch(verdict.plan)

    def _switch(self, plan: Plan) -> None:
        run = self._run
        run.phase.decide_on(plan)
        self.switches += 1
        self._since_switch = 0
        run.log.write("switched", run.step, plan=plan)

    def _tripped(self, window: Measurement, non_finite: int) -> bool:
        run = self._run
        limits = run.attached.limits
        reason = self._wires.after_window(self._reading(window, non_finite))
        if not run.acting:
            return False
        if reason is None:
            reason = run.check.verdict(limits)
            # Ranks run the same plan, so one of them cannot run the baseline for comparison.
            possible = run.fits(run.phase.baseline, self._past.largest_bytes) and not run.agreement.many
            run.check.begin_if_slow(self._slowdown(), limits, possible=possible)
        if reason is not None:
            run.check = SlowdownCheck()
            self.trip(reason)
        return reason is not None

    def _reading(self, window: Measurement, non_finite: int) -> Reading:
        run = self._run
        baseline, decided = run.phase.baseline, run.phase.decided
        return Reading(
            pressure=self._pressure,
            retries=run.peaks.retries,
            graphs=compiled_graphs(),
            placed=run.placed,
            non_finite=non_finite,
            rounds=(decided.accumulation_steps, decided.precision) != (baseline.accumulation_steps, baseline.precision),
        )

    def _slowdown(self) -> float | None:
        """Return the ratio of the window's measured to predicted step times; ``None`` under the baseline."""
        run = self._run
        ran, should = self._past.ran(), run.phase.seconds_of(run.phase.baseline)
        if should is None or ran is None or run.plan == run.phase.baseline:
            return None
        return ran.seconds / max(ran.predicted, should)

    def _measure(self) -> tuple[Measurement, int]:
        """Return the window since the last decision and its number of non-finite losses; begin a new window."""
        run = self._run
        window = self._past = self._window
        self._window = Window()
        self._pressure = run.peaks.pressure
        run.budget.read_device(run.fragments)
        losses = window.loss_values()
        every = run.attached.limits.statistics_every
        measured = window.measurement(
            losses,
            peak_bytes=run.peaks.take() or run.profiler.knowledge.latest_peak,
            memory_budget_bytes=run.budget.take_least(),
            gradient=run.monitor.aged(run.step) if every is not None else None,
            learning_rate=float(run.attached.optimizer.param_groups[0]["lr"]),
            parts=self._take_parts(),
        )
        return measured, sum(not math.isfinite(loss) for loss in losses)

    def _take_parts(self) -> StepParts | None:
        """Return where the time of the last steps went, on all ranks; give advice once if a part is large."""
        run = self._run
        own = run.times.take()
        found = own
        if run.agreement.gathers(len(PARTS)):
            found = of_all_ranks(own, run.agreement.gathered(as_values(own)))
        self.parts = found or self.parts
        told = advice(found)
        if told is not None and self.advice is None:
            self.advice = told
            run.log.write("advice", run.step, advice=told, parts=None if found is None else found.to_json())
            logger.info("step %d: %s", run.step, told)
        return found

    def _observe(self, window: Measurement) -> Observation:
        run = self._run
        total = run.attached.total_steps
        self._reference = self._reference or window
        placements = run.placements
        observation = Observation(
            space=run.phase.space,
            plan=run.phase.decided,
            window=window,
            reference=self._reference,
            previous_loss=self._previous_loss,
            memory_budget_bytes=run.step_room.with_usual_calls(run.budget.announced),
            batch_size=1 if placements is None else placements.profile.batch_size,
            adaptive=run.attached.adaptive,
            progress=min(run.step / total, 1.0) if total else 0.0,
        )
        self._previous_loss = window.loss
        return observation

    def _noise_scale(self) -> float | None:
        gradient = self._run.monitor.aged(self._run.step)
        return None if gradient is None else gradient.noise_scale
