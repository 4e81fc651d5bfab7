"""Estimate a profile for a device that this machine does not have, from the job's own step on fake tensors.

The step is neither allocated nor computed. Memory follows from the lifetimes of what its operators would allocate, as
the device's allocator counts it, and time from the device's published rates. The profile is marked as estimated.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from autotune import knobs
from autotune.choices import COMPILED_STORAGES, REDUCED_PRECISIONS
from autotune.cost_model.device_table import DeviceSpec
from autotune.cost_model.measured_rates import Work
from autotune.cost_model.profile import Profile
from autotune.engines.job_checks import accumulation_choices, ask, build_model, build_optimizer
from autotune.errors import InputError, JobError
from autotune.job import Job
from autotune.mechanics import controls, devices
from autotune.mechanics.cutting import Cutting
from autotune.mechanics.memory_meter import dense_parts, resident_tensors
from autotune.mechanics.randomness import isolated, seed_all
from autotune.mechanics.releasing import released
from autotune.mechanics.step_trace import Phase
from autotune.mechanics.storage_acts import offered
from autotune.mechanics.trees import map_tensors, tensors
from autotune.plan import Plan, PlanSpace, Precision
from autotune.profiling.attribution import attribute
from autotune.profiling.fake_trace import FakeTracer, fake_8_bit_states, fake_conversions, fused_attention
from autotune.profiling.homogeneous_plans import (
    UPDATE,
    PlanName,
    PlanSteps,
    Visit,
    WatchedStep,
    homogeneous_plans,
    spread_choices,
    steps_by_k,
    without_copies,
)
from autotune.profiling.job_shape import fixed_shape, length_spread
from autotune.profiling.operator_kinds import kind_of
from autotune.profiling.profile_assembly import assemble
from autotune.profiling.step_record import StepRecord, TracedStep, recomputed_units, silent_units
from autotune.units import Unit, units_of

_MAX_TABLES = 4
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_NO_COPIES = "estimates do not know how fast a device copies to the host"
_PRECISION_OF = {precision.dtype: precision for precision in REDUCED_PRECISIONS if precision.is_16_bit}


def estimate(job: Job, device: DeviceSpec, *, on_progress: Callable[[float], None] | None = None) -> Profile:
    """Return an estimated profile of a job on a device.

    Args:
        job: the job; its batches are real, but its model is built from fake tensors only.
        device: the device's published figures.
        on_progress: called with the share that is done.

    Raises:
        InputError: if the job sets whether fp32 is computed in TF32, which the device does not have.
        JobError: if the step depends on the values of tensors, which fake tensors do not have.
    """
    if job.launch.fp32 is not None and device.tf32 is None:
        raise InputError(
            f"+{job.launch.fp32} chooses whether fp32 is computed in TF32, which {device.name} cannot do",
            where=f"job {job.name!r}",
            allowed="a device with TF32, or a job without this setting",
        )
    began = time.perf_counter()
    with isolated():
        seed_all(0)
        batch = next(iter(ask(job, "batches", lambda: fixed_shape(job).batches(0))))
        spread = length_spread(job)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with devices.fp32_computed_in(job.launch.fp32), isolated(), mode, fake_conversions(), fake_8_bit_states():
            run = _FakeRun(job, device, map_tensors(mode.from_tensor, batch))
            record = StepRecord(
                job=job.name,
                device=device.name,
                batch_size=job.batch_size,
                static_bytes=run.static_bytes(),
                steps=steps_by_k(without_copies(_traced(run, on_progress or (lambda _share: None)))),
                length_spread=spread,
            )
    except (*_NEEDS_VALUES, JobError) as error:
        cause = error if isinstance(error, _NEEDS_VALUES) else error.__cause__
        if not isinstance(cause, _NEEDS_VALUES):
            raise
        raise JobError(
            f"the step depends on values ({cause}), which an estimate does not have",
            where=f"job {job.name!r}",
            allowed="autotune profile on the device itself",
        ) from error
    figures = "published figures" if device.measured is None else "measured rates"
    return replace(
        assemble(record, run.space),
        seconds=time.perf_counter() - began,
        steps=0,
        warnings=(
            f"estimated from {figures} ({device.source}); no step was measured",
            *(f"{one} cannot be estimated, only profiled" for one in offered(job.storages) if one in COMPILED_STORAGES),
        ),
        estimated=True,
    )


def _traced(run: _FakeRun, report: Callable[[float], None]) -> dict[PlanName, PlanSteps]:
    """Return the steps of all homogeneous plans."""
    plans = homogeneous_plans(run.space, spread_choices(run.space.accumulation_choices, _MAX_TABLES))
    found: dict[PlanName, PlanSteps] = {}
    gradients: dict[int, Sequence[int]] = {}
    for number, (name, plan) in enumerate(plans.items(), 1):
        found[name] = run.trace(plan, gradients.get(name.accumulation_steps), fp32_borders=not name.passes_16_bit)
        gradients.setdefault(name.accumulation_steps, found[name].traced.attribution.gradients)
        report(number / len(plans))
    return found


class _FakeRun:
    """Training of a job on fake tensors, created and used in fake tensor mode.

    Attributes:
        space: the plans that the job allows on the device.

    Args:
        job: the job.
        device: the device.
        batch: a batch of the job, as fake tensors.
    """

    def __init__(self, job: Job, device: DeviceSpec, batch: Any) -> None:
        self._job, self._device, self._batch = job, device, batch
        self._model = build_model(job)
        self._model.train()
        self._optimizer = build_optimizer(job, self._model)
        for group in () if device.is_cpu else self._optimizer.param_groups:
            if group.get("fused") is None and group.get("foreach", False) is None:
                # Torch's default on a GPU, which needs temporary memory.
                group["foreach"] = True
        self.space = self._find_space()
        # The first step creates the optimizer's state.
        self._step(self.space.baseline(), lambda _phase: None)

    def _find_space(self) -> PlanSpace:
        job, model = self._job, self._model
        units = units_of(model, job.units)

        def run() -> None:
            with self._attention(), torch.no_grad():
                ask(job, "loss", lambda: job.loss(model, self._batch))

        calls = controls.forward_order(model, [unit.name for unit in units], run)
        by_name: dict[str, Unit] = {unit.name: unit for unit in units}
        lowered = controls.has_16_bit_parameters(model)
        return PlanSpace(
            units=tuple(by_name[name] for name, count in calls.items() if count > 0),
            accumulation_choices=accumulation_choices(job, model, {}),
            precisions=(Precision.INHERIT,) if lowered else self._device.precisions,
            k_splits=job.batching == "fixed",
            # Fake tensors cannot be compiled for a device that is not here.
            storages=tuple(one for one in offered(job.storages, _NO_COPIES) if one not in COMPILED_STORAGES),
        )

    def static_bytes(self) -> int:
        """Return the bytes of the model, the optimizer state and the device's workspace."""
        on_host = _host_steps(self._optimizer)
        resident = resident_tensors(self._model, self._optimizer, [])
        return self._bytes([one for one in resident if id(one) not in on_host]) + self._device.workspace_bytes

    def trace(self, plan: Plan, gradients: Sequence[int] | None, *, fp32_borders: bool) -> PlanSteps:
        """Return the memory and the estimated seconds of a step.

        Args:
            plan: the step's plan.
            gradients: gradient bytes of each segment from another trace of the same k; ``None`` for the first.
            fp32_borders: whether tensors pass between units in fp32.
        """
        controls.apply(self._model, plan, fp32_borders=fp32_borders)
        names = [unit.name for unit in self.space.units]
        tracer = FakeTracer(self._model, names, self._operator_time, self._device.allocated)
        tracer.know(resident_tensors(self._model, self._optimizer, [self._batch]))
        with tracer.tracing():
            self._step(plan, tracer.watch.begin)
        controls.remove(self._model)
        assert tracer.trace is not None
        # At most two micro-batches are traced; further ones are taken to last as long as these on average.
        micro_batches = min(plan.accumulation_steps, 2)
        seconds: dict[tuple[Phase, int], float] = {UPDATE: 0.0}
        for place, value in tracer.seconds.items():
            key = (place.phase, place.segment)
            # The update, which includes the code between micro-batches, happens once.
            factor = 1.0 if place.phase == "update" else plan.accumulation_steps / micro_batches
            seconds[key] = seconds.get(key, 0.0) + value * factor
        if self._device.measured is not None:
            again = self._device.measured.recompute_s * plan.accumulation_steps
            for number, name in enumerate(tracer.trace.calls):
                if plan.storage_of(name).recomputes:
                    key = ("backward", 2 * number + 1)
                    seconds[key] = seconds.get(key, 0.0) + again
        held = self._bytes(tensors(self._batch)) * (1 if self.space.k_splits else plan.accumulation_steps)
        traced = TracedStep(
            plan=plan,
            calls=tracer.trace.calls,
            attribution=attribute(tracer.trace, recomputed_units(plan), gradients, silent_units(plan)),
            batch_bytes=held,
            traced_bytes=held,
        )
        return PlanSteps(traced, [Visit(steps=[WatchedStep(sum(seconds.values()), seconds)])])

    def _step(self, plan: Plan, begin: Callable[[Phase], None]) -> None:
        """Run a step with at most two of its micro-batches."""
        k = plan.accumulation_steps
        pieces = [self._batch] * k if self._job.batching == "adaptive" else Cutting.of(self._job).pieces(self._batch, k)
        pieces = pieces[:2]
        # Which jobs allow at k = 1 alone.
        releases = knobs.releases(self._job.launch.knobs)
        releasing = released(self._optimizer, lambda _gradient: None) if releases else contextlib.nullcontext()
        for piece in pieces:
            with self._attention():
                begin("forward")
                loss = ask(self._job, "loss", lambda piece=piece: self._job.loss(self._model, piece))  # type: ignore[misc]
                begin("backward")
                with releasing:
                    (loss * (1.0 / len(pieces))).backward()
            begin("update")
            del loss
        ask(self._job, "optimizer.step", self._optimizer.step)
        self._optimizer.zero_grad(set_to_none=True)

    def _attention(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which attention is fused as on the device: on a CPU, as the job has it."""
        return contextlib.nullcontext() if self._device.is_cpu else fused_attention()

    def _operator_time(self, work: Work) -> float:
        if self._device.measured is not None:
            return self._device.measured.seconds(work, kind_of(work.operator))
        # This process's settings apply: by default, convolutions may round to TF32, but matrix products may not.
        convolution = "convolution" in work.operator
        rounds = devices.gpu_arithmetic()["convolutions" if convolution else "matrix products"] == "tf32"
        tf32 = rounds and (self._device.tf32_convolutions or not convolution)
        precision = _PRECISION_OF.get(work.dtype, Precision.FP32)
        return self._device.seconds(work.operations, work.moved_bytes, precision, tf32=tf32)

    def _bytes(self, values: list[torch.Tensor]) -> int:
        """Return the bytes that the device's allocator counts for the storages of fake tensors, each once."""
        parts = [part.untyped_storage() for value in values for part in dense_parts(value)]
        storages = {part._cdata: part.nbytes() for part in parts}
        return sum(self._device.allocated(size) for size in storages.values())


def _host_steps(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the step counters that torch's optimizers keep in host memory."""
    return {
        id(optimizer.state[parameter].get("step"))
        for group in optimizer.param_groups
        if not (group.get("capturable") or group.get("fused"))
        for parameter in group["params"]
        if parameter in optimizer.state
    }
