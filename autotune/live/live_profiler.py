"""Profiling of a live run in its own steps: one is probed, a few are traced, and a few are timed.

Storage does not change the result of training, and k and precisions are first tried in passes whose gradients are
discarded, so all of these steps also train the model. :mod:`autotune.live.lessons` chooses the use of each step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from autotune.choices import DEFAULT_STORAGES
from autotune.cost_model.profile import Profile
from autotune.live.allowed_plans import AllowedPlans, K, tried_choice, tried_storages
from autotune.live.attached import Attached, Step, StepAhead
from autotune.live.lessons import TIMED_EACH, TRACES, Lessons
from autotune.live.live_knowledge import RENEWED_AFTER, Knowledge
from autotune.live.placement import Placements
from autotune.live.probe_results import ProbeResults
from autotune.live.step_uses import Probing, Shadowing, Timing, Tracing, Use
from autotune.live.storage_trials import Group
from autotune.mechanics import devices
from autotune.mechanics.controls import has_16_bit_parameters
from autotune.mechanics.loop_signals import any_error
from autotune.mechanics.step_trace import TURN, Phase, StepTrace, rest_of, seconds_by_place
from autotune.plan import Plan, PlanSpace, Storage
from autotune.profiling.memory_scaling import Growth
from autotune.profiling.trial_passes import (
    AUTOCAST_TOLERANCE,
    FP32_TOLERANCE,
    Outcome,
    k_lock,
    precision_lock,
    storage_lock,
)

logger = logging.getLogger(__name__)

# A batch is traced as well if it is larger by this factor than the one its plan was traced with, at most this many
# times.
_LARGER = 1.1
_RETRACES = 12
# Under a budget, a step is traced again after this many steps, then after twice as many and one each time, up to a
# limit, to find memory that the loop adds on its own schedule, often every second step.
_TRACED_AGAIN, _TRACED_AGAIN_AT_MOST = 4, 1023
# After more unreadable traces than this, no further ones are taken.
_UNREADABLE = 4
# After more traced steps in a row with more micro-batches than were declared, the run is not profiled.
_TOO_LONG = 2
# After so many steps in a row whose later batches are too large for predictions, the largest batch is traced.
_BEYOND = 3
# Steps that profiling is held up before a warning.
_WAITED = 100


class LiveProfiler:
    """The profiling of a live run.

    Attributes:
        profile: The profile; ``None`` before there are enough traced steps.
        complete: Whether there is a profile to act on.
        failed: Why profiling failed; ``None`` if it did not.
        knowledge: What the steps have shown. If two predictions, or the last, were too low, profiling fails.
        probes: What the probes have found about the units.
        step_peak: Measured peak of the latest step in bytes; ``None`` if it was not traced.
        learns_accumulation: Whether to find out how many batches steps accumulate, if they should have one.
        accumulated: That number, once it is found; 0 before.

    Args:
        attached: The run.
        may_take_turns: Whether steps may call different units.
    """

    def __init__(self, attached: Attached, *, may_take_turns: bool = False) -> None:
        self._attached = attached
        self._allowed = AllowedPlans(attached.space)
        self._allowed.lock_storage(_scripted(attached))
        self.profile: Profile | None = None
        # The plans that were allowed when it was made.
        self._profiled = attached.space
        self.complete = False
        unusable = devices.unusable(attached.device)
        self.failed: str | None = unusable if attached.space.units else "the model has no units"
        self.learns_accumulation, self.accumulated = False, 0
        self.knowledge = Knowledge(attached, may_take_turns=may_take_turns)
        self.probes = ProbeResults()
        self.step_peak: int | None = None
        self._lessons = Lessons(attached, self._allowed, self.probes, self.knowledge)
        self._upcoming = self._then_finish(self._lessons.all())
        # What the running step is used for; ``None`` for an ordinary one.
        self._use: Use | None = None
        self._began = False
        # Steps in a row from which nothing could be learnt, since a profiler ran.
        self._waited = 0
        self._unreadable = self._beyond = 0
        # Declared micro-batches of a traced step that had only one; 0 if there was none.
        self._too_short = 0
        # Traced steps in a row that had more micro-batches than they should have, and the most that one had.
        self._too_long = self._most_passes = 0
        # The values of k at which memory ran out in trial passes.
        self._put_off: set[int] = set()
        # Steps until a step is traced again, and from that one to the next.
        self._until_trace = self._trace_every = _TRACED_AGAIN

    @property
    def space(self) -> PlanSpace:
        """The plans that are allowed, without storages that no step in the profile had."""
        allowed, profile = self._allowed.space, self.profile
        if profile is None or allowed.storages == DEFAULT_STORAGES:
            return allowed
        known = {*DEFAULT_STORAGES, *profile.space.storages}
        return replace(allowed, storages=tuple(one for one in allowed.storages if one in known))

    @property
    def locks(self) -> dict[str, str]:
        """The reasons against the choices that are not allowed, by choice."""
        return self._allowed.locks

    @property
    def leanest(self) -> Plan:
        """The baseline, at the smallest k, with all allowed recomputation: the least memory before cuts are tried."""
        return self._allowed.leanest

    @property
    def done(self) -> bool:
        """Whether there is a profile, or profiling has failed."""
        return self.complete or self.failed is not None

    @property
    def probed(self) -> bool:
        """Whether the first step, which probes units, has begun."""
        return self._began

    @property
    def probed_units(self) -> list[str]:
        """The units that the running step has called under a probe so far."""
        use = self._use
        return [name for name, probe in use.probes.items() if probe.calls] if isinstance(use, Probing) else []

    @property
    def growth(self) -> Growth:
        """How memory grows with a batch's size."""
        return self.knowledge.growth

    @property
    def watching(self) -> bool:
        """Whether the running step has a use in addition to training."""
        return self._use is not None

    @property
    def shadows(self) -> tuple[Plan, ...]:
        """The plans of the trial passes before the next step, the reference first; none for most steps."""
        return self._use.plans if isinstance(self._use, Shadowing) else ()

    # Before, in and after a step.

    def plan_for(self, ahead: StepAhead, budget_bytes: int | None) -> Plan | None:
        """Return the plan for the next step if something is to be learnt from it; ``None`` otherwise.

        Args:
            ahead: The step.
            budget_bytes: The current memory budget; ``None`` for none.
        """
        self._lessons.ahead, self._lessons.budget_bytes, self._use = ahead, budget_bytes, None
        if self.done or (self._began and self._must_wait()):
            return None
        self._began, self._waited = True, 0
        self._use = next(self._upcoming, None)
        return None if self._use is None else self._use.plan

    def _must_wait(self) -> bool:
        """Return whether nothing can be learnt from the next step; warn once if that does not end."""
        waits = _profiler_runs()
        self._waited += waits
        if waits and self._waited == _WAITED:
            logger.warning(
                "no step could be profiled for %d steps, because a profiler or another traced step of this process has "
                "been running; until that ends, plans are as careful as at the beginning",
                _WAITED,
            )
        return waits

    def run_under(self, plan: Plan) -> None:
        """Note that the next step runs under another plan than was asked for, because other ranks need it."""
        if self._use is not None:
            self._use.run_under(plan)

    def look_at(self, ahead: StepAhead, *, beyond: bool) -> Plan:
        """Trace the next step because it is unlike all traced steps.

        Args:
            ahead: The step.
            beyond: Whether no plan's peak can be predicted for it, because its batches are too large.

        Returns:
            The plan that it runs under: the one that needs the least memory.
        """
        self._lessons.ahead = ahead
        self.knowledge.handed.look()
        plan = self._lessons.leanest
        self._beyond = self._beyond + 1 if beyond else 0
        accumulates = self._attached.accumulation_steps > 1 and not self.knowledge.handed.varies
        if self._beyond == _BEYOND and accumulates and not self._lessons.by_size:
            # Steps may always begin with a small batch, which tells little of the later ones.
            self._lessons.by_size = True
            self.knowledge.forget()
            self._begin_again()
        if not _profiler_runs():
            self._use = self._lessons.new_shape(plan)
        return plan

    def wait_for_calls(self, ahead: StepAhead) -> Plan:
        """Trace the next step in case it calls units more often than usual; return its plan, as :meth:`look_at`."""
        self._lessons.ahead = ahead
        plan = self._lessons.leanest
        if not _profiler_runs():
            self._use = self._lessons.tracing(plan, waits=True)
        return plan

    def knows_leanest(self, ahead: StepAhead) -> bool:
        """Return whether the plan that needs the least memory was traced with a batch as large as the next one.

        Args:
            ahead: The step.
        """
        self._lessons.ahead = ahead
        plan = self._lessons.leanest
        size = ahead.as_equal_pieces(ahead.batch_bytes, plan.accumulation_steps)
        return self.knowledge.traced_bytes(plan, 0) >= size

    def try_again(self, plan: Plan, other: Plan) -> None:
        """Try the next step's batch in trial passes with pieces of another size, or with approximate storages.

        Args:
            plan: The plan that the step runs under.
            other: The plan of the trial passes.
        """
        self._use = Shadowing(plan, [other])

    def try_doubted(self, plan: Plan, other: Plan) -> None:
        """Try what is doubted in the next step's trial passes; the arguments are those of :meth:`try_again`."""
        self._lessons.trials.try_doubted()
        self.try_again(plan, other)

    def try_unseen(
        self, planned: Plan, ahead: StepAhead, budget_bytes: int | None, placements: Placements
    ) -> Plan | None:
        """Learn from the next step what is not known yet, if its batch is small enough for something.

        Args:
            planned: The plan that it runs under otherwise.
            ahead: The step.
            budget_bytes: The current memory budget; ``None`` for none.
            placements: The plans of the profile.

        Returns:
            The plan that it runs under; ``None`` to run it as planned.
        """
        if self._use is not None or not self.complete or _profiler_runs():
            return None
        self._lessons.ahead, self._lessons.budget_bytes = ahead, budget_bytes
        if self.knowledge.plans_with(ahead.signature):
            self._use = self._lessons.late_plan(planned, placements)
        return None if self._use is None else self._use.plan

    def also_watch(self, plan: Plan, ahead: StepAhead) -> None:
        """Trace the next step if its batch is larger than the traced ones, or if none was traced for a long time.

        Otherwise it is timed if its plan was timed only a few times.

        Args:
            plan: The plan that it runs under anyway.
            ahead: The step.
        """
        profile, known = self.profile, self.knowledge
        if self._use is not None or not self.complete or self.failed or profile is None or _profiler_runs():
            return
        self._lessons.ahead = ahead
        if not known.plans_with(ahead.signature):
            return
        self._until_trace -= 1
        size = ahead.as_equal_pieces(ahead.batch_bytes, plan.accumulation_steps)
        traced = known.traced_bytes(plan, profile.tables[0].batch_bytes)
        if known.traces < TRACES + _RETRACES and (size > _LARGER * traced or self.growth.told_by(plan, size)):
            self._use = self._lessons.tracing(plan)
        elif self._lessons.saves_memory and self._until_trace <= 0:
            self._until_trace = self._trace_every = min(2 * self._trace_every + 1, _TRACED_AGAIN_AT_MOST)
            self._use = self._lessons.tracing(plan)
        elif len(known.timed) < RENEWED_AFTER[-1] and known.times_of(plan) < TIMED_EACH:
            self._use = self._lessons.timing(plan)

    def begin(self) -> None:
        """Begin the step, whose plan has been applied."""
        if self._use is not None:
            self._use.begin()

    def phase(self, name: Phase) -> None:
        """Note that a pass of a micro-batch begins."""
        if self._use is not None:
            self._use.phase(name)

    def go_on(self) -> None:
        """Note that the forward pass goes on, whose end was told."""
        if self._use is not None:
            self._use.go_on()

    def end(self, step: Step) -> bool:
        """Evaluate the step; return whether the profile has changed."""
        use, self._use, self.step_peak = self._use, None, None
        self.knowledge.note_batch(step.batch_bytes)
        lost = self.knowledge.note_handed(step) and self.failed is None
        if self.failed is not None and self._too_short and step.later_bytes:
            # The loop has begun to accumulate.
            self.failed, self._too_short = None, 0
            self._begin_again()
        if lost and (self.complete or not isinstance(use, Tracing)):
            # Batches turn out not to tell what units are handed. While learning, the next lessons follow a traced step.
            self._begin_again()
        news = use is not None and self._learn(use, step)
        if self.complete and self.failed is None and self._lessons.awaits_kind:
            self._begin_again()
        return news

    def _learn(self, use: Use, step: Step) -> bool:
        """Read what the step was used for; return whether the profile has changed."""
        try:
            use.close()
            if self._read(use, step) and self.complete:
                self.rebuild()
                return True
        except any_error() as error:  # without a profile nothing is switched, and the run goes on
            self._unreadable += 1
            # If the user's profiler or torch.func ended the trace within the step, another step is traced.
            if isinstance(error, RuntimeError) or self._unreadable > _UNREADABLE:
                # As text: a handler that keeps log records would keep the error's frames and the step's tensors alive.
                logger.warning("the run cannot be profiled: %s", str(error))
                self.failed = f"{type(error).__name__}: {error}"
        return False

    def abandon(self) -> None:
        """Discard a step that was not finished."""
        use, self._use = self._use, None
        if use is not None:
            use.close()
            if isinstance(use, Probing | Shadowing):
                # Another step takes over the use of this one.
                self._began = self._began and not isinstance(use, Probing)
                self._upcoming = self._lessons.again(use, self._upcoming)

    # What is allowed.

    def puts_off_shadows(self) -> bool:
        """Run the trial passes with a later batch instead; return ``False`` if that was done before at the same k."""
        use, k = self._use, self.shadows[0].accumulation_steps
        if use is None or k in self._put_off:
            return False
        self._put_off.add(k)
        self._use, self._upcoming = None, self._lessons.again(use, self._upcoming)
        return True

    def take_shadows(self, outcomes: Sequence[Outcome]) -> None:
        """Lock the choices that failed in trial passes.

        Args:
            outcomes: The outcomes of the passes under :attr:`shadows`, in the same order.
        """
        reference, first = outcomes[0], self._lessons.first_plan
        if reference.is_empty and reference.failure is None:
            # The loop has skipped the batch, so that there is nothing to compare.
            return
        rounds = self.probes.autocast is not None or has_16_bit_parameters(self._attached.model)
        for plan, outcome in zip(self.shadows[1:], outcomes[1:], strict=True):
            choice = tried_choice(plan, self.shadows[0])
            if isinstance(choice, Storage):
                if reference.is_usable:
                    self._judge(choice, plan, storage_lock(reference, outcome, self._units))
                    self._leave_out_storages()
                continue
            if choice == K:
                exact = not rounds and plan.precision == first.precision
                reason = k_lock(reference, outcome, FP32_TOLERANCE if exact else AUTOCAST_TOLERANCE)
            else:
                reason = precision_lock(reference, outcome)
            if reason is not None:
                self.lock(choice, reason)

    def lock_shadows(self, reason: str) -> None:
        """Lock the choices that trial passes were to test.

        Args:
            reason: Why the passes are not run.
        """
        for plan in self.shadows[1:]:
            choice = tried_choice(plan, self.shadows[0])
            if isinstance(choice, Storage):
                self._allowed.lock_choice(choice, self.space.recomputable, reason)
            else:
                self.lock(choice, reason)

    @property
    def _units(self) -> dict[str, nn.Module]:
        return {unit.name: self._attached.model.get_submodule(unit.name) for unit in self.space.units}

    def _judge(self, storage: Storage, plan: Plan, reason: str | None) -> None:
        """Take the result of trial passes under an approximate storage.

        Args:
            storage: The storage.
            plan: The plan of the passes.
            reason: What speaks against it; ``None`` for nothing.
        """
        tried = tried_storages(plan, self.shadows[0])
        trials = self._lessons.trials
        if trials.knows(tried):
            trials.note_late(tried, reason)
        else:
            trials.note(storage, [*tried], reason)

    def doubted(self) -> Group | None:
        """Return what is to be tried in the next step because a late trial has failed; ``None`` if none has."""
        found = self._lessons.trials.doubted()
        self._leave_out_storages()
        return found

    def _leave_out_storages(self) -> None:
        """Make the profile again if storages were locked since it was made."""
        if self.complete and self._profiled is not self._allowed.space:
            self.rebuild()

    @property
    def copied_bytes(self) -> int:
        """Bytes that trial passes need on the device beside their plan."""
        return self._lessons.copied_bytes

    def note_copies(self, num_bytes: int) -> None:
        """Record the bytes of copies that trial passes have made on the device."""
        self._lessons.copied_bytes = num_bytes

    def lock(self, what: str, reason: str) -> None:
        """Lock a choice: ``accumulation_steps``, or a precision by its name."""
        self._allowed.lock(what, reason)
        if what == K:
            self._leave_out_ks()

    def raise_k(self, k: int, reason: str) -> None:
        """Remove the smaller values of k, for which memory ran out; keep what was learnt."""
        self._allowed.raise_k(k, reason)
        self._leave_out_ks()

    def _leave_out_ks(self) -> None:
        """Make the profile again without the k that are not allowed any more; learn again if no other was traced."""
        if self.complete and self.rebuild() is None:
            self._begin_again()

    def bar(self, barred: Mapping[str, str]) -> bool:
        """Lock the storage of units that turned out not to be recomputable; return whether the profile has changed.

        Args:
            barred: The reasons, by unit.
        """
        new = {name: reason for name, reason in barred.items() if name not in self.locks}
        if not new:
            return False
        self._allowed.lock_storage(new)
        self.knowledge.leave_out(new)
        return self.complete and self.rebuild() is not None

    # The profile.

    def rebuild(self) -> Profile | None:
        """Rebuild the profile from all recorded steps; return ``None`` if no step was traced."""
        self._profiled = self._allowed.space
        profile = self.knowledge.profile(self._profiled, self._lessons.ahead.samples)
        if profile is not None:
            self.profile = profile
        return profile

    def _then_finish(self, lessons: Iterator[Use | None]) -> Iterator[Use | None]:
        yield from lessons
        self._finish()

    def _finish(self) -> None:
        """Complete the profile; fail if its predictions cannot be trusted."""
        if self.knowledge.scores and self.knowledge.scores[-1].is_short:
            self._distrust()
            return
        profile = self.rebuild()
        self.complete = profile is not None
        if profile is None:
            told = (
                f" yet: each had one micro-batch, of {self._too_short} that a step accumulates"
                if self._too_short
                else ""
            )
            self.failed = "no step of the run could be traced" + told
            logger.warning("nothing is switched: %s", self.failed)
            return
        there = {unit.name for unit in profile.space.units}
        missing = [unit.name for unit in self.space.units if unit.recomputable and unit.name not in there]
        # A step may leave out some units by chance, but not all of them.
        if not any(unit.recomputable for unit in profile.space.units):
            reason = "it was not called as a module: its forward() was, or a part of it"
            self.locks.update({name: reason for name in missing if name not in self.locks})

    def _begin_again(self) -> None:
        """Learn the costs again; until then, plans are still switched by the former profile."""
        self.complete = False
        self._upcoming = self._then_finish(self._lessons.costs())

    def _distrust(self) -> None:
        self.complete = False
        self.failed = f"a peak was predicted {self.knowledge.scores[-1].short_frac:.1%} too low"
        logger.warning("nothing is switched: %s", self.failed)

    # What a step has shown.

    def _read(self, use: Use, step: Step) -> bool:
        """Evaluate what a step has shown; return whether the profile should be rebuilt."""
        match use:
            case Probing():
                self._allowed.lock_storage(self.probes.read(use))
                return False
            case Timing():
                calls = [] if use.watch is None else list(map(Counter, use.watch.calls))
                fullest = 0 if use.watch is None else use.watch.fullest
                takes_turns = self.knowledge.takes_turns and any(one.keys() != calls[0].keys() for one in calls)
                if takes_turns or (fullest and any(one - calls[fullest] for one in calls)):
                    raise RuntimeError("the micro-batches of a step call different units")
                return self._read_trace(use, step) if isinstance(use, Tracing) else self._read_times(use, step)
            case _:
                return False

    def _read_trace(self, use: Tracing, step: Step) -> bool:
        known, signature, tracer = self.knowledge, self._lessons.ahead.signature, use.tracer
        if tracer is not None and tracer.watch.spoilt is not None:
            if self.complete:
                return False
            raise ValueError(tracer.watch.spoilt)
        if tracer is None or tracer.trace is None:
            raise RuntimeError("the step was not traced")
        _check_trace(tracer.trace)
        passes, micro_batches = len(tracer.watch.calls), use.plan.accumulation_steps
        if passes > 1 == micro_batches:
            # Only the first has no gradient beside it. A step that was interrupted and begun again has more, once.
            self._too_long += 1
            self._most_passes = max(self._most_passes, passes)
            if self._too_long > _TOO_LONG and not self.complete:
                if self.learns_accumulation:
                    self.accumulated = self._most_passes
                    return False
                raise RuntimeError(
                    f"steps have {passes} backward passes through the model (of accumulated batches, or of another "
                    "loss), and accumulation_steps is 1; attach with the most that a step has"
                )
            return False
        self._too_long = self._most_passes = 0
        before = known.forgotten
        if known.signatures and not any(signature.is_kin_to(one) for one in known.signatures):
            # The steps differ in more than their batches: in trained parameters, optimizer state or calls of units.
            known.forget()
        short_step = passes == 1 < micro_batches
        # The last step of an epoch may be a short one, which does not show what later micro-batches need.
        if short_step:
            self._too_short = micro_batches
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
        news = known.note_trace(use, use.tracer.trace, seconds, step, self._lessons.ahead.signature)
        self.step_peak = known.latest_peak
        # One prediction that was too low may be chance: the trace corrects the next one.
        if len(known.scores) > scored and sum(score.is_short for score in known.scores) > 1:
            self._distrust()
        return news

    def _read_times(self, use: Timing, step: Step) -> bool:
        if use.watch is None or use.watch.spoilt is not None or not step.stepped:
            return False
        seconds = seconds_by_place(use.watch, self._attached.device)
        seconds["update", -1] = rest_of(step.seconds, seconds)
        return self.knowledge.note_times(use.plan, tuple(use.watch.calls[use.watch.fullest]), seconds, step)


def _check_trace(trace: StepTrace) -> None:
    """Raise a ``RuntimeError`` if a trace does not tell what the step's units need."""
    if not trace.traces_peak:
        raise RuntimeError("a micro-batch of a step needs more memory than the one that calls most units")
    if not trace.calls:
        # A model that is compiled as a whole does not call units as modules.
        raise RuntimeError(
            "no unit was called as a module in the forward pass (is the whole model compiled, is a copy trained, "
            "does another thread run it, or was tell_phase() not called?)"
        )


def _scripted(attached: Attached) -> dict[str, str]:
    """Return the reason against the recomputation of units that are ScriptModules, by unit."""
    modules = {unit.name: attached.model.get_submodule(unit.name) for unit in attached.space.units}
    reason = "it is a ScriptModule, which runs outside of Python"
    return {name: reason for name, module in modules.items() if isinstance(module, torch.jit.ScriptModule)}


def _profiler_runs() -> bool:
    """Return whether the user's own profiler runs, or another tuner's; two cannot run at once."""
    return bool(torch._C._autograd._profiler_enabled()) or TURN.is_taken
