"""Learn what a live run costs from its own steps: one that probes, a few that are traced, a few that are timed.

Storage changes no bit of training, and k and precisions are tried in passes beside the run first, so all of this
happens on steps that count. Until the run is profiled, a step runs under the leanest plan, or under a fuller one that
what was traced so far predicts to fit. :meth:`LiveProfiler._lessons` is the order in which things are learnt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from autotune.cost_model.profile import Profile
from autotune.live.asked_budget import BudgetFunction
from autotune.live.attached import Attached, Step, StepAhead
from autotune.live.limits import Stage
from autotune.live.live_knowledge import RENEWED_AFTER, Knowledge
from autotune.live.placement import Placements, usable
from autotune.live.prediction_scores import Expected
from autotune.live.step_uses import Probing, Shadowing, Timing, Tracing, Use
from autotune.mechanics import devices
from autotune.mechanics.controls import has_16_bit_parameters
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.step_trace import Phase, rest_of, seconds_by_place
from autotune.plan import Plan, PlanSpace, Precision
from autotune.profiling.memory_scaling import Growth
from autotune.profiling.step_signature import Signature
from autotune.profiling.trial_passes import AUTOCAST_TOLERANCE, FP32_TOLERANCE, Outcome, k_lock, precision_lock

logger = logging.getLogger(__name__)

# Steps that are traced under plans that hold more and more, until the fullest that fits was seen.
_TRACES = 4
# Tries at them: a step that shows nothing (an epoch's last and short one) is tried again.
_TRIES = 8
# Timed steps of one plan.
_TIMED_EACH = 3
# A batch this much larger than any that was traced is traced as well, and so often at most.
_LARGER = 1.1
_RETRACES = 12
# Steps that are traced because nothing like them was.
_LOOKS = 48
# Under a budget a step is traced again after so many steps, and then each time after twice as many, up to a limit: what
# a schedule of the loop's own adds shows in no shape.
_TRACED_AGAIN, _TRACED_AGAIN_AT_MOST = 4, 1024
# Traces that cannot be read before no more are taken.
_UNREADABLE = 4
# Steps that are looked at until each unit was called: chance may leave one out.
_PROBED_STEPS = 4
# Steps after the first whose batches are cut beside them as well.
_MORE_CUTS = 2
# Steps that pass while one like those that are planned with is awaited.
_WAITS = 32


class LiveProfiler:
    """Profile a live run.

    Attributes:
        space: The plans that are allowed; the probe takes away the storage of units that may not be recomputed.
        locks: Why not, by unit.
        profile: The profile; ``None`` before the first traced steps.
        complete: Whether there is a profile to act on.
        failed: Why there will be none; ``None`` if there will.
        knowledge: What the steps have shown. Where two of its scores, or the last, are short, nobody acts.
        step_peak: Measured peak of the step that ended last in bytes; ``None`` if it was not traced.
        hooks: How many hooks a unit's parts had when it was probed, by unit.
        probe_s: Seconds that probes took of forward passes.
        autocast: The dtype of the user's own autocast; ``None`` for none.

    Args:
        attached: The run.
    """

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self.space: PlanSpace = attached.space
        self.locks: dict[str, str] = _scripted(attached)
        self._leave_out(self.locks)
        self.profile: Profile | None = None
        self.complete = False
        lacking = devices.unusable(attached.device)
        self.failed: str | None = lacking if attached.space.units else "the model has no units"
        self.knowledge = Knowledge(attached)
        self.step_peak: int | None = None
        self.autocast: torch.dtype | None = None
        self.probe_s = 0.0
        self.hooks: dict[str, int] = {}
        self._acts = attached.stage is Stage.ACT
        self._ahead = StepAhead(batch_bytes=0, largest_bytes=0, samples=0, signature=Signature((), (0, 0)))
        self._budget: int | None = None
        # What the running step is used for; ``None`` for an ordinary one.
        self._use: Use | None = None
        self._upcoming = self._lessons()
        self._began = False
        self._likeliest: Placements | None = None
        self._looks = 0
        self._unreadable = 0
        # Steps until a step is traced again, and until the one after that.
        self._until_trace = self._trace_every = _TRACED_AGAIN
        # Units that no step has called yet.
        self._uncalled: list[str] = []
        self._probed_steps = 0

    @property
    def done(self) -> bool:
        """Whether there is nothing left to learn before anybody may act."""
        return self.complete or self.failed is not None

    @property
    def probed(self) -> bool:
        """Whether it is known which units may be recomputed, or is being found out."""
        return self._began

    @property
    def growth(self) -> Growth:
        """How memory grows with a batch's size."""
        return self.knowledge.growth

    @property
    def watching(self) -> bool:
        """Whether the running step is not an ordinary one."""
        return self._use is not None

    @property
    def shadows(self) -> tuple[Plan, ...]:
        """The plans to try beside the step that begins, the reference first; none for most steps."""
        return self._use.plans if isinstance(self._use, Shadowing) else ()

    @property
    def leanest(self) -> Plan:
        """The user's baseline with all recomputed that may be: known, without a profile, to need least."""
        return self._plan_of(self.space.accumulation_choices[0], self.space.precisions[0], lean=True)

    # Before, in and after a step.

    def plan_for(self, ahead: StepAhead, budget_bytes: int | None) -> Plan | None:
        """Return the plan for the next step if something is to be learnt from it; ``None`` if not.

        Args:
            ahead: The step.
            budget_bytes: The budget of the moment; ``None`` for none.
        """
        self._ahead, self._budget, self._use = ahead, budget_bytes, None
        if self.done or (self._began and _profiler_runs()):
            return None
        self._began = True
        self._use = next(self._upcoming, None)
        return None if self._use is None else self._use.plan

    def look_at(self, plan: Plan, ahead: StepAhead) -> None:
        """Trace the next step, since nothing like it was traced.

        Args:
            plan: The plan that it runs under: one that needs least.
            ahead: The step.
        """
        self._ahead = ahead
        if self._looks < _LOOKS and not _profiler_runs():
            self._looks += 1
            self._use = self._tracing(plan)

    def try_again(self, plan: Plan) -> None:
        """Try the next step's batch beside it in pieces half as large.

        Args:
            plan: The plan that the step runs under.
        """
        self._use = Shadowing(plan, [plan.changed(accumulation_steps=2 * plan.accumulation_steps)])

    def also_watch(self, plan: Plan, ahead: StepAhead) -> None:
        """Trace the next step if its batch is larger than any that was traced, or if none was traced for long.

        It is timed if its plan hardly was.

        Args:
            plan: The plan that it runs under anyway.
            ahead: The step.
        """
        profile, known = self.profile, self.knowledge
        if self._use is not None or not self.complete or profile is None or _profiler_runs():
            return
        self._ahead = ahead
        if not known.plans_with(ahead.signature):
            return
        self._until_trace -= 1
        size, traced = ahead.batch_bytes, known.traced_bytes(plan, profile.tables[0].batch_bytes)
        if known.traces < _TRACES + _RETRACES and (size > _LARGER * traced or self.growth.told_by(plan, size)):
            self._use = self._tracing(plan)
        elif self._lean and self._until_trace <= 0:
            self._trace_every = min(2 * self._trace_every, _TRACED_AGAIN_AT_MOST)
            self._until_trace = self._trace_every
            self._use = self._tracing(plan)
        elif len(known.timed) < RENEWED_AFTER[-1] and known.times_of(plan) < _TIMED_EACH:
            self._use = self._timing(plan)

    def begin(self) -> None:
        """Begin the step, its plan applied."""
        if self._use is not None:
            self._use.begin()

    def phase(self, name: Phase) -> None:
        """Note that a pass of a micro-batch begins."""
        if self._use is not None:
            self._use.phase(name)

    def end(self, step: Step) -> bool:
        """Take in the step; return whether the profile is another one now."""
        use, self._use, self.step_peak = self._use, None, None
        self.knowledge.note_batch(step.batch_bytes)
        if use is None:
            return False
        try:
            use.close()
            news = self._read(use, step)
            if news and self.complete:
                self.rebuild()
                return True
        except any_error() as error:  # without a profile there is nothing to act on, and the run goes on
            self._unreadable += 1
            # A profiler that the user began within the step ends the trace, as torch.func does: another step is traced.
            if isinstance(error, RuntimeError) or self._unreadable > _UNREADABLE:
                # As text: whoever keeps a log's records would keep an error's frames, and all that the step held.
                logger.warning("the run cannot be profiled: %s", str(error))
                self.failed = f"{type(error).__name__}: {error}"
        return False

    def abandon(self) -> None:
        """Forget a step that did not come to its end."""
        use, self._use = self._use, None
        if use is not None:
            use.close()
            if isinstance(use, Probing | Shadowing):
                # What it was to find out, another step does.
                self._began = self._began and not isinstance(use, Probing)
                self._upcoming = self._once_more(use, self._upcoming)

    # What was found.

    def take_shadows(self, outcomes: Sequence[Outcome]) -> None:
        """Lock what the passes beside a step spoke against.

        Args:
            outcomes: Of :attr:`shadows`, in their order.
        """
        found = dict(zip(self.shadows, outcomes, strict=True))
        (_, reference), *others = found.items()
        for plan, outcome in others:
            if plan.accumulation_steps > 1:
                rounds = self.autocast is not None or has_16_bit_parameters(self._attached.model)
                rounds = rounds or plan.precision != self._first.precision
                reason = k_lock(reference, outcome, AUTOCAST_TOLERANCE if rounds else FP32_TOLERANCE)
                what = "accumulation_steps"
            else:
                reason = precision_lock(reference, outcome)
                what = str(next(iter(plan.precision.values())))
            if reason is not None:
                self.lock(what, reason)

    def lock_shadows(self, reason: str) -> None:
        """Lock all that the passes beside a step were to be tried for.

        Args:
            reason: Why they are not run.
        """
        for plan in self.shadows[1:]:
            cuts = plan.accumulation_steps > 1
            self.lock("accumulation_steps" if cuts else str(next(iter(plan.precision.values()))), reason)

    def lock(self, what: str, reason: str) -> None:
        """Take a choice away: ``accumulation_steps``, or a precision by its name."""
        self.locks[what] = reason
        if what == "accumulation_steps":
            self.space = replace(self.space, accumulation_choices=self.space.accumulation_choices[:1])
            if self.complete:
                self.rebuild()
        else:
            kept = tuple(one for one in self.space.precisions if one != what)
            self.space = replace(self.space, precisions=kept)

    def raise_k(self, k: int, reason: str) -> None:
        """Take away every k below one, under which memory ran out; what was learnt stays."""
        self.locks[f"accumulation_steps < {k}"] = reason
        kept = tuple(one for one in self.space.accumulation_choices if one >= k)
        self.space = replace(self.space, accumulation_choices=kept)
        if self.complete:
            self.rebuild()

    def bar(self, barred: Mapping[str, str]) -> bool:
        """Lock the storage of units that turned out not to be recomputable; return whether the profile is another one.

        Args:
            barred: Why not, by unit.
        """
        new = {name: reason for name, reason in barred.items() if name not in self.locks}
        if not new:
            return False
        self.locks.update(new)
        self._leave_out(new)
        self.knowledge.leave_out(new)
        return self.complete and self.rebuild() is not None

    def rebuild(self) -> Profile | None:
        """Make the profile anew from all that was seen."""
        profile = self.knowledge.profile(self.space, self._ahead.samples)
        if profile is not None:
            self.profile = profile
        return profile

    # What is learnt, and when.

    def _lessons(self) -> Iterator[Use | None]:
        """Yield what each step is used for, until all is learnt."""
        # The first step creates the optimizer's state: it is not traced.
        yield self._probing(self.space.recomputable) if self._acts else None
        while self._uncalled:
            # Chance may leave a unit out of a step.
            yield self._probing(self._uncalled)
        if self._attached.bucket_bytes:
            # DistributedDataParallel makes its buckets anew in the second step, beside those of the first.
            yield Use(self._first)
        if self._acts:
            if self.autocast is not None:
                for precision in self.space.precisions[1:]:
                    self.lock(str(precision), f"the run computes in {self.autocast} by an autocast of its own")
            if self.space.k_splits and self.space.accumulation_choices[1:] and not self._ks[1:]:
                self.lock("accumulation_steps", "the run's first batches have no samples at which they could be cut")
            others = self._others(self._first)
            if others:
                yield Shadowing(self._first, others)
            for _ in range(_MORE_CUTS):
                # A loss between samples may come in some steps only.
                if self.space.k_splits and self._ks[1:]:
                    yield Shadowing(self._first, self._others(self._first)[:1])
        yield from self._costs()

    def _once_more(self, use: Use, upcoming: Iterator[Use | None]) -> Iterator[Use | None]:
        """Yield a use that did not come to its end as it is due now, and what follows it."""
        if isinstance(use, Probing):
            yield self._probing(self._uncalled or self.space.recomputable)
        elif others := self._others(self._first):
            yield Shadowing(self._first, others)
        yield from upcoming

    def _costs(self) -> Iterator[Use]:
        """Yield what steps are used for to learn their costs, and end the learning."""
        tries = timings = waits = 0
        while True:
            most = 2 * len(self._ks) * len(self.space.precisions)
            use: Use | None = None
            if self._lean and self.knowledge.seen and not self.knowledge.knows(self._ahead.signature):
                self._looks += 1
                use = self._tracing(self._first) if self._looks < _LOOKS else Use(self._first)
            elif self._lean and not self.knowledge.plans_with(self._ahead.signature) and waits < _WAITS:
                # What a batch of another shape showed would be mixed with what is known.
                waits += 1
                use = Use(self._first)
            if use is None and tries < _TRIES + most:
                use = self._untraced()
                tries += use is not None
            if use is None and timings < _TRIES * len(self.space.precisions):
                use = self._untimed()
                timings += use is not None
            if use is None:
                break
            yield use
        self._finish()

    def _finish(self) -> None:
        """End the learning, unless what was learnt cannot be trusted."""
        if self.knowledge.scores and self.knowledge.scores[-1].is_short:
            self._distrust()
            return
        profile = self.rebuild()
        self.complete = profile is not None
        if profile is None:
            self.failed = "no step of the run could be traced"
            return
        there = {unit.name for unit in profile.space.units}
        missing = [unit.name for unit in self.space.units if unit.recomputable and unit.name not in there]
        # Chance may leave some out, but not all.
        if not any(unit.recomputable for unit in profile.space.units):
            reason = "it was not called as a module: its forward() was, or a part of it"
            self.locks.update({name: reason for name in missing if name not in self.locks})

    def _begin_again(self) -> None:
        """Learn the costs anew; whoever plans already goes on from the former profile until enough was traced."""
        self.complete, self._likeliest = False, None
        self._upcoming = self._costs()

    def _distrust(self) -> None:
        self.failed = f"a peak was predicted {self.knowledge.scores[-1].short_frac:.1%} too low"
        logger.warning("nothing is switched: %s", self.failed)

    # The plans to learn from.

    @property
    def _lean(self) -> bool:
        """Whether steps are to need as little memory as they can."""
        return self._acts and (self._budget is not None or isinstance(self._attached.budget, BudgetFunction))

    @property
    def _first(self) -> Plan:
        """The plan that is seen first."""
        return self._plan_of(self.space.accumulation_choices[0], self.space.precisions[0], lean=self._lean)

    @property
    def _ks(self) -> tuple[int, ...]:
        """The k that a batch of the present size can be cut into."""
        choices = self.space.accumulation_choices
        return tuple(k for k in choices if k <= self._ahead.samples or k == choices[0] or not self.space.k_splits)

    def _plan_of(self, k: int, precision: Precision, *, lean: bool) -> Plan:
        recomputed = self.space.recomputable if lean else ()
        return self.space.plan(accumulation_steps=k, precision=precision, recomputed=recomputed)

    def _others(self, plan: Plan) -> list[Plan]:
        """Return the plans whose gradients are to be compared with a plan's."""
        # Where memory ran out for a whole batch, it is cut already: then each of its pieces is cut in two.
        cut = plan.changed(accumulation_steps=2 * self._ks[0])
        others = [cut] if self.space.k_splits and self._ks[1:] else []
        names = [unit.name for unit in self.space.units]
        return others + [plan.changed(precision=dict.fromkeys(names, p)) for p in self.space.precisions[1:]]

    def _untraced(self) -> Use | None:
        """Return the next step to trace; ``None`` once all were.

        Each k and precision is seen. Under a budget the largest k of each precision comes first, what is expected to
        need more than there is is left out, and fuller and fuller plans follow.
        """
        first, room = self._first, usable(self._budget)
        if first not in self.knowledge.seen or self.growth.told_by(first, self._ahead.batch_bytes):
            return self._tracing(first)
        # Cut, a larger k only saves memory; of a step's batches, each after the first is like the second.
        ks = (self._ks[::-1] if self._lean else self._ks[:1]) if self.space.k_splits else self._ks[:2]
        wanted = [self._plan_of(k, precision, lean=self._lean) for precision in self.space.precisions for k in ks]
        for plan in wanted:
            seen = plan in self.knowledge.seen
            if not seen and self.knowledge.expected_peak(plan, self.space, self._ks) <= room:
                return self._tracing(plan)
        return self._fuller() if self._lean else None

    def _fuller(self) -> Use | None:
        """Return a step under the fastest plan that is known to fit, while others were not traced often enough.

        Where the last of them needed more than predicted, what was seen of it has to predict one more.
        """
        seen, scores = self.knowledge.seen, self.knowledge.scores
        short = bool(scores) and scores[-1].is_short
        if sum(plan.storage != self.leanest.storage for plan in seen) >= _TRACES - 1 and not short:
            return None
        profile = self.rebuild()
        if profile is None:
            return None
        length = self._ahead.largest_bytes / profile.tables[0].batch_bytes
        placements = Placements(profile, self._budget, self.growth.beyond)
        found = placements.fastest(usable(self._budget), length)
        if found is None or (found in seen and not short):
            return None
        expected = Expected(
            plan=found,
            largest_bytes=self._ahead.largest_bytes,
            peak_bytes=placements.peak_bytes(found, length),
            static_bytes=profile.static_bytes,
        )
        return self._tracing(found, expected)

    def _untimed(self) -> Use | None:
        """Return a step under a traced plan of the precision that was timed least; mostly none.

        Tracing makes precisions slower by shares of their own, and under adaptive batching k depends on the time of an
        update, which its batches share and no trace shows; and policies plan from the first profile. Precisions take
        turns, so that a busy machine meets all alike.
        """
        if not self._attached.adaptive and len(self.space.precisions) == 1:
            return None
        known = self.knowledge
        counts = {
            plan: sum(one.plan.precision == plan.precision for one in known.timed)
            for plan in map(self._roomy, self.space.precisions)
            if plan in known.seen
        }
        least = min(counts, key=lambda plan: counts[plan], default=None)
        if least is None or counts[least] >= _TIMED_EACH:
            return None
        return self._timing(self._likely(least) if self._lean else least)

    def _roomy(self, precision: Precision) -> Plan:
        """Return the plan of a precision with the smallest k that was seen to fit; of none, with the smallest k."""
        ks = self._ks if self.space.k_splits else self._ks[:1]
        plans = [self._plan_of(k, precision, lean=self._lean) for k in ks]
        room, peak_of = usable(self._budget), self.knowledge.peak_of
        return next((plan for plan in plans if (peak := peak_of(plan)) is not None and peak <= room), plans[0])

    def _likely(self, like: Plan) -> Plan:
        """Return a lean plan with the storage that the next batch would most likely get; as it is, if unknown."""
        if self._likeliest is None:
            profile = self.rebuild()
            self._likeliest = None if profile is None else Placements(profile, self._budget, self.growth.beyond)
        placements = self._likeliest
        if placements is None:
            return like
        length = self._ahead.largest_bytes / placements.profile.tables[0].batch_bytes
        room = usable(self._budget)
        found = placements.fastest(room, length, placements.group(self.leanest))
        plan = like if found is None else like.changed(storage=found.storage)
        return plan if placements.peak_bytes(plan, length) <= room else like

    # The steps.

    def _probing(self, names: Sequence[str]) -> Use:
        return Probing(self._first, self._attached.model, names)

    def _timing(self, plan: Plan) -> Use:
        return Timing(plan, self._attached, [unit.name for unit in self.space.units])

    def _tracing(self, plan: Plan, expected: Expected | None = None) -> Use:
        names = [unit.name for unit in self.space.units]
        return Tracing(plan, self._attached, names, self._ahead.batch_bytes, expected)

    def _read(self, use: Use, step: Step) -> bool:
        """Take in what a step's use has found; return whether a new profile should be made."""
        match use:
            case Probing():
                self._read_probes(use)
                return False
            case Tracing():
                return self._read_trace(use, step)
            case Timing():
                return self._read_times(use, step)
            case _:
                return False

    def _read_probes(self, use: Probing) -> None:
        self._probed_steps += 1
        self._uncalled = []
        for name, probe in use.probes.items():
            self.probe_s += probe.spent_s
            if probe.calls:
                self.hooks[name] = probe.hooks
            self.autocast = self.autocast or probe.autocast
            if probe.reason is not None:
                self.locks[name] = probe.reason
            elif probe.calls == 0:
                self._uncalled.append(name)
        none = self._probed_steps == 1 and len(self._uncalled) == len(use.probes)
        if none or self._probed_steps == _PROBED_STEPS:
            for name in self._uncalled:
                self.locks[name] = "it was not called by itself (is the model compiled as a whole?)"
            self._uncalled = []
        self._leave_out(self.locks)

    def _leave_out(self, names: Mapping[str, str]) -> None:
        """Take away the storage of units."""
        units = (replace(unit, recomputable=unit.recomputable and unit.name not in names) for unit in self.space.units)
        self.space = replace(self.space, units=tuple(units))

    def _read_trace(self, use: Tracing, step: Step) -> bool:
        known, signature, tracer = self.knowledge, self._ahead.signature, use.tracer
        if tracer is not None and tracer.watch.spoilt is not None:
            if self.complete:
                return False
            raise ValueError(tracer.watch.spoilt)
        if tracer is None or tracer.trace is None:
            raise RuntimeError("the step was not traced")
        if not tracer.trace.calls:
            # What is compiled as a whole calls none by itself.
            raise RuntimeError("no unit was called in what tell_phase() named the forward pass")
        before = known.forgotten
        if known.signatures and not any(signature.is_kin_to(one) for one in known.signatures):
            # Other gradients are left, more is saved, or units are called more often.
            known.forget()
        short_step = use.plan.accumulation_steps > 1 and len(tracer.watch.calls) == 1
        # The last step of an epoch may be a short one, which does not show what later micro-batches need.
        news = not short_step and self._note_trace(use, step)
        if known.forgotten > before:
            self._begin_again()
        return news

    def _note_trace(self, use: Tracing, step: Step) -> bool:
        known = self.knowledge
        assert use.tracer is not None
        assert use.tracer.trace is not None
        seconds = seconds_by_place(use.tracer.watch, self._attached.device)
        scored = len(known.scores)
        news = known.note_trace(use, use.tracer.trace, seconds, step, self._ahead.signature)
        self.step_peak = known.latest_peak
        # Once may be chance: what was seen corrects the next prediction.
        if len(known.scores) > scored and sum(score.is_short for score in known.scores) > 1:
            self._distrust()
        return news

    def _read_times(self, use: Timing, step: Step) -> bool:
        if use.watch is None or use.watch.spoilt is not None or not step.stepped:
            return False
        seconds = seconds_by_place(use.watch, self._attached.device)
        seconds["update", -1] = rest_of(step.seconds, seconds)
        return self.knowledge.note_times(use.plan, tuple(use.watch.calls[0]), seconds, step.batch_bytes)


def _scripted(attached: Attached) -> dict[str, str]:
    """Return why units that are ScriptModules are locked, by unit."""
    modules = {unit.name: attached.model.get_submodule(unit.name) for unit in attached.space.units}
    reason = "it is a ScriptModule, which runs outside of Python"
    return {name: reason for name, module in modules.items() if isinstance(module, torch.jit.ScriptModule)}


def _profiler_runs() -> bool:
    """Whether the user's own profiler runs: two at once cannot."""
    return bool(torch._C._autograd._profiler_enabled())
