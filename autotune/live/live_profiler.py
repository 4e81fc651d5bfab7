"""Learn what a live run costs from its own steps: one that probes, a few that are traced, a few that are timed.

Storage changes no bit of training, and k and precisions are tried in passes beside the run first, so all of this
happens on steps that count. Until the run is profiled, a step runs
under the leanest plan, or under a fuller one that what was traced so far predicts to fit.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from autotune.live.attached import Attached, Step
from autotune.live.growth import Growth
from autotune.live.limits import Stage
from autotune.live.live_profile import Seen, Timed, build_profile, seen_of
from autotune.live.placement import Placements, usable
from autotune.live.probe import UnitProbe
from autotune.live.shadow import AUTOCAST_TOLERANCE, FP32_TOLERANCE, Outcome, k_lock, precision_lock
from autotune.live.signature import Signature
from autotune.mechanics import devices
from autotune.mechanics.controls import has_16_bit_parameters
from autotune.mechanics.memory_meter import resident_tensors, storages, tensor_bytes
from autotune.mechanics.step_trace import Phase, StepTracer, StepWatch, rest_of, seconds_by_place
from autotune.physics.profile import Profile
from autotune.physics.solver import SAFETY_MARGIN
from autotune.plan import Plan, PlanSpace, Precision

logger = logging.getLogger(__name__)

# Steps that are traced under plans that hold more and more, until the fullest that fits was seen.
_TRACES = 4
# Tries at them: a step that shows nothing (an epoch's last and short one) is tried again.
_TRIES = 8
# Timed steps of one plan, and of all; the profile is made anew after so many.
_TIMED_EACH = 3
_RENEWED_AFTER = (2, 4, 8, 16, 32)
# A batch this much larger than any that was traced is traced as well, and so often at most.
_LARGER = 1.1
_RETRACES = 12
# Steps that are traced because nothing like them was; and how much more one of them must need to be told apart.
_LOOKS = 48
# Steps that are looked at until each unit was called: chance may leave one out.
_PROBED_STEPS = 4
# Steps that pass while one like those that are planned with is awaited.
_WAITS = 32
_DENSER = 1.02


@dataclass(frozen=True, slots=True)
class _Task:
    """What a step is used for: ``probe``, ``settle``, ``shadow``, ``trace`` or ``time``, under which plan."""

    kind: str
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Hold what a plan's peak was predicted to be before the step that it was first tried in, and what it was.

    Attributes:
        predicted_bytes: before the step.
        measured_bytes: of the step.
    """

    predicted_bytes: int
    measured_bytes: int

    @property
    def short_frac(self) -> float:
        """Return by what share the prediction was too low; below 0 where it was not."""
        return self.measured_bytes / self.predicted_bytes - 1

    @property
    def is_short(self) -> bool:
        """Tell whether it was too low by more than the reserve that plans leave."""
        return self.short_frac > SAFETY_MARGIN


class LiveProfiler:
    """Find out what a run costs.

    Attributes:
        space: the plans that are allowed; the probe takes away the storage of units that may not be recomputed.
        locks: why not, by unit.
        profile: what is known; ``None`` before the first traced steps.
        failed: why there will be none; ``None`` if there will.
        growth: how memory grows with a batch's size.
        latest_peak: measured peak of the last traced step; ``None`` before the first.
        step_peak: that of the step that ended last; ``None`` if it was not traced.
        fragments: the most bytes that a traced step reserved beyond what it allocated at its peak; 0 on a CPU.
        autocast: dtype of the user's own autocast; ``None`` for none.
        scores: of predicted peaks. Where two, or the last, are too low by more than the reserve, nobody acts.

    Args:
        attached: what the run is.
    """

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self.space: PlanSpace = attached.space
        self.locks: dict[str, str] = {}
        self.profile: Profile | None = None
        lacking = devices.unusable(attached.device)
        self.failed: str | None = lacking if attached.space.units else "the model has no units"
        self.growth = Growth()
        self.latest_peak: int | None = None
        self.step_peak: int | None = None
        self.fragments = 0
        self.autocast: torch.dtype | None = None
        self.scores: list[Score] = []
        # The plan whose peak is predicted, for batches of at most so many bytes, that peak, and what of it is static.
        self._expected: tuple[Plan, int, float, int] | None = None
        self._seen: dict[Plan, Seen] = {}
        # Of each traced plan, the peak of its last traced step.
        self._peaks: dict[Plan, int] = {}
        # Of which steps those tell, the first being like those that were kept; and how many bytes each plan needed for
        # one of the batch's.
        self._known: list[Signature] = []
        self._densities: dict[Plan, float] = {}
        self._signature = Signature((), (0, 0))
        self._looks = 0
        self._waits = 0
        self._timed: list[Timed] = []
        self._times: Counter[Plan] = Counter()
        self._sizes: deque[int] = deque(maxlen=64)
        self._task: _Task | None = None
        self._traces = 0
        self._tries = 0
        self._timings = 0
        self._likeliest: Placements | None = None
        self._complete = False
        self._began = False
        self._settled = False
        self._shadowed = False
        self._size = 0
        self._samples = 0
        self._largest = 0
        self._gradients = 0
        self._residents: set[int] = set()
        self._static = 0
        self._probes: dict[str, UnitProbe] = {}
        # Units that no step has called yet, and steps that looked for calls.
        self._uncalled: list[str] = []
        self._probed = 0
        self._tracer: StepTracer | None = None
        self._watch: StepWatch | None = None
        self._hooks = ExitStack()

    @property
    def done(self) -> bool:
        """Tell whether there is nothing left to learn before anybody may act."""
        return self._complete or self.failed is not None

    @property
    def probed(self) -> bool:
        """Tell whether it is known which units may be recomputed, or is being found out."""
        return self._began

    @property
    def complete(self) -> bool:
        """Tell whether there is a profile to act on."""
        return self._complete

    @property
    def shadows(self) -> tuple[Plan, ...]:
        """Return the plans to try beside the step that begins, the reference first; none for most steps."""
        task = self._task
        if task is None or task.kind != "shadow":
            return ()
        # Where memory ran out for a whole batch, it is cut already: then each of its pieces is cut in two.
        cut = task.plan.changed(accumulation_steps=2 * self._ks[0])
        others = [cut] if self.space.k_splits and self._ks[1:] else []
        names = [unit.name for unit in self.space.units]
        others += [task.plan.changed(precision=dict.fromkeys(names, p)) for p in self.space.precisions[1:]]
        return (task.plan, *others)

    @property
    def watching(self) -> bool:
        """Tell whether the running step is not an ordinary one."""
        return self._task is not None

    def plan_for(
        self, size: int, largest: int, samples: int, budget_bytes: int | None, signature: Signature
    ) -> Plan | None:
        """Return the plan that the next step shall run under so that something is learnt; ``None`` if nothing is due.

        Args:
            size: bytes of its batch, or of the first that the caller accumulates.
            largest: bytes of the largest batch that it is to hold.
            samples: samples of its batch.
            budget_bytes: the budget of the moment; ``None`` for none.
            signature: what else its memory hangs on.
        """
        self._size, self._largest, self._samples, self._signature = size, largest, samples, signature
        self._expected = None
        self._task = None if self.failed is not None else self._next(budget_bytes)
        return None if self._task is None else self._task.plan

    def take_shadows(self, outcomes: Sequence[Outcome]) -> None:
        """Lock what the passes beside a step spoke against.

        Args:
            outcomes: of :attr:`shadows`, in their order.
        """
        found = dict(zip(self.shadows, outcomes, strict=True))
        (_, reference), *others = found.items()
        for plan, outcome in others:
            if plan.accumulation_steps > 1:
                rounds = self.autocast is not None or has_16_bit_parameters(self._attached.model)
                tolerance = AUTOCAST_TOLERANCE if rounds else FP32_TOLERANCE
                reason = k_lock(reference, outcome, tolerance)
                if reason is not None:
                    self.lock("accumulation_steps", reason)
            else:
                precision = next(iter(plan.precision.values()))
                reason = precision_lock(reference, outcome)
                if reason is not None:
                    self.lock(str(precision), reason)

    def bar(self, barred: Mapping[str, str]) -> bool:
        """Lock the storage of units that turned out not to be recomputable; return whether the profile is another one.

        Args:
            barred: why not, by unit.
        """
        new = {name: reason for name, reason in barred.items() if name not in self.locks}
        if not new:
            return False
        self.locks.update(new)
        units = (replace(unit, recomputable=unit.recomputable and unit.name not in new) for unit in self.space.units)
        self.space = replace(self.space, units=tuple(units))
        return self._complete and self.rebuild() is not None

    def lock(self, what: str, reason: str) -> None:
        """Take a choice away: ``accumulation_steps``, or a precision by its name."""
        self.locks[what] = reason
        if what == "accumulation_steps":
            self.space = replace(self.space, accumulation_choices=self.space.accumulation_choices[:1])
        else:
            kept = tuple(one for one in self.space.precisions if one != what)
            self.space = replace(self.space, precisions=kept)

    def raise_k(self, k: int, reason: str) -> None:
        """Take away every k below one, under which memory ran out; what was learnt stays."""
        self.locks[f"accumulation_steps < {k}"] = reason
        kept = tuple(one for one in self.space.accumulation_choices if one >= k)
        self.space = replace(self.space, accumulation_choices=kept)
        if self._complete:
            self.rebuild()

    def calls_of(self, name: str) -> int:
        """Return how often a unit was called in a traced forward pass."""
        first = next(iter(self._seen.values()), None)
        return 0 if first is None else sum(called == name for called in first.calls)

    def knows(self, signature: Signature) -> bool:
        """Tell whether what was traced tells what a step with a signature needs."""
        return any(known.tells_of(signature) for known in self._known)

    def look_at(self, plan: Plan, size: int, signature: Signature) -> None:
        """Trace the step that is about to run, whose signature tells that nothing like it was traced.

        Args:
            plan: the plan that it runs under: one that needs least.
            size: bytes of its batch.
            signature: what else its memory hangs on.
        """
        self._size, self._signature = size, signature
        if self._looks < _LOOKS and not _profiler_runs():
            self._looks += 1
            self._task = _Task("trace", plan)

    def also_watch(self, plan: Plan, size: int, signature: Signature) -> None:
        """Learn from the step that is about to run under a plan anyway.

        It is traced if its batch is larger than any that was, and timed if its plan hardly was.

        Args:
            plan: the plan.
            size: bytes of its batch, or of the first that the caller accumulates.
            signature: what else its memory hangs on.
        """
        profile = self.profile
        if self._task is not None or not self._complete or profile is None or _profiler_runs():
            return
        self._size, self._signature = size, signature
        if self._known and not self._known[0].tells_of(signature):
            return
        own = self._seen.get(plan)
        known = profile.tables[0].batch_bytes if own is None else own.batch_bytes
        if self._traces < _TRACES + _RETRACES and (size > _LARGER * known or self.growth.told_by(plan, size)):
            self._task = _Task("trace", plan)
        elif len(self._timed) < _RENEWED_AFTER[-1] and self._times[plan] < _TIMED_EACH:
            self._task = _Task("time", plan)

    def begin(self) -> None:
        """Begin the step that :meth:`plan_for` or :meth:`also_watch` asked for, its plan applied."""
        task, attached = self._task, self._attached
        if task is None or task.kind in ("settle", "shadow"):
            return
        names = [unit.name for unit in self.space.units]
        if task.kind == "probe":
            names = self._uncalled or list(self.space.recomputable)
            modules = {name: attached.model.get_submodule(name) for name in names}
            self._probes = {name: UnitProbe(module) for name, module in modules.items()}
            return
        if task.kind == "trace":
            if self._expected is not None:
                # Garbage that is collected in the step would count as the step's.
                gc.collect()
            # Gradients that are alive when a step begins (some frameworks clear them in it) are no static bytes.
            gradients = (parameter.grad for parameter in attached.model.parameters())
            self._gradients = tensor_bytes(gradient for gradient in gradients if gradient is not None)
            resident = [
                tensor
                for tensor in resident_tensors(attached.model, attached.optimizer, [])
                if tensor.device.type == attached.device.type
            ]
            self._residents = set(storages(resident))
            self._static = tensor_bytes(resident) - self._gradients + attached.bucket_bytes
            seen = devices.allocated(attached.device)
            if seen is not None:
                # A teacher, an average of the weights, a library's workspace or a data set takes room as well.
                self._static = max(self._static, seen.current - self._gradients - self._size)
            self._tracer = StepTracer(attached.model, names, attached.device)
            self._watch = self._tracer.watch
            self._hooks.enter_context(self._tracer.tracing())
        else:
            self._watch = StepWatch(attached.model, names, devices.stamp_for(attached.device))
            self._hooks.enter_context(self._watch)

    def phase(self, name: Phase) -> None:
        """Be told of each micro-batch's passes."""
        if name == "backward":
            for probe in self._probes.values():
                probe.settle()
        if self._watch is not None:
            self._watch.begin(name)

    def end(self, step: Step) -> bool:
        """Take in the step; return whether the profile is another one now."""
        task, self._task, self.step_peak = self._task, None, None
        self._sizes.append(step.batch_bytes)
        if task is None:
            return False
        self._hooks.close()
        tracer, watch = self._tracer, self._watch
        self._tracer = self._watch = None
        try:
            if task.kind == "probe":
                self._read_probes()
                return False
            news = False
            if task.kind == "trace" and tracer is not None:
                news = self._read_trace(task.plan, tracer, step)
            elif watch is not None:
                news = self._read_times(task.plan, watch, step)
            if news and self._complete:
                self.rebuild()
                return True
        except Exception as error:  # noqa: BLE001 - without a profile there is nothing to act on, and the run goes on
            logger.warning("the run cannot be profiled: %s", error)
            self.failed = f"{type(error).__name__}: {error}"
        return False

    def abandon(self) -> None:
        """Forget a step that did not come to its end."""
        self._hooks.close()
        for probe in self._probes.values():
            probe.remove()
        self._probes = {}
        if self._task is not None:
            # What it was to find out, another step does.
            self._began = self._began and self._task.kind != "probe"
            self._shadowed = self._shadowed and self._task.kind != "shadow"
        self._tracer = self._watch = self._task = None

    def rebuild(self) -> Profile | None:
        """Make the profile anew from all that was seen."""
        if not self._seen:
            return None
        logs = [math.log(max(size, 1)) for size in self._sizes]
        self.profile = build_profile(
            self._attached.name,
            str(self._attached.device),
            self.space,
            list(self._seen.values()),
            self._timed,
            batch_size=max(self._samples, 1),
            batching="adaptive" if self._attached.adaptive else "fixed",
            length_spread=statistics.pstdev(logs) if len(logs) > 1 else 0.0,
            growth=self.growth.within,
        )
        return self.profile

    @property
    def leanest(self) -> Plan:
        """Return the user's baseline with all recomputed that may be: known, without a profile, to need least."""
        return self._plan_of(self.space.accumulation_choices[0], self.space.precisions[0], lean=True)

    @property
    def _ks(self) -> tuple[int, ...]:
        """Return the k that a batch of the present size can be cut into."""
        choices = self.space.accumulation_choices
        return tuple(k for k in choices if k <= self._samples or k == choices[0] or not self.space.k_splits)

    def _plan_of(self, k: int, precision: Precision, *, lean: bool) -> Plan:
        recomputed = self.space.recomputable if lean else ()
        return self.space.plan(accumulation_steps=k, precision=precision, recomputed=recomputed)

    def _next(self, budget_bytes: int | None) -> _Task | None:
        acts = self._attached.stage is Stage.ACT
        lean = acts and (budget_bytes is not None or callable(self._attached.budget))
        first = self._plan_of(self.space.accumulation_choices[0], self.space.precisions[0], lean=lean)
        if not self._began:
            self._began = True
            # The first step creates the optimizer's state: it is not traced.
            return _Task("probe", first) if acts else None
        if self._complete or _profiler_runs():
            return None
        if self._uncalled:
            # Chance may leave a unit out of a step.
            return _Task("probe", first)
        if self._attached.bucket_bytes and not self._settled:
            # DistributedDataParallel makes its buckets anew in the second step, beside those of the first.
            self._settled = True
            return _Task("settle", first)
        if not self._shadowed and acts:
            self._shadowed = True
            if self.autocast is not None:
                for precision in self.space.precisions[1:]:
                    self.lock(str(precision), f"the run computes in {self.autocast} by an autocast of its own")
            self._task = _Task("shadow", first)
            if len(self.shadows) > 1:
                return self._task
        return self._due(first, budget_bytes, lean=lean)

    def _due(self, first: Plan, budget_bytes: int | None, *, lean: bool) -> _Task | None:
        """Return what is to be traced or timed next; ``None``, the learning having ended, once all was."""
        if lean and self._seen and not self.knows(self._signature):
            self._looks += 1
            return _Task("trace" if self._looks < _LOOKS else "settle", first)
        if lean and self._known and not self._known[0].tells_of(self._signature) and self._waits < _WAITS:
            # What a batch of another shape showed would be mixed with what is known.
            self._waits += 1
            return _Task("settle", first)
        room = usable(budget_bytes)
        due = self._untraced(first, room, lean=lean) or (self._fuller(budget_bytes) if lean else None)
        if due is not None and self._tries < _TRIES + 2 * len(self._ks) * len(self.space.precisions):
            self._tries += 1
            return _Task("trace", due)
        due = self._untimed(room, lean=lean)
        if due is not None and self._timings < _TRIES * len(self.space.precisions):
            self._timings += 1
            return _Task("time", self._likely(due, budget_bytes) if lean else due)
        self._finish()
        return None

    def _finish(self) -> None:
        """End the learning, unless what was learnt cannot be trusted."""
        if self.scores and self.scores[-1].is_short:
            self._distrust()
            return
        self._complete = self.rebuild() is not None
        if not self._complete:
            self.failed = "no step of the run could be traced"

    def _untraced(self, first: Plan, room: float, *, lean: bool) -> Plan | None:
        """Return the next plan to trace of those that each k and precision is seen by; ``None`` once all were.

        Under a budget the largest k of each precision comes first, and what it lets expect to need more is left out.
        """
        if first not in self._seen or self.growth.told_by(first, self._size):
            return first
        # Cut, a larger k only saves memory; of a step's batches, each after the first is like the second.
        ks = (self._ks[::-1] if lean else self._ks[:1]) if self.space.k_splits else self._ks[:2]
        wanted = [self._plan_of(k, precision, lean=lean) for precision in self.space.precisions for k in ks]
        return next((plan for plan in wanted if plan not in self._seen and self._expected_peak(plan) <= room), None)

    def _expected_peak(self, plan: Plan) -> float:
        """Return what a plan should need if it falls with k as the user's own precision does; 0 if nothing tells."""
        own, small, large = self.space.precisions[0], self._ks[0], self._ks[-1]
        names = [unit.name for unit in self.space.units]

        def peak(k: int, precision: Precision | None = None) -> int | None:
            other = {} if precision is None else {"precision": dict.fromkeys(names, precision)}
            return self._peaks.get(plan.changed(accumulation_steps=k, **other))

        whole, least, known = peak(small, own), peak(large, own), peak(large)
        if small == large or whole is None or least is None or known is None or not self.space.k_splits:
            return 0.0
        falls = (1 / plan.accumulation_steps - 1 / large) / (1 / small - 1 / large)
        share = max(known - self._static, 0) / max(least - self._static, 1)
        return known + share * max(whole - least, 0) * falls

    def _untimed(self, room: float, *, lean: bool) -> Plan | None:
        """Return a traced plan of the precision that was timed least, to be timed before anybody plans; mostly none.

        Tracing makes precisions slower by shares of their own, and under adaptive batching k hangs on the time of an
        update, which its batches share and no trace shows; and policies plan from the first profile. Precisions take
        turns, so that a busy machine meets all alike.
        """
        if not self._attached.adaptive and len(self.space.precisions) == 1:
            return None
        plans = [self._roomy(precision, room, lean=lean) for precision in self.space.precisions]
        counts = {
            plan: sum(one.plan.precision == plan.precision for one in self._timed)
            for plan in plans
            if plan in self._seen
        }
        least = min(counts, key=lambda plan: counts[plan], default=None)
        return None if least is None or counts[least] >= _TIMED_EACH else least

    def _roomy(self, precision: Precision, room: float, *, lean: bool) -> Plan:
        """Return the plan of a precision with the smallest k that was seen to fit; of none, with the smallest k."""
        ks = self._ks if self.space.k_splits else self._ks[:1]
        plans = [self._plan_of(k, precision, lean=lean) for k in ks]
        return next((plan for plan in plans if self._peaks.get(plan, math.inf) <= room), plans[0])

    def _likely(self, like: Plan, budget_bytes: int | None) -> Plan:
        """Return a lean plan with the storage that the next batch would most likely get; as it is, if unknown."""
        if self._likeliest is None:
            profile = self.rebuild()
            self._likeliest = None if profile is None else Placements(profile, budget_bytes, self.growth.beyond)
        placements = self._likeliest
        if placements is None:
            return like
        length = self._largest / placements.profile.tables[0].batch_bytes
        room = usable(budget_bytes)
        found = placements.fastest(room, length, placements.group(self.leanest))
        plan = like if found is None else like.changed(storage=found.storage)
        return plan if placements.peak_bytes(plan, length) <= room else like

    def _fuller(self, budget_bytes: int | None) -> Plan | None:
        """Return the fastest plan that is known to fit the next batch, while others were not traced often enough.

        Where the last of them needed more than predicted, what was seen of it has to predict one more.
        """
        short = bool(self.scores) and self.scores[-1].is_short
        if sum(plan.storage != self.leanest.storage for plan in self._seen) >= _TRACES - 1 and not short:
            return None
        profile = self.rebuild()
        if profile is None:
            return None
        length = self._largest / profile.tables[0].batch_bytes
        placements = Placements(profile, budget_bytes, self.growth.beyond)
        found = placements.fastest(usable(budget_bytes), length)
        if found is None or (found in self._seen and not short):
            return None
        self._expected = found, self._largest, placements.peak_bytes(found, length), profile.static_bytes
        return found

    def _read_probes(self) -> None:
        self._probed += 1
        self._uncalled = []
        for name, probe in self._probes.items():
            probe.remove()
            self.autocast = self.autocast or probe.autocast
            if probe.reason is not None:
                self.locks[name] = probe.reason
            elif probe.calls == 0:
                self._uncalled.append(name)
        none = self._probed == 1 and len(self._uncalled) == len(self._probes)
        if none or self._probed == _PROBED_STEPS:
            for name in self._uncalled:
                self.locks[name] = "it was not called by itself (is the model compiled as a whole?)"
            self._uncalled = []
        self._probes = {}
        units = tuple(
            replace(unit, recomputable=unit.recomputable and unit.name not in self.locks) for unit in self.space.units
        )
        self.space = replace(self.space, units=units)

    def _read_trace(self, plan: Plan, tracer: StepTracer, step: Step) -> bool:
        """Take in a traced step; return whether it showed more than was known."""
        if tracer.trace is None:
            raise RuntimeError("the step was not traced")
        if not tracer.trace.calls:
            # What is compiled as a whole calls none by itself.
            raise RuntimeError("no unit was called in what tell_phase() named the forward pass")
        if self._known and not any(self._signature.is_kin_to(known) for known in self._known):
            # Other gradients are left, more is saved, or units are called more often.
            self._forget()
        first = next(iter(self._seen.values()), None)
        if first is not None and first.calls != tracer.trace.calls:
            raise RuntimeError("the units are called differently from step to step")
        if plan.accumulation_steps > 1 and len(tracer.watch.calls) == 1:
            # The last step of an epoch may be a short one, which does not show what later micro-batches need.
            return False
        self._traces += 1
        held = devices.allocated(self._attached.device)
        if held is not None:
            self.fragments = max(self.fragments, held.reserved_peak - held.peak)
        began = tracer.trace.times[0] - 1
        # What else is alive from before, and released in the step: outputs that the loop holds until it has others.
        older = sum(size for address, size in tracer.trace.older.items() if address not in self._residents)
        trace = replace(tracer.trace, changes=((began, self._gradients + older), *tracer.trace.changes))
        # First and later micro-batches were seen at sizes of their own: both are bounds for the smaller one.
        size = min(self._size, step.later_bytes or self._size)
        seen = seen_of(
            plan,
            trace,
            seconds_by_place(tracer.watch, self._attached.device),
            batch_bytes=size,
            static_bytes=self._static,
            gradients=None if first is None else first.attribution.gradients,
        )
        level = max(itertools.accumulate(change for _, change in trace.changes), default=0)
        self.step_peak = self.latest_peak = self._peaks[plan] = self._static + step.batch_bytes + max(level, 0)
        if self._expected is not None:
            self._score(plan, step)
        former_law = self.growth.within, self.growth.beyond
        if not self._is_densest(plan, level / max(self._size, 1)):
            return False
        self.growth.note(plan, self._size, seen.attribution)
        former = self._seen.get(plan)
        if former is not None and former.batch_bytes > size:
            # A smaller batch only tells how memory grows.
            return former_law != (self.growth.within, self.growth.beyond)
        self._seen[plan] = seen
        return True

    def _is_densest(self, plan: Plan, density: float) -> bool:
        """Note what a step was like; tell whether it is to be planned with, and not one that needed more for its bytes.

        Args:
            plan: the plan that it ran under.
            density: bytes that it needed beside static ones, over its batch's.
        """
        if not self.knows(self._signature):
            if self._known and density > _DENSER * self._densities.get(plan, 0.0):
                self._forget()
            self._known.append(self._signature)
        self._densities[plan] = max(density, self._densities.get(plan, 0.0))
        return self._known[0].tells_of(self._signature)

    def _forget(self) -> None:
        """Begin to learn anew; whoever plans already, goes on from what he has until enough was traced again."""
        self._seen, self._peaks, self._densities, self._known = {}, {}, {}, []
        self.growth, self._complete, self._likeliest = Growth(), False, None
        self._tries = self._timings = self._waits = 0

    def _score(self, plan: Plan, step: Step) -> None:
        """Score what was predicted of the step that ran; of larger batches than those nothing was."""
        assert self._expected is not None
        assert self.latest_peak is not None
        (expected, largest, peak, static), self._expected = self._expected, None
        if plan == expected and max(step.batch_bytes, self._size) <= largest:
            # What the loop has come to hold since then is no plan's doing.
            measured = self.latest_peak - max(self._static - static, 0)
            self.scores.append(Score(predicted_bytes=int(peak), measured_bytes=measured))
            # Once may be chance: what was seen corrects the next prediction.
            if sum(score.is_short for score in self.scores) > 1:
                self._distrust()

    def _distrust(self) -> None:
        self.failed = f"a peak was predicted {self.scores[-1].short_frac:.1%} too low"
        logger.warning("nothing is switched: %s", self.failed)

    def _read_times(self, plan: Plan, watch: StepWatch, step: Step) -> bool:
        """Take in a timed step; return whether the profile is to be made anew."""
        calls = next(iter(self._seen.values())).calls
        if tuple(watch.calls[0]) != calls or not step.stepped:
            return False
        seconds = seconds_by_place(watch, self._attached.device)
        seconds["update", -1] = rest_of(step.seconds, seconds)
        self._times[plan] += 1
        self._timed.append(Timed(plan=plan, batch_bytes=max(step.batch_bytes, 1), seconds=seconds))
        return len(self._timed) in _RENEWED_AFTER


def _profiler_runs() -> bool:
    """Tell whether the user's own profiler runs: two at once cannot."""
    return bool(torch._C._autograd._profiler_enabled())
