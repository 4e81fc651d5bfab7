"""Profile a job: trace and time real steps of homogeneous plans to find the cost of every piece.

For each k, precision and storage, one step is traced for memory and a few are timed piece by piece, interleaved. A few
random whole plans then correct the sum of the pieces.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autotune.choices import COMPILED_STORAGES
from autotune.cost_model.profile import Profile
from autotune.cost_model.time_model import calibrated
from autotune.engines.torch_engine import EngineOptions
from autotune.errors import JobError
from autotune.job import Job
from autotune.measurement import Failure, Measurement
from autotune.mechanics import devices
from autotune.mechanics.compiled_units import compilations
from autotune.mechanics.randomness import isolated, seed_all
from autotune.mechanics.split_backward import GivenBytes
from autotune.mechanics.step_trace import Phase, StepTrace, rest_of
from autotune.plan import Plan, PlanSpace, Precision, Storage
from autotune.profiling.attribution import attribute
from autotune.profiling.choice_errors import WHOLE, Finding, UnjudgedError, as_share, find_errors
from autotune.profiling.compile_probe import uncompiled
from autotune.profiling.homogeneous_plans import (
    UPDATE,
    PlanName,
    PlanSteps,
    Visit,
    WatchedStep,
    disagreement,
    homogeneous_plans,
    is_copy,
    share_seconds,
    spread_choices,
    steps_by_k,
    without_copies,
)
from autotune.profiling.job_shape import fixed_shape, length_spread, profile_key
from autotune.profiling.profile_assembly import assemble
from autotune.profiling.step_record import StepRecord, TracedStep, recomputed_units, silent_units
from autotune.profiling.tracing_engine import WatchedEngine
from autotune.profiling.whole_steps import corrected

# Maximum number of values of k to profile. If there are more, the smallest, the largest and some between are used.
_MAX_TABLES, _MAX_LEAN_TABLES = 4, 2
# Minimum number of timing rounds, however long they take, and number of visits to each calibration plan.
_MIN_ROUNDS, _CALIBRATION_VISITS = 2, 2
# Steps of one visit to a plan; the first is a warm-up.
_VISIT_STEPS = 3
# Steps of an accelerator's visit to a plan that nothing watches; the first is a warm-up.
_WHOLE_STEPS = 2
# Seconds of a step below which further ones are timed too: one short step tells little.
_SHORT_S, _FURTHER_STEPS = 0.25, 2
# A lean profile is timed again if times that should agree differ by more than this factor. On an idle machine they
# differed by at most 1.16; while tests ran on the same machine, by 1.99.
_AGREEMENT = 1.3
_NO_ROOM = "a rank ran out of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerOptions:
    """Limits on the cost of a profile.

    Attributes:
        seconds: about how long profiling may take; at least two rounds of timing are made, unless ``max_rounds`` is
            smaller.
        max_rounds: maximum number of timing rounds.
        call_checks: number of steps that are watched first, to find units whose calls vary between steps.
        calibration_plans: number of whole plans that correct the sum of the pieces.
        seed: random seed for weights, batches and calibration plans.
        late_steps: number of steps that the job then trains on its own batches before the gradient errors of
            approximate choices are measured again; 0 for once alone. Without such choices none are trained.
        is_lean: whether each plan is timed in a single step after its trace (and again if times that should agree do
            not), and like units share their times. Lean profiles are cached separately from full ones.
    """

    seconds: float = 50.0
    max_rounds: int = 5
    call_checks: int = 4
    calibration_plans: int = 8
    seed: int = 0
    is_lean: bool = False
    late_steps: int = 20

    @classmethod
    def lean(cls, seed: int = 0) -> ProfilerOptions:
        """Return options for about a tenth of the steps: each plan is timed once, at the smallest and largest k."""
        return cls(max_rounds=0, call_checks=0, calibration_plans=0, seed=seed, is_lean=True)


def profile(
    job: Job,
    *,
    device_name: str,
    fingerprint: str = "",
    device: str | None = None,
    options: ProfilerOptions | None = None,
    on_progress: Callable[[float], None] | None = None,
    make_engine: Callable[..., WatchedEngine] = WatchedEngine,
) -> Profile:
    """Profile a job on real steps.

    Args:
        job: the job.
        device_name: name of the device, for the profile.
        fingerprint: what :func:`autotune.profiling.job_shape.profile_key` returned; computed if empty.
        device: device to train on; ``None`` for this machine's default.
        options: limits on the cost of profiling.
        on_progress: called with the share that is done.
        make_engine: makes the engine that trains the job. If several ranks train it, each rank calls this function and
            gets a profile of its own share; its static bytes are raised by the difference between its peak and the
            highest peak of any rank.

    Raises:
        JobError: if neither the baseline nor the leanest plan can run, or another step fails.
    """
    profiler = _Profiler(job, device_name, device, options or ProfilerOptions(), on_progress, make_engine)
    return profiler.profile(fingerprint or profile_key(job, device_name))


class _UnsteadyCallsError(Exception):
    """Some units are not called in the same way in every step; profiling restarts without them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(", ".join(names))
        self.names = names


class _Profiler:
    """The profiling of one job."""

    def __init__(
        self,
        job: Job,
        device_name: str,
        device: str | None,
        options: ProfilerOptions,
        on_progress: Callable[[float], None] | None,
        make_engine: Callable[..., WatchedEngine],
    ) -> None:
        self._began, self._compiled = time.perf_counter(), compilations()
        self._job = job
        self._device_name = device_name
        self._options = options
        self._report = on_progress or (lambda _share: None)
        self._warnings: list[str] = []
        # The units that every step calls, in order; ``None`` before the first step.
        self._calls: tuple[str, ...] | None = None
        # Bytes of the gradients that units' operations are given in a step, by precision.
        self._given: dict[str, dict[Precision, int]] = {}
        with isolated():
            seed_all(options.seed)
            steady = fixed_shape(job, options.seed)
            self._length_spread = length_spread(job, options.seed)
        self._make_engine = functools.partial(
            make_engine,
            seed=options.seed,
            device=device,
            options=EngineOptions(discard_steps=0, statistics_every=None, meter_memory=False),
        )
        self._engine = self._make_engine(steady)
        self._late_steps = 0
        self._ks = spread_choices(
            self._engine.space.accumulation_choices, _MAX_LEAN_TABLES if options.is_lean else _MAX_TABLES
        )

    def profile(self, fingerprint: str) -> Profile:
        engine = self._engine
        self._warm_up()
        self._judge_choices()
        found = self._observe()
        if not found:
            raise JobError("no plan could be profiled", where=f"job {self._job.name!r}", allowed=self._warnings)
        self._note_all_given()
        if self._options.is_lean:
            share_seconds(found, engine.space)
        record = StepRecord(
            job=self._job.name,
            device=self._device_name,
            batch_size=engine.samples_here(),
            static_bytes=engine.static_bytes,
            steps=steps_by_k(found),
            length_spread=self._length_spread,
        )
        own, shared = engine.unit_bytes()
        given = {unit.name: self._given[unit.name] for unit in engine.space.units if unit.name in self._given}
        result = replace(assemble(record, engine.space), unit_bytes=own, shared_bytes=shared, given_bytes=given)
        self._warn_of_ks(result.accumulation_choices)
        result = self._calibrate(self._corrected(result))
        engine.close()
        result = self._judge_late(result)
        self._tell_compilations()
        self._report(1.0)
        return replace(
            result,
            fingerprint=fingerprint,
            batch_size=self._job.batch_size,
            noise_frac=_noise(found.values()),
            switch_s=_switch_seconds(found.values()),
            seconds=time.perf_counter() - self._began,
            steps=engine.progress.steps + self._late_steps,
            fragments_bytes=engine.fragments_bytes,
            warnings=tuple(self._warnings),
        )

    def _warn_of_ks(self, planned: Collection[int]) -> None:
        """Warn of values of k that were not profiled: interpolated ones, and ones that are left out."""
        others = [k for k in self._engine.space.accumulation_choices if k not in self._ks]
        between = [k for k in others if k in planned]
        outside = [k for k in others if k not in planned]
        if between:
            ends = ", ".join(map(str, self._ks))
            self._warnings.append(f"k = {', '.join(map(str, between))} is interpolated from k = {ends}")
        if outside:
            self._warnings.append(f"k = {', '.join(map(str, outside))} could not be interpolated, and is left out")

    def _tell_compilations(self) -> None:
        now, then = compilations(), self._compiled
        if now != then:
            versions, seconds = now.versions - then.versions, now.seconds - then.seconds
            self._warnings.append(f"compiling took {seconds:.0f} s for {versions} versions of units, in no step's time")

    # Traces and times of homogeneous plans.

    def _warm_up(self) -> None:
        """Run a first step to create the optimizer's state; if memory runs out, under the leanest plan.

        Raises:
            JobError: if neither can run.
        """
        failure, detail = Failure.OUT_OF_MEMORY, _NO_ROOM
        for plan in (self._engine.space.baseline(), self._engine.space.leanest()):
            if not self._engine.may_try(f"the first step, {plan}"):
                continue
            window = self._note_given(plan)
            if window.failure is None:
                return
            failure, detail = window.failure, window.failure_detail
            if failure is not Failure.OUT_OF_MEMORY:
                break
        raise JobError(f"the first step ends with {failure}: {detail}", where="job")

    def _note_given(self, plan: Plan) -> Measurement:
        """Run a step under a plan of one precision, and note what operations with weights are given in it."""
        engine = self._engine
        engine.apply(plan)
        names = [] if engine.world > 1 else [unit.name for unit in engine.space.units]
        with GivenBytes(engine.model, names) as given:
            window = engine.run(1)
        pieces = plan.accumulation_steps if engine.space.k_splits else 1
        for name, size in given.found.items():
            self._given.setdefault(name, {})[plan.precision_of(name)] = size * pieces
        return window

    def _note_all_given(self) -> None:
        """Do the same in other precisions than the first, for which the first step has told it."""
        space = self._engine.space
        for precision in space.precisions[1:] if self._engine.world == 1 else ():
            self._note_given(space.plan(accumulation_steps=self._ks[-1], precision=precision, storage=Storage.SAVE))

    def _judge_choices(self) -> None:
        """Tell which units are left uncompiled, leave out what compiles none, and judge approximate choices."""
        for storage in [one for one in self._engine.space.storages if one in COMPILED_STORAGES]:
            self._judge_compiled(storage)
        space = self._engine.space
        # Compiled storages, too: rounding aside, they should do what saving does.
        inexact = [*space.approximate, *(one for one in space.storages if one in COMPILED_STORAGES)]
        self._engine.space = space.locking(self._judge_errors(self._engine, inexact))

    def _judge_errors(
        self, engine: WatchedEngine, choices: Collection[Precision | Storage], when: str = ""
    ) -> dict[str, list[str]]:
        """Tell how far choices put the gradient off, and return those that put it too far off, by unit."""
        locks: dict[str, list[str]] = {}
        try:
            findings = find_errors(engine, self._job, self._options.seed, choices)
        except UnjudgedError as error:
            listed = ", ".join(map(str, choices))
            self._warnings.append(f"{when}how far {listed} put the gradient off is not known: {error}")
            return locks
        # Ranks must profile the same choices.
        for found in engine.decided(findings):
            others = any(found.choice in locked for locked in engine.space.locked.values())
            self._warnings += [when + told for told in _told(found, "all other units" if others else "all units")]
            for name in found.locks:
                locks.setdefault(name, []).append(str(found.choice))
        return locks

    def _judge_late(self, result: Profile) -> Profile:
        """Judge approximate choices again after the job has trained on its own batches, for the rest of the profile.

        The profile's own steps all train on one batch, with which the gradient soon loses its usual size.
        """
        space, steps = self._engine.decided(result.space), self._options.late_steps
        if not space.approximate or not steps:
            return result
        engine = self._make_engine(self._job)
        try:
            engine.space = space
            engine.apply(space.leanest().changed(precision=space.baseline().precision))
            window = engine.run(steps)
            self._late_steps = engine.progress.steps
            if window.failure is not None:
                self._warnings.append(f"gradients were measured early alone: training ends with {window.failure}")
                return result
            late = self._judge_errors(engine, space.approximate, f"after {steps} steps of training, ")
            return result.locking(late)
        finally:
            engine.close()

    def _judge_compiled(self, storage: Storage) -> None:
        engine, reasons = self._engine, uncompiled(self._engine, storage)
        # Ranks must profile the same storages.
        if engine.decided(len(reasons) == len(engine.space.recomputable)):
            engine.leave_out_storage(storage)
            self._warnings.append(f"{storage} suits no unit, so no plan may use it: {next(iter(reasons.values()), '')}")
            return
        for reason in dict.fromkeys(reasons.values()):
            names = ", ".join(name for name, own in reasons.items() if own == reason)
            self._warnings.append(f"{storage} leaves {names} uncompiled, which then save: {reason}")

    def _observe(self) -> dict[PlanName, PlanSteps]:
        """Trace and time the homogeneous plans; leave out units whose calls vary between steps, with a warning."""
        while True:
            try:
                return self._observe_steady()
            except _UnsteadyCallsError as unsteady:
                self._engine.leave_out(unsteady.names)
                self._calls = None
                listed = ", ".join(unsteady.names)
                self._warnings.append(f"called differently from step to step, so left as they are: {listed}")

    def _observe_steady(self) -> dict[PlanName, PlanSteps]:
        for _ in range(self._options.call_checks):
            self._require_steady_calls(self._engine.timed()[2])
        traced = self._trace_all()
        found = {name: traced[name] for name in self._engine.decided([*without_copies(traced)])}
        self._report(0.25)
        self._time(found)
        if self._options.is_lean and not devices.is_accelerator(self._engine.device):
            # An accelerator's times are corrected by whole steps.
            found = self._time_again(found)
        self._engine.apply(self._engine.space.baseline())
        return found

    def _trace_all(self) -> dict[PlanName, PlanSteps]:
        """Trace the plans of all k; if a plan runs out of memory at a k, trace those of the next larger k as well."""
        found: dict[PlanName, PlanSteps] = {}
        waiting, choices = list(self._ks), list(self._engine.space.accumulation_choices)
        while waiting:
            k = waiting.pop(0)
            refused = self._trace(k, found)
            following = choices[choices.index(k) + 1 :][:1]
            if refused and k != self._ks[-1] and following[0] not in waiting:
                waiting.insert(0, following[0])
        return found

    def _trace(self, k: int, found: dict[PlanName, PlanSteps]) -> bool:
        """Trace one step of every homogeneous plan of one k, except those that run out of memory or are unsupported.

        Args:
            k: the k.
            found: the steps traced so far; the new ones are added.

        Returns:
            Whether a plan ran out of memory.
        """
        refused = False
        first: TracedStep | None = None
        for name, plan in homogeneous_plans(self._engine.space, [k]).items():
            if self._engine.decided(is_copy(name, found)):
                continue
            if not self._engine.may_try(str(name)):
                self._refuse(name, Failure.OUT_OF_MEMORY, _NO_ROOM)
                refused = True
                continue
            self._engine.apply_with(plan, fp32_borders=not name.passes_16_bit)
            window, tracer = self._engine.traced()
            if window.failure is not None or tracer.trace is None:
                self._refuse(name, window.failure, window.failure_detail)
                refused = refused or window.failure is Failure.OUT_OF_MEMORY
                continue
            self._require_steady_calls(tracer.trace.calls)
            traced = self._read(plan, tracer.trace, first)
            first = first or traced
            found[name] = PlanSteps(traced)
            if self._options.is_lean and not self._engine.decided(is_copy(name, found)):
                found[name].visits.append(Visit(steps=[self._time_step()]))
        return refused

    def _read(self, plan: Plan, trace: StepTrace, first: TracedStep | None) -> TracedStep:
        gradients = None if first is None else first.attribution.gradients
        return TracedStep(
            plan=plan,
            calls=trace.calls,
            attribution=attribute(trace, recomputed_units(plan), gradients, silent_units(plan)),
            batch_bytes=self._engine.batch_bytes,
            traced_bytes=self._engine.batch_bytes,
        )

    def _refuse(self, name: PlanName, failure: Failure | None, detail: str) -> None:
        k, choice = name.accumulation_steps, name.choice
        self._warnings.append(f"k = {k} with {choice} ends with {failure}: {detail}")
        if failure not in (Failure.OUT_OF_MEMORY, Failure.UNSUPPORTED):
            raise JobError(f"profiling {choice} at k = {k} ends with {failure}", where=f"job {self._job.name!r}")

    def _time(self, found: Mapping[PlanName, PlanSteps]) -> None:
        """Time the homogeneous plans piece by piece, in rounds of alternating direction."""
        began = time.perf_counter()
        share = 0.75 * self._options.seconds
        for number in range(self._options.max_rounds):
            order = list(found.items())
            for name, steps in order if number % 2 == 0 else reversed(order):
                self._visit(name, steps)
            spent = self._engine.decided(time.perf_counter() - began)
            self._report(0.25 + 0.5 * min(spent / share, 1.0))
            if number + 1 >= _MIN_ROUNDS and spent * (number + 2) / (number + 1) > share:
                break

    def _time_again(self, found: Mapping[PlanName, PlanSteps]) -> dict[PlanName, PlanSteps]:
        """Return one timed step of each plan of a lean profile; time again if times that should agree do not.

        If another process slowed only some steps, the fastest step of each plan counts. If it is still running, it
        slows all later steps, so the latest steps may agree better with each other.
        """
        fastest = {name: steps.only(steps.fastest) for name, steps in found.items()}
        if self._disagreement(fastest) <= _AGREEMENT:
            return fastest
        for name, steps in reversed(list(found.items())):
            self._apply(name, steps)
            self._watched_step()
            steps.visits.append(Visit(steps=[self._time_step()]))
        fastest = {name: steps.only(steps.fastest) for name, steps in found.items()}
        latest = {name: steps.only(steps.timed[-1]) for name, steps in found.items()}
        best = min(fastest, latest, key=self._disagreement)
        if (still := self._disagreement(best)) > _AGREEMENT:
            self._warnings.append(f"times that should agree differ by a factor of {still:.1f}: profile it again")
        return best

    def _disagreement(self, found: Mapping[PlanName, PlanSteps]) -> float:
        return self._engine.decided(disagreement(found, self._engine.space.recomputable))

    def _apply(self, name: PlanName, steps: PlanSteps) -> None:
        self._engine.may_try(str(name))
        self._engine.apply_with(steps.traced.plan, fp32_borders=not name.passes_16_bit)

    def _visit(self, name: PlanName, steps: PlanSteps) -> None:
        self._apply(name, steps)
        first_s = self._watched_step()[0]
        steps.visits.append(Visit(first_s=first_s, steps=[self._time_step() for _ in range(_VISIT_STEPS - 1)]))

    def _time_step(self) -> WatchedStep:
        """Time one step of the current plan."""
        total_s, seconds = self._watched_step()
        return WatchedStep(total_s, {**seconds, UPDATE: rest_of(total_s, seconds)})

    def _watched_step(self) -> tuple[float, dict[tuple[Phase, int], float]]:
        window, seconds, calls = self._engine.timed()
        if window.failure is not None:
            raise JobError(f"a timed step ends with {window.failure}: {window.failure_detail}", where="job")
        self._require_steady_calls(calls)
        return window.step_s[0], seconds

    def _require_steady_calls(self, calls: tuple[str, ...]) -> None:
        if calls and self._calls is None:
            self._calls = calls
        # All ranks must leave out a unit whose calls vary on any of them.
        differing = self._engine.united(_differing(calls, self._calls or ()) if calls else ())
        if differing:
            raise _UnsteadyCallsError(differing)

    # Whole plans.

    def _corrected(self, result: Profile) -> Profile:
        """Scale times to those of whole steps, at interpolated k as well; only an accelerator's need it."""
        if not devices.is_accelerator(self._engine.device):
            return result
        space = self._engine.decided(result.space)
        plans = homogeneous_plans(space, space.accumulation_choices)
        timed = [(plan, self._whole_steps(plan)) for name, plan in plans.items() if not name.passes_16_bit]
        return corrected(result, {plan: statistics.median(values) for plan, values in timed if values})

    def _whole_steps(self, plan: Plan) -> list[float]:
        """Return the seconds of whole steps of a plan, more of them if they are short."""
        seconds = self._time_plan(plan, _WHOLE_STEPS)
        if self._engine.decided(0.0 < sum(seconds) < _SHORT_S):
            window = self._engine.run(_FURTHER_STEPS)
            seconds += [] if window.failure is not None else window.step_s
        return seconds

    def _calibrate(self, result: Profile) -> Profile:
        """Measure whole plans, interleaved, and fit the time model to them."""
        space, generator = self._engine.decided(result.space), np.random.default_rng(self._options.seed)
        plans = [calibration_plan(space, generator, number) for number in range(self._options.calibration_plans)]
        seconds: dict[Plan, list[float]] = {plan: [] for plan in plans}
        for visit in range(_CALIBRATION_VISITS):
            for plan in plans if visit % 2 == 0 else reversed(plans):
                seconds[plan] += self._time_plan(plan)
        self._report(0.95)
        measured = [
            (plan, statistics.median(values))
            for plan, values in seconds.items()
            if values and plan.accumulation_steps in result.accumulation_choices
        ]
        return calibrated(result, measured)

    def _time_plan(self, plan: Plan, steps: int = _VISIT_STEPS) -> list[float]:
        """Return the seconds of the steps of one visit to a plan, without the warm-up step."""
        if not self._engine.may_try(str(plan.to_json())):
            return []
        self._engine.apply(plan)
        window = self._engine.run(steps)
        return [] if window.failure is not None else list(window.step_s[1:])


def _told(found: Finding, units: str) -> list[str]:
    """Return what is told of a choice: its error in some units, as named, and the units for which it is locked."""
    if found.problem:
        return [f"a step with {found.choice} in {units} raised {found.problem}, so no plan may use it"]
    told = f"{found.choice} in {units} puts the gradient of a step off by {as_share(found.whole.relative)}"
    if found.worst.unit != WHOLE:
        told += f", and that of {found.worst.unit} by {found.worst}"
    if found.is_useless:
        return [f"{told}, so no plan may use it"]
    return [
        told,
        *(
            f"{found.choice} is locked in {name}: there alone, it puts the gradient of {error.unit or 'the step'} off "
            f"by {error}, above the limit of {error.limit:.0%}"
            for name, error in found.locked.items()
        ),
    ]


def _differing(calls: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the units that two steps call differently."""
    if calls == known:
        return ()
    counts = {name: (calls.count(name), known.count(name)) for name in (*calls, *known)}
    # If only the order differs, none of the units has a fixed place.
    return tuple(name for name, (now, before) in counts.items() if now != before) or tuple(counts)


def calibration_plan(space: PlanSpace, generator: np.random.Generator, number: int) -> Plan:
    """Return a random plan; every fourth uses the lowest precision for all units, as the best plans often do.

    Args:
        space: the plans that are allowed.
        generator: random generator.
        number: index of the plan among those that are drawn.
    """
    plan = space.sample(generator)
    if number % 4 == 3:
        return plan.changed(precision={unit.name: space.lowest_precision for unit in space.units})
    return plan


def _noise(found: Iterable[PlanSteps]) -> float:
    """Return the median relative difference between consecutive visits to the same plan."""
    differences = [
        abs(statistics.median(first) - statistics.median(second)) / statistics.median([*first, *second])
        for steps in found
        for first, second in itertools.pairwise(visit.totals for visit in steps.visits)
    ]
    return statistics.median(differences) if differences else 0.0


def _switch_seconds(found: Iterable[PlanSteps]) -> float:
    """Return how many seconds longer the first step of a visit takes than the median of the others."""
    longer = [
        visit.first_s - statistics.median(visit.totals)
        for steps in found
        for visit in steps.visits
        if visit.first_s is not None
    ]
    return max(0.0, statistics.median(longer)) if longer else 0.0
