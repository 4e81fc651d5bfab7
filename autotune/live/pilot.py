"""Lead a live run: read its budget and its steps, profile it, ask the policy, hold the answer to the rules, switch.

Everything here is advice and may fail; whoever calls it goes on with the user's own baseline if it does. How a batch is
cut and an update made is the business of ``live.tuner`` and ``mechanics.stepping``.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from autotune.budget import allocated_within, format_bytes
from autotune.gym.observation import Observation
from autotune.live.attached import Attached, Step
from autotune.live.deciding import Decider, RecordedPolicy
from autotune.live.decision_log import DecisionLog, digest_of
from autotune.live.guard import Breaker, Situation, SlowdownCheck, fallback, gain_of, judge
from autotune.live.limits import Stage
from autotune.live.live_profiler import LiveProfiler
from autotune.live.placement import Placements, usable
from autotune.live.ranks import Ranks
from autotune.live.shadow import Outcome
from autotune.live.signature import Signature
from autotune.live.step_peaks import StepPeaks
from autotune.live.window import Ran, Window
from autotune.live.wires import Reading, Wires, compiled_graphs
from autotune.measurement import Measurement
from autotune.mechanics import controls
from autotune.mechanics.gradient_stats import GradientMonitor, GradientProbe
from autotune.mechanics.step_trace import Phase
from autotune.physics.profile import Profile
from autotune.plan import Plan

logger = logging.getLogger(__name__)

# A policy plans from a new profile once batches have grown by this factor; the rules always do.
_BEGIN_AGAIN = 1.5
# Where memory ran out, plans are held to this share of what was predicted to fit.
_LESS = 0.9
# Steps that what is paid once is spread over.
_SPREAD_OVER = 1000
# Recent steps whose calls of units the next ones may repeat.
_CALLS_OF = 64
# No device has more: a budget beyond is a mistake, or infinite.
_LARGEST_BUDGET = 2**60
# Steps before the tuner's own share of the run's time is judged; the profile is paid by then.
_OVERHEAD_AFTER = 200


class Pilot:
    """Lead one run.

    Attributes:
        plan: the plan that is applied.
        decided: the plan that was last decided on.
        step: optimizer steps since the tuner was attached.
        placements: what predicts; ``None`` until the run is profiled.
        own_s: seconds that all of this took.
        over_budget: steps that ran though no plan was known to fit, or that were seen to need more.
        switches: decided switches.
        placed: changes of storage between them, for a batch or a budget.

    Args:
        attached: what it leads.
        policy: decides.
        log: keeps everything.
        ranks: the other ranks.
    """

    def __init__(self, attached: Attached, policy: Any, log: DecisionLog, ranks: Ranks) -> None:
        self.attached = attached
        self.log = log
        self.ranks = ranks
        self.breaker = Breaker.closed(attached.limits)
        self.decider = Decider(policy, attached.limits.decision_timeout_s)
        self.baseline = self.plan = self.decided = attached.space.baseline()
        self.step = 0
        self.own_s = 0.0
        # Of it, what the profile took, which is paid once.
        self._once_s = 0.0
        self._learns = True
        self.run_s = 0.0
        self.over_budget = 0
        # Whether no plan was known to fit the step that runs.
        self._unfitting = False
        self._said_unreachable = False
        self.switches = 0
        self.placed = 0
        self.placements: Placements | None = None
        self._space = attached.space
        # Ranks lead their own steps until all have a profile; then the first rank's profile and decisions hold for all.
        self._together = not ranks.many
        self._follows = attached.limits.follow_batches and hasattr(policy, "begin")
        self._first_trusts = True
        # Size of the batch that the policy's profile is of.
        self._begun = 0
        self._news = False
        # The profile that is planned from.
        self._taken: Profile | None = None
        self._switcher = controls.Switcher(attached.model, [unit.name for unit in attached.space.units])
        self._profiler = LiveProfiler(attached)
        # Of each recent step, how many times as often as usual one unit was called in a forward pass; and how many
        # forward passes this one has had.
        self._calls: deque[int] = deque([1], maxlen=_CALLS_OF)
        self._passes = 0
        self._usual_calls: int | None = None
        self._monitor = GradientMonitor(attached.model, attached.space.units)
        self._probe: GradientProbe | None = None
        # Of the steps since the last decision, and of those before it.
        self._window, self._past = Window(), Window()
        self._reference: Measurement | None = None
        self._latest: Measurement | None = None
        self._last_ran: Ran | None = None
        self._told: dict[Plan, float] = {}
        self._previous_loss: float | None = None
        self._since_switch = 10**9
        self._rows: Any = None
        self._size = 0
        self._wires = Wires(attached.limits)
        self._check = SlowdownCheck()
        self._budget: int | None = None
        # What memory is known not to suffice for; infinite until it ran out.
        self._ceiling = math.inf
        self._peaks = StepPeaks(attached.device)
        self._pressure: float | None = None
        self._room = self._peaks.room(self._profiler.fragments)

    @property
    def acting(self) -> bool:
        """Tell whether plans may be switched now."""
        return self.attached.stage is Stage.ACT and self.placements is not None and self.breaker.allows(self.step)

    @property
    def wants_time(self) -> bool:
        """Tell whether the running step's time is needed to the end of what the device does."""
        return self._profiler.watching

    @property
    def locks(self) -> dict[str, str]:
        """Return why units' storage is locked, by unit; and why there is no profile, if there is none."""
        failed = self._profiler.failed
        return {**self._profiler.locks, **({} if failed is None else {"profile": failed})}

    def summary(self) -> dict[str, Any]:
        """Return figures of the run so far."""
        placements, latest = self.placements, self._latest
        peak = None
        if placements is not None and self._size:
            # A plan is chosen for the batch that it runs with, which others of the window may be larger than.
            peak = placements.peak_bytes(self.plan, self._share(self._size))
        gradient = None if latest is None else latest.gradient
        return {
            "steps": self.step,
            "total_steps": self.attached.total_steps,
            "run_s": self.run_s,
            "stage": str(self.attached.stage),
            "acting": self.acting,
            "plan": self.plan,
            "decided": self.decided,
            "switches": self.switches,
            "placed": self.placed,
            "trips": list(self.breaker.trips),
            "over_budget_steps": self.over_budget,
            "memory_budget_bytes": self._budget,
            "predicted_peak_bytes": peak,
            "measured_peak_bytes": self._profiler.latest_peak,
            "pressure": peak / self._budget if peak is not None and self._budget else None,
            "predicted_s": None if self._last_ran is None else self._last_ran.predicted,
            "measured_s": None if self._last_ran is None else self._last_ran.seconds,
            "noise_scale": None if gradient is None else gradient.noise_scale,
            "overhead_frac": self.overhead_frac(),
        }

    # Before and after a step.

    def before_step(self, size: int, largest: int, samples: int, signature: Signature) -> None:
        """Read the budget, and put the step that begins under the plan that it shall run with.

        Args:
            size: bytes of its batch, or of the first that the caller accumulates.
            largest: bytes of the largest batch that it is to hold.
            samples: samples of its batch.
            signature: what else its memory hangs on.
        """
        learns, self._unfitting = not self._profiler.done, False
        if learns:
            # What steps leave unused of what they reserve is only being learnt.
            self._room = self._peaks.room(self._profiler.fragments)
        self._budget, self._size = self._read_budget(), largest
        plan = self._profiler.plan_for(size, largest, samples, self._budget, signature) if learns else None
        if plan is None:
            if self._profiler.complete and self._profiler.profile is not self._taken and not self.ranks.many:
                self._take_profile()
            plan = self._placed_plan(largest)
            if self._is_news(signature):
                plan = self._profiler.leanest
                self._profiler.look_at(plan, size, signature)
            elif self._check.runs_baseline and self._fits(self.baseline, largest):
                plan = self.baseline
            else:
                self._profiler.also_watch(plan, size, signature)
        # To plan from a first profile is part of learning, too.
        self._learns = learns or self._profiler.watching
        every = self.attached.limits.statistics_every
        sampled = every is not None and self.step % every == every - 1 and not self._profiler.watching
        self._apply(self._of_several(plan, largest) if sampled else plan)
        self._passes = 0
        self._profiler.begin()
        # What was known to fit no plan, or stands beside the step, speaks against none.
        counts = not self._unfitting and not self._profiler.watching
        self._peaks.begin(self.plan, largest, self._budget, counts=counts)
        if sampled:
            self._probe = GradientProbe([p for group in self.attached.optimizer.param_groups for p in group["params"]])
            self._probe.__enter__()

    @property
    def calls(self) -> int:
        """Return how many times as often as when it was profiled a forward pass may call a unit, as recent ones did."""
        return max(self._calls)

    def _count_calls(self) -> None:
        calls, passes, self._passes = self._switcher.calls(), self._passes, 0
        if calls and passes and self._usual_calls is not None:
            self._calls.append(max(math.ceil(calls / passes / self._usual_calls), 1))

    def _begin_to_count(self) -> None:
        """Count the calls of a unit: more of them, in an auxiliary loss say, need more memory than was measured."""
        acts = self.attached.stage is Stage.ACT and self._budget is not None and not self.ranks.many
        if not acts or self._usual_calls is not None or not self._space.recomputable:
            return
        name = self._space.recomputable[0]
        self._usual_calls = max(self._profiler.calls_of(name), 1)
        self._switcher.count(name)
        self._switcher.apply(self.plan)
        # Calls of the steps before are nobody's.
        self._switcher.calls()

    def _is_news(self, signature: Signature) -> bool:
        """Tell whether, under a budget, a step is like none that was traced."""
        if self._budget is None or not self.acting or self.ranks.many:
            return False
        return self._profiler.complete and not self._profiler.knows(signature)

    @property
    def shadows(self) -> tuple[Plan, ...]:
        """Return the plans that the batch is to be tried under beside the step that begins; none for most steps."""
        return self._profiler.shadows

    @contextmanager
    def trying(self, plan: Plan) -> Iterator[list[Exception]]:
        """Run passes beside the step under a plan; yield what it makes units raise."""
        try:
            with self._switcher.trying(plan) as failures:
                yield failures
        finally:
            self._switcher.apply(self.plan)

    def take_shadows(self, outcomes: Sequence[Outcome]) -> None:
        """Take in what those passes came to; what one rank's batch speaks against is locked on all."""
        self._profiler.take_shadows(outcomes)
        names = ["accumulation_steps", *map(str, self.attached.space.precisions[1:])]
        locked = self.ranks.largest([float(name in self._profiler.locks) for name in names])
        for name, found in zip(names, locked, strict=True):
            if found and name not in self._profiler.locks:
                self._profiler.lock(name, "another rank's batch speaks against it")

    def phase(self, name: Phase) -> None:
        """Be told of each micro-batch's passes."""
        self._profiler.phase(name)
        self._passes += name == "forward"
        if name == "forward" and self._probe is not None:
            self._probe.next_micro_batch()

    def before_update(self, norm: float, micro_samples: Sequence[int], scales: Sequence[float]) -> None:
        """Read the gradient's statistics, after unscaling and before clipping."""
        if self._probe is None:
            return
        probe, self._probe = self._probe, None
        probe.__exit__(None, None, None)
        sample = probe.read()
        if len(sample.micro) == len(scales):
            self._monitor.observe(sample, step=self.step, norm=norm, micro_samples=micro_samples, scales=scales)

    def after_step(self, step: Step) -> None:
        """Take in a step; decide, where one is due."""
        self._end_probe()
        self._count_calls()
        peak, watched = self._peaks.end(), self._profiler.watching
        if self._profiler.end(step):
            self._news = True
            if not self.ranks.many:
                self._take_profile()
        peak = self._profiler.step_peak or peak or 0
        self.over_budget += self._unfitting or peak > (self._budget or math.inf)
        barred = self._switcher.barred()
        if barred and self._profiler.bar(barred):
            self._news = True
            if not self.ranks.many:
                self._take_profile()
        self.run_s += step.seconds
        self._take(step, ordinary=not watched)
        # Under adaptive batching a longer step than the baseline's consumes more.
        if not self._check.runs_baseline or self.plan == self.baseline:
            self._check.note(step.seconds / max(step.all_bytes, 1))
        rounds = self.plan.precision != self.baseline.precision
        reason = self._wires.after_step(stepped=step.stepped, rounds=rounds)
        if reason is not None:
            self.trip(reason)
        self.step += 1
        self._since_switch += 1
        if self.step % self.attached.limits.decide_every == 0:
            self._meet()

    def abandon_step(self) -> None:
        """Forget a step that did not come to its end."""
        self._end_probe()
        self._profiler.abandon()

    @property
    def ks(self) -> tuple[int, ...]:
        """Return the k that plans may choose from, where plans may be switched at all."""
        return self._profiler.space.accumulation_choices if self.attached.stage is Stage.ACT else ()

    def raise_k(self, k: int, reason: str) -> None:
        """Take away every k below one: memory ran out in the running step, which is forgotten.

        From now on plans are also held to less memory than that step was predicted to need.

        Args:
            k: the smallest that is left.
            reason: what was said where memory ran out.
        """
        self.abandon_step()
        self.log.write("out of memory", self.step, plan=self.plan, smallest_k=k, reason=reason)
        self._profiler.raise_k(k, reason)
        if self.placements is None:
            self.baseline = self._profiler.space.baseline()
            self._decide_on(self.baseline)
            return
        predicted = self.placements.peak_bytes(self.plan, self._share(self._size))
        self._ceiling = min(self._ceiling, predicted) * _LESS
        # A policy plans anew from what is left.
        self._begun, self._news = 0, True
        self.decided = self.decided.changed(accumulation_steps=max(k, self.decided.accumulation_steps))
        if self.ranks.many:
            profile = replace(self.placements.profile, accumulation_choices=self.ks)
            self._adopt(profile, self.placements.square_share)
        else:
            self._take_profile()

    def _end_probe(self) -> None:
        """Take off a probe whose step showed no gradients before its update."""
        if self._probe is not None:
            self._probe.__exit__(None, None, None)
            self._probe = None

    def close(self) -> None:
        """Leave the model as it was found."""
        self.abandon_step()
        controls.remove(self.attached.model)
        self.plan = self.baseline
        self.decider.close()

    # Plans.

    def trip(self, reason: str) -> None:
        """Go back to the baseline for a while, and for good if it was once too often."""
        self.breaker.trip(self.step, reason)
        self.log.write("tripped", self.step, reason=reason, trips=len(self.breaker.trips), open=self.breaker.open)
        self._decide_on(self._fallback())

    def _fallback(self) -> Plan:
        return fallback(self.baseline, self.placements, usable(self._budget), self._length())

    def _decide_on(self, plan: Plan) -> None:
        self.decided = plan
        self._rows = None if self.placements is None else self.placements.group(plan)

    def _placed_plan(self, size: int) -> Plan:
        """Return the plan for a batch: the decided one, with the storage that fits the batch and the budget best."""
        placements = self.placements
        if self.attached.stage is Stage.OBSERVE or self.breaker.open:
            return self.baseline
        if placements is None:
            # Nothing can be predicted yet: the user's own profiler runs, or other ranks are not as far.
            return self._profiler.leanest if self._budget is not None and self._profiler.probed else self.baseline
        room, length = usable(self._budget), self._share(size)
        if self.ranks.many:
            length, room = self.ranks.largest([length, -room])
            room = -room
        # A plan that none is known to stand in for is not exchanged.
        stays = self._rows is None or not (self._follows and self._trusted())
        if stays and placements.peak_bytes(self.decided, length) <= room:
            return self.decided
        found = placements.fastest(room, length, self._rows) if self._rows is not None else None
        if found is None:
            found = placements.fastest(room, length)
        if found is None:
            self._unfitting = True
            leanest = placements.leanest()
            self._say_unreachable(placements.peak_bytes(leanest, length), room)
            return leanest
        return found

    def _say_unreachable(self, least: float, room: float) -> None:
        """Say once, where a user sees it, that a budget cannot be met, and which one can."""
        if self._said_unreachable:
            return
        self._said_unreachable = True
        needed = math.ceil(least * (self._budget or 1) / max(room, 1))
        logger.warning(
            "step %d: no plan fits the memory budget of %s: all that may be is recomputed, and that needs %s; the "
            "smallest budget that can be met for this batch is %d bytes",
            self.step,
            format_bytes(self._budget or 0),
            format_bytes(least),
            needed,
        )

    def _trusted(self) -> bool:
        """Tell whether no trip pauses acting; the first rank's word counts for all."""
        return self._first_trusts if self.ranks.many else self.breaker.allows(self.step)

    def _apply(self, plan: Plan) -> None:
        # To compare plans takes longer than a short step may: most are the same object.
        if plan is not self.plan and plan != self.plan:
            self._switcher.apply(plan)
            self.placed += 1
        self.plan = plan

    def _read_budget(self) -> int | None:
        """Return the budget of the moment: the user's own and what the device has; lies leave the last one standing."""
        source = self.attached.budget
        value: Any = source
        if callable(source):
            try:
                value = source()
            except Exception as error:  # noqa: BLE001 - somebody's function must not end somebody's run
                value = error
        if not (value is None or _is_size(value)):
            self.log.write("budget refused", self.step, value=value)
            return self._budget
        if value is not None and self.attached.reserved:
            value = allocated_within(int(value), self._profiler.fragments)
        found = [int(size) for size in (value, self._room) if size is not None]
        found += [int(self._ceiling)] if self._ceiling < math.inf else []
        return min(found) if found else None

    # What was seen.

    def _share(self, size: float) -> float:
        """Return a batch's size over the profiled one's; 1 before there is a profile."""
        return 1.0 if self.placements is None else size / self.placements.profile.tables[0].batch_bytes

    def _length(self) -> float:
        """Return the share of the last window's largest batch."""
        return self._share(self._past.largest_bytes) if self._past.sizes else 1.0

    def _take(self, step: Step, *, ordinary: bool) -> None:
        self._window.take(step)
        if ordinary and self.placements is not None:
            seconds = step.seconds / max(self._share(step.batch_bytes), 1e-9)
            predicted = self._seconds_of(self.plan, self.placements)
            self._window.compare(seconds, predicted, decided=self.plan == self.decided)

    def _of_several(self, plan: Plan, size: int) -> Plan:
        """Return the plan with steps of several batches, where one alone would never tell the gradient's noise."""
        more = next((k for k in self._space.accumulation_choices if k > 1), None)
        if not self.attached.adaptive or not self.acting or plan.accumulation_steps > 1 or more is None:
            return plan
        several = plan.changed(accumulation_steps=more)
        return several if self._fits(several, size) else plan

    def _noise_scale(self) -> float | None:
        gradient = self._monitor.aged(self.step)
        return None if gradient is None else gradient.noise_scale

    def _seconds_of(self, plan: Plan, placements: Placements) -> float:
        known = self._told.get(plan)
        if known is None:
            known = self._told[plan] = placements.seconds_of(plan)
        return known

    def _measure(self) -> tuple[Measurement, int]:
        """Return the window since the last decision and how many losses were not finite, and begin another window."""
        window = self._past = self._window
        self._window = Window()
        self._pressure = self._peaks.pressure
        # A driver's answer takes its time: it is asked once in a window.
        self._room = self._peaks.room(self._profiler.fragments)
        losses = window.loss_values()
        every = self.attached.limits.statistics_every
        measured = window.measurement(
            losses,
            peak_bytes=self._peaks.take() or self._profiler.latest_peak,
            memory_budget_bytes=self._budget,
            gradient=self._monitor.aged(self.step) if every is not None else None,
            learning_rate=float(self.attached.optimizer.param_groups[0]["lr"]),
        )
        return measured, sum(not math.isfinite(loss) for loss in losses)

    def _observe(self, window: Measurement) -> Observation:
        total = self.attached.total_steps
        self._reference = self._reference or window
        observation = Observation(
            space=self._space,
            plan=self.decided,
            window=window,
            reference=self._reference,
            previous_loss=self._previous_loss,
            memory_budget_bytes=self._budget,
            batch_size=self._profile_batch(),
            adaptive=self.attached.adaptive,
            progress=min(self.step / total, 1.0) if total else 0.0,
        )
        self._previous_loss = window.loss
        return observation

    def _profile_batch(self) -> int:
        return 1 if self.placements is None else self.placements.profile.batch_size

    # Decisions.

    def _meet(self) -> None:
        """Decide, once all ranks have a profile."""
        if not self.ranks.many:
            if self.placements is not None:
                self._decide()
            return
        # The largest of what is missing: one rank without a profile holds up all.
        self._together = self._together or self.ranks.largest([float(not self._profiler.complete)])[0] == 0.0
        if not self._together:
            return
        if self.ranks.rank > 0:
            self._measure()
            self._follow_first(self.ranks.from_first(None))
            return
        news = self._news or self.placements is None
        if news:
            self._take_profile()
        self._decide()
        self.breaker.open = self.breaker.open or self.too_dear()
        self._first_trusts = self.breaker.allows(self.step)
        profile = self.placements.profile.to_json() if news and self.placements is not None else None
        told = {"plan": self.decided.to_json(), "open": self.breaker.open, "trusts": self._first_trusts}
        self.ranks.from_first({**told, "profile": profile, "square_share": self._profiler.growth.beyond})

    def _follow_first(self, told: dict[str, Any]) -> None:
        """Take over the first rank's profile and decision."""
        if told["profile"] is not None:
            self._adopt(Profile.from_json(told["profile"]), float(told["square_share"]))
        self.breaker.open = self.breaker.open or bool(told["open"])
        self._first_trusts = bool(told["trusts"])
        plan = self._space.check(Plan.from_json(told["plan"]))
        if plan != self.decided:
            self._switch(plan)

    def _adopt(self, profile: Profile, square_share: float) -> None:
        """Predict with a profile from now on."""
        self._space = profile.space
        self.baseline = self._space.baseline()
        self.placements = Placements(profile, self._budget, square_share)
        # Units that were never called are none of the profile's.
        precision = {name: self.decided.precision_of(name) for name in self.baseline.precision}
        storage = {name: self.decided.storage_of(name) for name in self.baseline.storage}
        decided = self.decided.changed(precision=precision, storage=storage)
        self._decide_on(fallback(decided, self.placements, usable(self._budget), self._length()))
        self._told = {}
        self._begin_to_count()
        event = {"static_bytes": profile.static_bytes, "batch_bytes": profile.tables[0].batch_bytes}
        autocast = None if self._profiler.autocast is None else str(self._profiler.autocast)
        self.log.write(
            "profiled",
            self.step,
            units=len(profile.units),
            square_share=square_share,
            autocast=autocast,
            locks=self.locks,
            scores=[asdict(score) for score in self._profiler.scores],
            baseline={
                "seconds": self.placements.seconds_of(self.baseline),
                "peak_bytes": self.placements.peak_bytes(self.baseline, 1.0),
            },
            **event,
        )

    def _take_profile(self) -> None:
        """Take a new profile: whoever plans from one begins anew."""
        profile = self._taken = self._profiler.profile
        if profile is None:
            return
        self._news = False
        self._adopt(profile, self._profiler.growth.beyond)
        policy, size = self.decider.policy, profile.tables[0].batch_bytes
        if hasattr(policy, "begin") and size > _BEGIN_AGAIN * self._begun:
            self._begun = size
            budget = self._budget
            try:
                begun = self.decider.ask(lambda: policy.begin(profile, budget), 30.0)
            except Exception as error:  # noqa: BLE001 - a policy that fails costs a trip, not the run
                self.trip(f"policy: {type(error).__name__}: {error}")
                return
            self._consider(begun, None)

    def _decide(self) -> None:
        window, non_finite = self._measure()
        self._latest, self._last_ran = window, self._past.ran() or self._last_ran
        if self._tripped(window, non_finite):
            return
        observation = self._observe(window)
        proposal: object = self.decided
        if self.breaker.allows(self.step):
            proposal = self._asked(observation)
        if proposal is not None:
            self._consider(proposal, observation)

    def _asked(self, observation: Observation) -> object:
        policy, plan = self.decider.policy, self.decided
        if isinstance(policy, RecordedPolicy):
            return policy.at(self.step) or self.decided
        try:
            return self.decider.ask(lambda: policy.decide(observation, plan))
        except TimeoutError as error:
            self.log.write("late", self.step, reason=str(error))
            return None
        except Exception as error:  # noqa: BLE001 - whatever a policy raises, the run goes on
            self.trip(f"policy: {type(error).__name__}: {error}")
            return None

    def _consider(self, proposal: object, observation: Observation | None) -> None:
        """Hold a proposal to the rules, note what they said, and switch if they let it."""
        placements = self.placements
        if placements is None:
            return
        now = Situation(
            space=self._space,
            locks=self._profiler.locks,
            placements=placements,
            usable_bytes=usable(self._budget),
            length=self._length(),
            current=self.decided,
            since_switch=self._since_switch,
            switches=self.switches,
            noise_scale=self._noise_scale(),
        )
        ran = self._past.ran()
        verdict = judge(proposal, now, self.attached.limits)
        acts = self.attached.stage is Stage.ACT and self.breaker.allows(self.step)
        self.log.write(
            "decision",
            self.step,
            observation=None if observation is None else digest_of(observation),
            proposal=proposal,
            rules=verdict.rules,
            applied=acts and verdict.refused is None,
            predicted={
                "seconds": placements.seconds_of(verdict.plan),
                "peak_bytes": placements.peak_bytes(verdict.plan, now.length),
                "gain": gain_of(verdict.plan, self.decided, placements, now.noise_scale),
            },
            measured=None if observation is None else _seen(observation.window),
            ran=None if observation is None or ran is None else asdict(ran),
            memory_budget_bytes=self._budget,
            placed=self.placed,
            over_budget_steps=self.over_budget,
            overhead_frac=self.overhead_frac(),
        )
        if verdict.illegal:
            self.trip(f"illegal action: {verdict.refused}: {verdict.rules[verdict.refused or '']}")
        elif acts and verdict.refused is None and verdict.plan != self.decided:
            self._switch(verdict.plan)

    def _switch(self, plan: Plan) -> None:
        self._decide_on(plan)
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
            # Ranks step in time with each other, so that one cannot run the baseline for comparison.
            possible = self._fits(self.baseline, self._past.largest_bytes) and not self.ranks.many
            self._check.begin_if_slow(self._slowdown(), limits, possible=possible)
        if reason is not None:
            self._check = SlowdownCheck()
            self.trip(reason)
        return reason is not None

    def _reading(self, window: Measurement, non_finite: int) -> Reading:
        baseline, k = self.baseline, self.decided.accumulation_steps
        return Reading(
            pressure=self._pressure,
            retries=self._peaks.retries,
            graphs=compiled_graphs(),
            placed=self.placed,
            non_finite=non_finite,
            rounds=k != baseline.accumulation_steps or self.decided.precision != baseline.precision,
        )

    def _slowdown(self) -> float | None:
        """Return the window's steps over what they should take, by the baseline's; ``None`` for the baseline."""
        placements, ran = self.placements, self._past.ran()
        if placements is None or ran is None or self.plan == self.baseline:
            return None
        return ran.seconds / max(ran.predicted, placements.seconds_of(self.baseline))

    def _fits(self, plan: Plan, size: float) -> bool:
        placements = self.placements
        return placements is not None and placements.peak_bytes(plan, self._share(size)) <= usable(self._budget)

    def spend(self, seconds: float) -> None:
        """Count seconds that the tuner took for itself."""
        self.own_s += seconds
        if self._learns:
            self._once_s += seconds

    def overhead_frac(self) -> float:
        """Return the tuner's own share of the run's time; the profile is paid once, for 1,000 steps at least."""
        if not self.run_s:
            return 0.0
        steps = max(self.step, _SPREAD_OVER, self.attached.total_steps or 0)
        return (self.own_s - self._once_s) / self.run_s + self._once_s / (self.run_s / self.step * steps)

    def too_dear(self) -> bool:
        """Tell whether the tuner takes more of the run's time than it may."""
        return self.step >= _OVERHEAD_AFTER and self.overhead_frac() > self.attached.limits.overhead_frac


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LARGEST_BUDGET


def _seen(window: Measurement) -> dict[str, Any]:
    return {
        "seconds_per_step": window.seconds_per_step,
        "peak_bytes": window.peak_bytes,
        "loss": window.loss,
        "noise_scale": None if window.gradient is None else window.gradient.noise_scale,
        "memory_budget_bytes": window.memory_budget_bytes,
        "skipped_steps": window.skipped_steps,
        "steps": window.steps,
        "total_s": window.total_s,
    }
