"""Profile a job: trace and time real steps of homogeneous plans until the cost of every piece is known.

For each k, precision and storage one step is traced for memory, and a few are timed piece by piece, interleaved; a few
whole plans then correct the sum of the pieces.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from autotune.cost_model.profile import (
    PROFILE_VERSION,
    Calibration,
    Profile,
)
from autotune.cost_model.time_model import calibrated
from autotune.engines.job_checks import ask, build_model, build_optimizer
from autotune.engines.torch_engine import EngineOptions
from autotune.errors import JobError
from autotune.job import Job
from autotune.measurement import Failure
from autotune.mechanics import devices
from autotune.mechanics.memory_meter import tensor_bytes
from autotune.mechanics.randomness import isolated, seed_all
from autotune.mechanics.step_trace import Phase, rest_of
from autotune.mechanics.trees import map_tensors, tensors
from autotune.plan import Plan, PlanSpace
from autotune.profiling.attribution import attribute
from autotune.profiling.profile_assembly import (
    Choice,
    Probe,
    all_tables,
    homogeneous_plans,
    is_copy,
    known,
    share_seconds,
    unlikeness,
    without_copies,
)
from autotune.profiling.tracing_engine import WatchedEngine

logger = logging.getLogger(__name__)

# Batches looked at to find the one to profile with; of ragged ones the largest.
_CANDIDATES = 8
# Steps of one visit to a plan: the first warms up.
_VISIT_STEPS = 3
# The factor between times that should agree above which a lean profile is timed once more. On a quiet machine it was at
# most 1.16; while tests ran beside it, 1.99.
_ALIKE = 1.3
_NO_ROOM = "a rank has no room for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerOptions:
    """How much a profile may cost.

    Attributes:
        seconds: about how long profiling may take, once the least number of rounds of timing is made.
        min_rounds: rounds of timing that are made however long they take.
        max_rounds: rounds of timing.
        call_checks: steps that are watched first, for units that are called only sometimes.
        calibration_plans: whole plans that correct the sum of the pieces.
        calibration_visits: how often each of them is visited.
        max_tables: values of k that are profiled; of more choices the smallest, the largest and some between.
        seed: of weights, batches and calibration plans.
        is_lean: whether each plan is timed in one step alone, the one after its trace (again where times that should
            agree do not), and units that are alike share what was seen of them; the profile is kept apart from full
            ones.
    """

    seconds: float = 50.0
    min_rounds: int = 2
    max_rounds: int = 5
    call_checks: int = 4
    calibration_plans: int = 8
    calibration_visits: int = 2
    max_tables: int = 4
    seed: int = 0
    is_lean: bool = False

    @classmethod
    def lean(cls, seed: int = 0) -> ProfilerOptions:
        """Return the options of a profile in a tenth of the steps: each plan once, at the smallest and largest k."""
        return cls(
            min_rounds=0,
            max_rounds=0,
            call_checks=0,
            calibration_plans=0,
            calibration_visits=0,
            max_tables=2,
            seed=seed,
            is_lean=True,
        )


def fixed_shape(job: Job, seed: int = 0) -> Job:
    """Return the job with one batch for ever, copied for every step: the largest of its first few.

    Raises:
        JobError: if it has none, or they cannot be had.
    """
    batch = max(_first_batches(job, seed), key=lambda item: tensor_bytes(tensors(item)))
    return replace(job, batches=lambda _seed: (map_tensors(torch.clone, batch) for _ in itertools.count()))


def length_spread(job: Job, seed: int = 0) -> float:
    """Return the standard deviation of the logarithm of the bytes of a job's first few batches."""
    sizes = [tensor_bytes(tensors(batch)) for batch in _first_batches(job, seed)]
    return statistics.pstdev(math.log(max(size, 1)) for size in sizes)


def _first_batches(job: Job, seed: int) -> list[Any]:
    found = ask(job, "batches", lambda: list(itertools.islice(job.batches(seed), _CANDIDATES)))
    if not found:
        raise JobError("batches yields nothing", where=f"job {job.name!r}", allowed="at least one batch")
    return found


def profile_key(job: Job, device_name: str) -> str:
    """Return a SHA-256 of everything that a profile depends on, without running the job.

    Args:
        job: the job; its model is built and its first batch drawn.
        device_name: what the device is called.
    """
    with isolated():
        seed_all(0)
        model = build_model(job)
        batch = ask(job, "batches", lambda: next(iter(job.batches(0)), None))
        optimizer = build_optimizer(job, model)
    facts = {
        "job": job.name,
        "model": [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()],
        "modules": [[name, f"{type(module).__module__}.{type(module).__qualname__}"] for name, module in _named(model)],
        "batch": [[list(tensor.shape), str(tensor.dtype)] for tensor in tensors(batch)],
        "optimizer": type(optimizer).__qualname__,
        "batching": [job.batching, job.batch_size, list(job.accumulation_choices)],
        "units": None if job.units is None else list(job.units),
        "device": device_name,
        "threads": torch.get_num_threads(),
        "versions": [torch.__version__, PROFILE_VERSION],
        # The device's name does not tell where the job trains, nor how.
        **devices.settings(devices.device_kind()),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules())


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
        device_name: what the device is called in the profile.
        fingerprint: what :func:`profile_key` returned; left out, it is computed.
        device: where it runs; ``None`` for where jobs train on this machine.
        options: how much it may cost.
        on_progress: is told of the share that is done.
        make_engine: makes what trains the job. Where several ranks do, each of them calls this function, and gets a
            profile of its own share, its static bytes raised by what its peaks lie below the highest rank's.

    Raises:
        JobError: if the baseline cannot run.
    """
    profiler = _Profiler(job, device_name, device, options or ProfilerOptions(), on_progress, make_engine)
    return profiler.profile(fingerprint or profile_key(job, device_name))


class _UnsteadyCalls(Exception):  # noqa: N818 - not an error: profiling begins anew without these units
    """Return the units that are not called in every step."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(", ".join(names))
        self.names = names


class _Profiler:
    """Profile one job."""

    def __init__(
        self,
        job: Job,
        device_name: str,
        device: str | None,
        options: ProfilerOptions,
        on_progress: Callable[[float], None] | None,
        make_engine: Callable[..., WatchedEngine],
    ) -> None:
        self._began = time.perf_counter()
        self._job = job
        self._device_name = device_name
        self._options = options
        self._on_progress = on_progress
        self._warnings: list[str] = []
        # The units that every step calls, in order, once a step was seen.
        self._calls: tuple[str, ...] | None = None
        with isolated():
            seed_all(options.seed)
            steady = fixed_shape(job, options.seed)
            self._length_spread = length_spread(job, options.seed)
        self.engine = make_engine(
            steady,
            seed=options.seed,
            device=device,
            options=EngineOptions(discard_steps=0, statistics_every=None, meter_memory=False),
        )
        space = self.engine.space
        self._ks = spread_choices(space.accumulation_choices, options.max_tables)

    def profile(self, fingerprint: str) -> Profile:
        engine = self.engine
        self._warm_up()
        choices = self._observe()
        if not choices:
            raise JobError("no plan could be profiled", where=f"job {self._job.name!r}", allowed=self._warnings)
        if self._options.is_lean:
            share_seconds(choices, engine.space)
        tables, uniform_tables = all_tables(choices, engine.samples_here(), engine.space)
        self._warn_of_ks([table.accumulation_steps for table in tables])
        result = Profile(
            job=self._job.name,
            device=self._device_name,
            fingerprint=fingerprint,
            batching=self._job.batching,
            batch_size=self._job.batch_size,
            units=engine.space.units,
            accumulation_choices=tuple(table.accumulation_steps for table in tables),
            precisions=engine.space.precisions,
            static_bytes=engine.static_bytes,
            tables=tables,
            uniform_tables=uniform_tables,
            calibration=Calibration(),
            noise_frac=_noise([choice.totals for choice in choices.values()]),
            switch_s=max(0.0, statistics.median(_switches(choices.values()))),
            seconds=0.0,
            steps=0,
            length_spread=self._length_spread,
            fragments_bytes=engine.fragments_bytes,
            warnings=tuple(self._warnings),
        )
        result = self._calibrate(result)
        engine.close()
        self._report(1.0)
        return replace(result, seconds=time.perf_counter() - self._began, steps=engine.progress.steps)

    def _warn_of_ks(self, planned: Sequence[int]) -> None:
        """Report which k were not profiled but lie between some that were, and which are left out."""
        others = [k for k in self.engine.space.accumulation_choices if k not in self._ks]
        between = [k for k in others if k in planned]
        outside = [k for k in others if k not in planned]
        if between:
            ends = ", ".join(map(str, self._ks))
            self._warnings.append(f"k = {', '.join(map(str, between))} is interpolated from k = {ends}")
        if outside:
            self._warnings.append(f"k = {', '.join(map(str, outside))} could not be interpolated, and is left out")

    def _warm_up(self) -> None:
        """Run a step, which creates the optimizer's state; where the baseline has no room, of the leanest plan."""
        failure, detail = Failure.OUT_OF_MEMORY, _NO_ROOM
        for plan in (self.engine.space.baseline(), self.engine.space.leanest()):
            if not self.engine.may_try(f"the first step, {plan}"):
                continue
            self.engine.apply(plan)
            window = self.engine.run(1)
            if window.failure is None:
                return
            failure, detail = window.failure, window.failure_detail
            if failure is not Failure.OUT_OF_MEMORY:
                break
        raise JobError(f"the first step ends with {failure}: {detail}", where="job")

    def _observe(self) -> dict[Probe, Choice]:
        """Trace and time the homogeneous plans; units that are called only sometimes are left out, with a warning."""
        while True:
            try:
                for _ in range(self._options.call_checks):
                    self._require_steady_calls(self.engine.timed()[2])
                traced = self._trace_all()
                choices = {probe: traced[probe] for probe in self.engine.decided([*without_copies(traced)])}
                self._report(0.25)
                self._time(choices)
                if self._options.is_lean:
                    choices = self._time_again(choices)
                self.engine.apply(self.engine.space.baseline())
            except _UnsteadyCalls as unsteady:
                self.engine.leave_out(unsteady.names)
                self._calls = None
                listed = ", ".join(unsteady.names)
                self._warnings.append(f"called differently from step to step, so left as they are: {listed}")
            else:
                return choices

    def _trace_all(self) -> dict[Probe, Choice]:
        """Trace the plans of all k; where a plan has no room at the smallest, of the next one as well."""
        choices: dict[Probe, Choice] = {}
        waiting, among = list(self._ks), list(self.engine.space.accumulation_choices)
        while waiting:
            k = waiting.pop(0)
            refused = self._trace(k, choices)
            following = among[among.index(k) + 1 :][:1]
            if refused and k != self._ks[-1] and following[0] not in waiting:
                waiting.insert(0, following[0])
        return choices

    def _trace(self, k: int, choices: dict[Probe, Choice]) -> bool:
        """Trace one step of every homogeneous plan of one k; leave out those that fail, and tell if one had no room."""
        refused = False
        first: Choice | None = None
        for probe, plan in homogeneous_plans(self.engine.space, [k]).items():
            if self.engine.decided(is_copy(probe, choices)):
                continue
            if not self.engine.may_try(str(probe)):
                self._refuse(probe, Failure.OUT_OF_MEMORY, _NO_ROOM)
                refused = True
                continue
            self.engine.apply_with(plan, fp32_borders=not probe.passes_16_bit)
            window, tracer = self.engine.traced()
            if window.failure is not None or tracer.trace is None:
                self._refuse(probe, window.failure, window.failure_detail)
                refused = refused or window.failure is Failure.OUT_OF_MEMORY
                continue
            recomputed = list(plan.recomputed)
            self._require_steady_calls(tracer.trace.calls)
            seen = attribute(tracer.trace, recomputed, None if first is None else known(first).gradients)
            choices[probe] = Choice(plan, seen, tracer.trace.calls, self.engine.batch_bytes)
            first = first or choices[probe]
            if self._options.is_lean and not self.engine.decided(is_copy(probe, choices)):
                choices[probe].totals.append([self._time_step(choices[probe])])
        return refused

    def _refuse(self, probe: Probe, failure: Failure | None, detail: str) -> None:
        k, name = probe.accumulation_steps, probe.choice
        self._warnings.append(f"k = {k} with {name} ends with {failure}: {detail}")
        if failure not in (Failure.OUT_OF_MEMORY, Failure.UNSUPPORTED):
            raise JobError(f"profiling {name} at k = {k} ends with {failure}", where=f"job {self._job.name!r}")

    def _time(self, choices: Mapping[Probe, Choice]) -> None:
        """Time the homogeneous plans piece by piece, in rounds of alternating direction."""
        began = time.perf_counter()
        share = 0.75 * self._options.seconds
        for number in range(self._options.max_rounds):
            order = list(choices.items())
            for probe, choice in order if number % 2 == 0 else reversed(order):
                self._visit(probe, choice)
            spent = self.engine.decided(time.perf_counter() - began)
            self._report(0.25 + 0.5 * min(spent / share, 1.0))
            if number + 1 >= self._options.min_rounds and spent * (number + 2) / (number + 1) > share:
                break

    def _time_again(self, choices: Mapping[Probe, Choice]) -> dict[Probe, Choice]:
        """Return what was timed of each plan of a lean profile; once more, if times that should agree do not.

        What else ran here for some of the steps only added to them, so that the faster step counts; what still runs
        adds to all the later ones, which then agree better.
        """
        fastest = {probe: choice.only(choice.fastest) for probe, choice in choices.items()}
        if self._unlikeness(fastest) <= _ALIKE:
            return fastest
        for probe, choice in reversed(list(choices.items())):
            self._put_under(probe, choice)
            self._watched_step()
            choice.totals.append([self._time_step(choice)])
        fastest = {probe: choice.only(choice.fastest) for probe, choice in choices.items()}
        latest = {probe: choice.only(-1) for probe, choice in choices.items()}
        found = min(fastest, latest, key=self._unlikeness)
        if (still := self._unlikeness(found)) > _ALIKE:
            self._warnings.append(f"times that should agree differ by a factor of {still:.1f}: profile it again")
        return found

    def _unlikeness(self, choices: Mapping[Probe, Choice]) -> float:
        return self.engine.decided(unlikeness(choices, self.engine.space.recomputable))

    def _put_under(self, probe: Probe, choice: Choice) -> None:
        self.engine.may_try(str(probe))
        self.engine.apply_with(choice.plan, fp32_borders=not probe.passes_16_bit)

    def _visit(self, probe: Probe, choice: Choice) -> None:
        self._put_under(probe, choice)
        choice.first_s.append(self._watched_step()[0])
        choice.totals.append([self._time_step(choice) for _ in range(_VISIT_STEPS - 1)])

    def _time_step(self, choice: Choice) -> float:
        """Time one more step of the choice that is applied, and return its seconds."""
        total, seconds = self._watched_step()
        seconds[("update", -1)] = rest_of(total, seconds)
        choice.seconds.append(seconds)
        return total

    def _watched_step(self) -> tuple[float, dict[tuple[Phase, int], float]]:
        window, seconds, calls = self.engine.timed()
        if window.failure is not None:
            raise JobError(f"a timed step ends with {window.failure}: {window.failure_detail}", where="job")
        self._require_steady_calls(calls)
        return window.step_s[0], seconds

    def _require_steady_calls(self, calls: tuple[str, ...]) -> None:
        if calls and self._calls is None:
            self._calls = calls
        # What one rank sees, all must leave out.
        differing = self.engine.united(_differing(calls, self._calls or ()) if calls else ())
        if differing:
            raise _UnsteadyCalls(differing)

    def _calibrate(self, result: Profile) -> Profile:
        """Measure whole plans, interleaved, and fit the time model to them."""
        space, generator = self.engine.decided(result.space), np.random.default_rng(self._options.seed)
        plans = [calibration_plan(space, generator, number) for number in range(self._options.calibration_plans)]
        seconds: dict[Plan, list[float]] = {plan: [] for plan in plans}
        for visit in range(self._options.calibration_visits):
            for plan in plans if visit % 2 == 0 else reversed(plans):
                seconds[plan] += self.time_plan(plan)
        self._report(0.95)
        measured = [
            (plan, statistics.median(values))
            for plan, values in seconds.items()
            if values and plan.accumulation_steps in result.accumulation_choices
        ]
        return calibrated(result, measured)

    def time_plan(self, plan: Plan) -> list[float]:
        """Return the seconds of the steps of one visit to a plan, without the first."""
        if not self.engine.may_try(str(plan.to_json())):
            return []
        self.engine.apply(plan)
        window = self.engine.run(_VISIT_STEPS)
        return [] if window.failure is not None else list(window.step_s[1:])

    def _report(self, share: float) -> None:
        if self._on_progress is not None:
            self._on_progress(share)


def _differing(calls: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the units that one step calls otherwise than another."""
    if calls == known:
        return ()
    counts = {name: (calls.count(name), known.count(name)) for name in (*calls, *known)}
    # Called as often, but in another order: none of them has a place of its own.
    return tuple(name for name, (now, before) in counts.items() if now != before) or tuple(counts)


def calibration_plan(space: PlanSpace, generator: np.random.Generator, number: int) -> Plan:
    """Return a random plan; every fourth uses the lowest precision for all units, as the best plans often do."""
    plan = space.sample(generator)
    if number % 4 == 3:
        return plan.changed(precision={unit.name: space.lowest_precision for unit in space.units})
    return plan


def spread_choices(choices: Sequence[int], count: int) -> tuple[int, ...]:
    """Return up to so many of the choices, the smallest and the largest among them."""
    if len(choices) <= count:
        return tuple(choices)
    indices = np.linspace(0, len(choices) - 1, count).round().astype(int)
    return tuple(choices[index] for index in dict.fromkeys(indices.tolist()))


def _noise(visits: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the median relative difference between two visits to the same plan."""
    differences = [
        abs(statistics.median(first) - statistics.median(second)) / statistics.median([*first, *second])
        for plan in visits
        for first, second in itertools.pairwise(plan)
    ]
    return statistics.median(differences) if differences else 0.0


def _switches(choices: Any) -> list[float]:
    """Return by how much each visit's first step was longer than the others' median."""
    return [
        first - statistics.median(others)
        for choice in choices
        for first, others in zip(choice.first_s, choice.totals, strict=False)
    ] or [0.0]
