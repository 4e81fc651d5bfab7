"""Estimate a profile for a device that is not there: the job's own step, on fake tensors.

Nothing is allocated and nothing computed: memory follows from the lifetimes of what the step's operators would
allocate, as the device's allocator counts it, and time from a table of its published rates. The profile says that it is
estimated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from autotune.choices import REDUCED_PRECISIONS
from autotune.cost_model.device_table import DeviceSpec
from autotune.cost_model.profile import Calibration, Profile
from autotune.engines.job_checks import accumulation_choices, ask, build_model, build_optimizer
from autotune.errors import InputError, JobError
from autotune.job import Job
from autotune.mechanics import controls, devices, stepping
from autotune.mechanics.memory_meter import resident_tensors
from autotune.mechanics.precision import DTYPES
from autotune.mechanics.randomness import isolated, seed_all
from autotune.mechanics.step_trace import Phase
from autotune.mechanics.trees import map_tensors, tensors
from autotune.plan import Plan, PlanSpace, Precision
from autotune.profiling.attribution import attribute
from autotune.profiling.fake_trace import FakeTracer, fake_conversions, fused_attention
from autotune.profiling.profile_assembly import Choice, Probe, all_tables, homogeneous_plans, known, without_copies
from autotune.profiling.profiler import fixed_shape, length_spread, spread_choices
from autotune.units import Unit, units_of

_MAX_TABLES = 4
_PRECISION_OF = {DTYPES[precision]: precision for precision in REDUCED_PRECISIONS}


def estimate(job: Job, device: DeviceSpec, *, on_progress: Callable[[float], None] | None = None) -> Profile:
    """Return an estimated profile of a job on a device.

    Args:
        job: the job; one of its batches is really drawn, its model is never really built.
        device: the device's published figures.
        on_progress: is told of the share that is done.

    Raises:
        InputError: if the job asks for TF32, and the device has none.
        JobError: if the step depends on values of tensors, which fake tensors do not have.
    """
    if job.launch.fp32 is not None and device.tf32 is None:
        raise InputError(
            f"+{job.launch.fp32} chooses whether fp32 is computed in TF32, which {device.name} cannot do",
            where=f"job {job.name!r}",
            allowed="a device with TF32; elsewhere without it",
        )
    return _Estimator(job, device, on_progress).profile()


class _Estimator:
    """Estimate one job on one device."""

    def __init__(self, job: Job, device: DeviceSpec, on_progress: Callable[[float], None] | None) -> None:
        self._began = time.perf_counter()
        self._job = job
        self._device = device
        self._on_progress = on_progress
        with isolated():
            seed_all(0)
            self._batch = next(iter(ask(job, "batches", lambda: fixed_shape(job).batches(0))))
            self._length_spread = length_spread(job)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def profile(self) -> Profile:
        try:
            with devices.fp32_computed_in(self._job.launch.fp32), isolated(), self._mode, fake_conversions():
                return self._estimate()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise JobError(
                f"the step depends on values ({error}), which an estimate does not have",
                where=f"job {self._job.name!r}",
                allowed="autotune profile on the device itself",
            ) from error

    def _estimate(self) -> Profile:
        job = self._job
        model = build_model(job)
        model.train()
        optimizer = build_optimizer(job, model)
        for group in optimizer.param_groups:
            if group.get("fused") is None and group.get("foreach", False) is None:
                # What torch chooses on a GPU, with its temporaries.
                group["foreach"] = True
        space = self._space(model)
        fake = map_tensors(self._mode.from_tensor, self._batch)
        self._run(model, optimizer, fake, space.baseline(), None)
        steps = _host_steps(optimizer)
        resident = [tensor for tensor in resident_tensors(model, optimizer, []) if id(tensor) not in steps]
        static = self._bytes(resident) + self._device.workspace_bytes
        ks = spread_choices(space.accumulation_choices, _MAX_TABLES)
        plans = homogeneous_plans(space, ks)
        choices: dict[Probe, Choice] = {}
        for number, (probe, plan) in enumerate(plans.items()):
            k = probe.accumulation_steps
            first = next((choice for other, choice in choices.items() if other.accumulation_steps == k), None)
            controls.apply(model, plan, fp32_borders=not probe.passes_16_bit)
            choices[probe] = self._trace(model, optimizer, fake, space, plan, first)
            if self._on_progress is not None:
                self._on_progress((number + 1) / len(plans))
        tables, uniform_tables = all_tables(without_copies(choices), job.batch_size, space)
        return Profile(
            job=job.name,
            device=self._device.name,
            fingerprint="",
            batching=job.batching,
            batch_size=job.batch_size,
            units=space.units,
            accumulation_choices=ks,
            precisions=space.precisions,
            static_bytes=static,
            tables=tables,
            uniform_tables=uniform_tables,
            calibration=Calibration(),
            noise_frac=0.0,
            switch_s=0.0,
            seconds=time.perf_counter() - self._began,
            steps=0,
            length_spread=self._length_spread,
            warnings=(f"estimated from published figures ({self._device.source}); nothing was measured",),
            estimated=True,
        )

    def _space(self, model: nn.Module) -> PlanSpace:
        job = self._job
        units = units_of(model, job.units)
        fake = map_tensors(self._mode.from_tensor, self._batch)

        def run() -> None:
            with fused_attention(), torch.no_grad():
                job.loss(model, fake)

        calls = controls.forward_order(model, [unit.name for unit in units], run)
        by_name: dict[str, Unit] = {unit.name: unit for unit in units}
        lowered = controls.has_16_bit_parameters(model)
        return PlanSpace(
            units=tuple(by_name[name] for name, count in calls.items() if count > 0),
            accumulation_choices=accumulation_choices(job, model, {}),
            precisions=(Precision.INHERIT,) if lowered else self._device.precisions,
            k_splits=job.batching == "fixed",
        )

    def _trace(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        space: PlanSpace,
        plan: Plan,
        first: Choice | None,
    ) -> Choice:
        tracer = FakeTracer(model, [unit.name for unit in space.units], self._operator_time, self._device.allocated)
        tracer.know(resident_tensors(model, optimizer, [batch]))
        self._run(model, optimizer, batch, plan, tracer)
        controls.remove(model)
        assert tracer.trace is not None
        recomputed = list(plan.recomputed)
        seen = attribute(tracer.trace, recomputed, None if first is None else known(first).gradients)
        # At most two micro-batches are traced; the rest repeat the second.
        traced = min(plan.accumulation_steps, 2)
        seconds: dict[tuple[Phase, int], float] = {}
        for place, value in tracer.seconds.items():
            key = (place.phase, place.segment)
            # What happens between micro-batches belongs to the update, which is made once.
            factor = 1.0 if place.phase == "update" else plan.accumulation_steps / traced
            seconds[key] = seconds.get(key, 0.0) + value * factor
        seconds.setdefault(("update", -1), 0.0)
        held = self._bytes(tensors(batch)) * (1 if space.k_splits else plan.accumulation_steps)
        return Choice(plan, seen, tracer.trace.calls, held, seconds=[seconds])

    def _run(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        plan: Plan,
        tracer: FakeTracer | None,
    ) -> None:
        """Run a step, its third micro-batch and further ones left out."""
        k = plan.accumulation_steps
        pieces = [batch] * k if self._job.batching == "adaptive" else stepping.split(batch, k)
        if tracer is None:
            with fused_attention():
                self._step(model, optimizer, pieces[:2], lambda _phase: None)
            return
        with tracer.tracing():
            self._step(model, optimizer, pieces[:2], tracer.watch.begin)

    def _step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        pieces: list[Any],
        begin: Callable[[Phase], None],
    ) -> None:
        for piece in pieces:
            begin("forward")
            loss = ask(self._job, "loss", lambda piece=piece: self._job.loss(model, piece))  # type: ignore[misc]
            begin("backward")
            (loss * (1.0 / len(pieces))).backward()
            begin("update")
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _operator_time(self, operations: float, moved: float, dtype: torch.dtype, convolution: bool) -> float:
        # As torch is set here: by default convolutions may round to TF32, matrix products may not.
        rounds = devices.gpu_arithmetic()["convolutions" if convolution else "matrix products"] == "tf32"
        tf32 = rounds and (self._device.tf32_convolutions or not convolution)
        return self._device.seconds(operations, moved, _PRECISION_OF.get(dtype, Precision.FP32), tf32=tf32)

    def _bytes(self, values: list[torch.Tensor]) -> int:
        """Return what the device's allocator counts for fake tensors' storages, each once."""
        storages = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in values}
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
