"""Train a real job in this process under any plan.

This file runs one step after another and turns failures into values. ``mechanics.stepping`` splits batches and makes
updates; ``mechanics.controls`` applies plans to models.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autotune import knobs
from autotune.engines.batch_stream import BatchStream
from autotune.engines.engine import EngineBase
from autotune.engines.job_checks import ask, build_model, build_optimizer, classify, evaluating, inspect_job, raised
from autotune.engines.learning_rates import LearningRates
from autotune.engines.measured_window import StepReport, Window, spent
from autotune.errors import AutotuneError, JobError
from autotune.job import Job
from autotune.measurement import Failure, Measurement
from autotune.mechanics import controls, cutting, devices, randomness, stepping
from autotune.mechanics.buffers import copy_buffers, drop_constants, write_buffers
from autotune.mechanics.compiled_units import compilations
from autotune.mechanics.cutting import Cutting
from autotune.mechanics.energy_meter import EnergyMeter, find_meter
from autotune.mechanics.flops import model_flops, peak_of
from autotune.mechanics.gradient_stats import GradientMonitor, GradientProbe, MonitorState
from autotune.mechanics.memory_meter import MemoryMeter, resident_tensors, tensor_bytes
from autotune.mechanics.releasing import ReleasingUpdate
from autotune.mechanics.step_clock import StepClock, completed, seconds_of
from autotune.mechanics.step_trace import Phase
from autotune.mechanics.trees import tensors
from autotune.plan import Plan, Precision
from autotune.step_parts import PARTS, StepParts, parts_of_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine measures.

    Attributes:
        discard_steps: number of steps at the start of a plan that are run but not timed.
        statistics_every: optimizer steps between two sampled gradients; every window samples its first step that is not
            metered. ``None`` samples none.
        split_to_learn_noise: whether a sampled step at k = 1 is split in two to measure the noise scale.
        meter_memory: whether the peak memory of each plan is metered.
        time_limit_s: seconds after which a window ends with ``timeout``; ``None`` for no limit.
        total_samples: length of the learning-rate schedule in samples; ``None`` for the job's ``max_steps``.
        watts: power from which energy is estimated if it cannot be measured; ``None`` makes no estimate.
    """

    discard_steps: int = 2
    statistics_every: int | None = 10
    split_to_learn_noise: bool = False
    meter_memory: bool = True
    time_limit_s: float | None = None
    total_samples: int | None = None
    watts: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A training state that is independent of the engine that it was taken from."""

    tensors: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    random: randomness.RandomState
    progress: Progress
    statistics: MonitorState


@dataclass(slots=True)
class Progress:
    """Counters of what a run has consumed.

    Attributes:
        steps: optimizer steps completed, including those with a skipped update.
        samples: samples consumed.
        batches: batches consumed.
    """

    steps: int = 0
    samples: int = 0
    batches: int = 0


@dataclass(slots=True)
class _Undo:
    """State to restore after a failed step. Weights and optimizer change only in the update."""

    random: randomness.RandomState
    buffers: dict[str, torch.Tensor]
    statistics: MonitorState


class TorchEngine(EngineBase):
    """An engine that trains one job with plain torch on one device.

    A window fails if the metered peak of its plan exceeds ``memory_budget_bytes``; at first there is no budget.

    Args:
        job: the job.
        seed: random seed for weights, batches and training.
        device: device of the model; ``None`` for the device on which jobs train on this machine.
        options: how to measure.

    Attributes:
        job: the job.
        model: the job's model.
        energy: the device's energy meter.
        clock: the clock of a step's parts.
        called: the object with which the job's loss is computed: the model, or a wrapper of it.
        recovers: whether a step that raised can be undone; otherwise its exception is raised.
        settling_steps: number of steps under any plan after which its memory no longer changes.
        world: number of ranks that train the job together.

    Raises:
        JobError: if the job's model, batches or loss cannot be used; the message says which.
    """

    recovers = True
    settling_steps = 0
    world = 1

    def __init__(
        self,
        job: Job,
        *,
        seed: int = 0,
        device: str | torch.device | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        self.job = job
        self.options = options or EngineOptions()
        self.device = devices.resolved(device)
        where = f"job {job.name!r}"
        devices.require_fp32_choice(job.launch.fp32, self.device, where=where)
        knobs.require_device(job.launch.knobs, accelerated=devices.is_accelerator(self.device), where=where)
        if self.world == 1:
            knobs.require_several(job.launch.knobs, where=where)
        if devices.is_accelerator(self.device):
            # Earlier models that reference cycles keep alive would count in the peaks of this one.
            devices.release(self.device)
        self.progress = Progress()
        with randomness.isolated():
            randomness.seed_all(seed)
            self.model = ask(job, "model", lambda: build_model(job).to(self.device))
            self.model.train()
            self._stream = BatchStream(job, seed, self.device)
            self._pending: list[Any] = [ask(job, "batches", self._stream.take)]
            self._random = randomness.capture()
            self._counted = self._count_flops()
            space, self.locks = inspect_job(job, self.model, self._pending[0])
            super().__init__(space)
            self.fp32_borders = "borders" in self.locks
            self.arranged()
            optimizer = self.built()
            self._rates = LearningRates(job, optimizer, self.options.total_samples or job.total_samples)
        self.called: Any = self.model
        self.update = self.prepared(optimizer)
        self.monitor = GradientMonitor(self.model, self.space.units)
        self._meter = MemoryMeter(self.device)
        self.energy = self.energy_meter()
        self.clock = StepClock(self.device)
        # Peak and metered batch bytes by plan: a smaller batch cannot need more memory.
        self._peaks: dict[Plan, tuple[int, int]] = {}
        self._reserved: dict[Plan, int] = {}
        self._steps_under_plan = 0
        # A batch and how many micro-batches it was cut into, with these.
        self._cut: tuple[Any, int, list[Any]] | None = None
        controls.apply(self.model, self.here(self.plan))

    @property
    def divides_by(self) -> int:
        """Return the number of parts into which ranks divide a batch."""
        return 1

    def here(self, plan: Plan) -> Plan:
        """Return the part of a plan that concerns the units in this process; overridden where others have some."""
        return plan

    def arranged(self) -> None:
        """Arrange the model before its optimizer is built; overridden by engines that replace its parameters."""

    def built(self) -> torch.optim.Optimizer:
        """Return the job's optimizer over the parameters in this process."""
        return build_optimizer(self.job, self.model)

    def prepared(self, optimizer: torch.optim.Optimizer) -> stepping.Update:
        """Return the update of the job's optimizer; overridden by engines that wrap the model."""
        if knobs.releases(self.job.launch.knobs):
            self._leave_out_scaled()
            return ReleasingUpdate(optimizer, device_type=self.device.type)
        return stepping.Update(
            optimizer, clip_norm=self.job.clip_norm, device_type=self.device.type, order=self.model.parameters()
        )

    def _leave_out_scaled(self) -> None:
        """Leave out precisions that scale the loss: a scaled gradient may overflow after weights were updated."""
        for precision in [one for one in self.space.precisions if one.needs_loss_scaling]:
            self.locks[f"precision {precision}"] = (
                "+release updates weights before it is known whether gradients overflow"
            )
        kept = tuple(one for one in self.space.precisions if not one.needs_loss_scaling)
        self.space = replace(self.space, precisions=kept)

    def energy_meter(self) -> EnergyMeter:
        """Return the meter of the energy of all devices that train the job."""
        return find_meter(self.device, self.options.watts)

    def apply(self, plan: Plan) -> None:
        """Make the next steps run under a plan.

        Raises:
            PlanError: if the plan lies outside the space; the previous plan stays.
        """
        plan = self.space.check(plan)
        if plan == self.plan:
            return
        controls.apply(self.model, self.here(plan), fp32_borders=self.fp32_borders)
        self.plan = plan
        self._steps_under_plan = 0

    def scale_learning_rate(self, factor: float) -> None:
        """Make the next steps run with a multiple of the job's learning rate; restoring a snapshot keeps it.

        Args:
            factor: factor on the rates of the job's optimizer, > 0; a torch scheduler's rates ignore it.
        """
        self._rates.scale = factor

    def run(self, steps: int) -> Measurement:
        """Run a window of optimizer steps; a failure ends it early and undoes the failed step, except a partial update.

        Raises:
            EngineError: if the engine was closed.
        """
        self.require_open()
        window = Window(meter=self.energy)
        first_step = self.progress.steps
        collectives = self.clock.timing_collectives(of_layers=True) if self.world > 1 else contextlib.nullcontext()
        with self._own_randomness(), collectives:
            for _ in range(steps):
                self._advance(window, sample=self._sample_is_due(first_step))
                if window.failure is not None:
                    break
        peak = self._peaks.get(self.plan)
        return window.measurement(
            parts=self._parts(window),
            peak_bytes=None if peak is None else peak[0],
            reserved_bytes=self._reserved.get(self.plan),
            memory_budget_bytes=self.memory_budget_bytes,
            gradient=self.monitor.aged(self.progress.steps) if self.monitor.state.sampled_at >= first_step else None,
            loss_scale=self.update.loss_scale if self.update.scaled else None,
        )

    def evaluate(self) -> float:
        """Return the job's metric in the user's own precision, without changing the training state.

        Raises:
            JobError: if the job's function raises, or returns no number.
        """
        settings, random = self._own_settings(), randomness.isolated()
        with settings, random, torch.no_grad(), evaluating(self.model), controls.suspended(self.model):
            # On several ranks, what it raises may be due to another rank.
            evaluate = functools.partial(self.job.evaluate, self.model)
            metric = ask(self.job, "evaluate", evaluate) if self.recovers else evaluate()
            try:
                return float(metric)
            except (TypeError, ValueError) as error:
                shown = f"evaluate returned {type(metric).__name__}"
                raise JobError(shown, where=f"job {self.job.name!r}", allowed="a number") from error

    def snapshot(self) -> Snapshot:
        """Return a copy of the training state."""
        return Snapshot(
            tensors={name: tensor.detach().clone() for name, tensor in self.tensors().items()},
            optimizer=copy.deepcopy(self.update.optimizer_state()),
            scaler=self.update.state_dict(),
            random=self._random,
            progress=replace(self.progress),
            statistics=self.monitor.state,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot of this engine, or of an engine with the same job, seed and device."""
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(snapshot.tensors[name])
        self.continue_from(snapshot.progress)
        self.update.load_optimizer_state(copy.deepcopy(snapshot.optimizer))
        self.update.load_state_dict(snapshot.scaler)
        self._random = snapshot.random
        self.monitor.state = snapshot.statistics

    def continue_from(self, progress: Progress) -> None:
        """Go to a point of the run: drop what a step has begun, and seek the batches and the learning rates there."""
        self.update.discard()
        self._rates.seek(progress.steps)
        self.progress = replace(progress)
        self._pending = []
        with randomness.isolated():
            self._stream.seek(progress.batches)

    def close(self) -> None:
        """Release the model's units, gradients and batches."""
        controls.remove(self.model)
        self.update.discard()
        self._pending = []
        self._stream.close()
        super().close()

    def gradient(self, plan: Plan, batches: list[Any] | None = None) -> list[torch.Tensor | None]:
        """Return the next step's gradient of each parameter under a plan, unscaled and unclipped, without training.

        The next call and the next step use the same random state and batches.

        Args:
            plan: the plan.
            batches: batches of the step in place of the next ones; ``None`` for these.
        """
        former = self.plan
        self.apply(plan)
        try:
            with self._own_randomness():
                undo = _Undo(randomness.capture(), copy_buffers(self.model), self.monitor.state)
                try:
                    with self.update.whole_gradients():
                        _Attempt(self, batches or self._take_batches(), sample=False).accumulate(metered=False)
                    return [None if p.grad is None else p.grad.clone() for p in self.update.parameters]
                finally:
                    self._put_back(undo)
        finally:
            self.apply(former)

    def recomputations(self) -> dict[str, int]:
        """Return each unit's number of recomputations since a plan was first applied to it."""
        return controls.recomputations(self.model)

    def _advance(self, window: Window, *, sample: bool) -> None:
        """Run one step; on failure, end the window and restore the state."""
        # Reading a driver's energy counter takes up to ten milliseconds, so it is read before the clock.
        began_j, began = self.energy.read(), time.perf_counter()
        self.clock.start("data")
        batches, undo, problem = self._begin_step()
        if undo is None:
            devices.release(self.device)
            window.fail(Failure.OUT_OF_MEMORY, problem)
            return
        attempt, compiled = _Attempt(self, batches, sample=sample), compilations().versions
        try:
            with self.metering(batches) as metered:
                attempt.accumulate(metered=metered)
                attempt.finish()
        except Exception as error:
            # An update may have changed some of the weights, which cannot be undone. Running out of memory there, where
            # the first update creates the optimizer's state, still counts as a failure; anything else is raised.
            if not self.recovers:
                raise
            if attempt.updating and not devices.is_out_of_memory(error):
                if isinstance(error, AutotuneError | torch.AcceleratorError):
                    raise
                raise raised(self.job, "optimizer.step", error) from error
            failure, problem = classify(error), f"{type(error).__name__}: {error}"
        except BaseException:
            # After an interrupt the caller can continue from a consistent state.
            if not attempt.updating:
                self._put_back(undo)
            raise
        if problem:
            # Outside the except block: a traceback keeps the failed step's tensors alive (pytorch#27600).
            self._put_back(undo)
            # A recomputed step also leaves tensors in reference cycles.
            devices.release(self.device)
            window.fail(failure, problem)
            return
        attempt.representative = attempt.representative and compilations().versions == compiled
        drop_constants(self.model, undo.buffers)
        if not attempt.stepped and not attempt.overflowed:
            write_buffers(self.model, undo.buffers)
        del self._pending[: len(batches)]
        self._cut = None
        self._count(window, attempt, began, began_j)
        self._judge(window, attempt)

    def _begin_step(self) -> tuple[list[Any], _Undo | None, str]:
        """Return the step's batches and the state to restore, or the error if they do not fit in memory."""
        try:
            batches = self._take_batches()
            self.clock.enter("control")
            return batches, _Undo(randomness.capture(), copy_buffers(self.model), self.monitor.state), ""
        except Exception as error:
            if not devices.is_out_of_memory(error):
                raise
            return [], None, f"{type(error).__name__}: {error}"

    def _count(self, window: Window, attempt: _Attempt, began: float, began_j: float | None) -> None:
        borders = self.clock.stop()
        devices.synchronize(self.device)
        seconds = time.perf_counter() - began
        self.progress.steps += 1
        self.progress.samples += attempt.samples
        self.progress.batches += len(attempt.batches)
        self._steps_under_plan += 1
        window.reports.append(
            StepReport(
                seconds=seconds,
                parts=completed(seconds_of(borders, self.device), seconds),
                flops=self._flops_of(attempt.batches),
                energy_j=spent(began_j, self.energy.read()),
                timed=attempt.representative and self._steps_under_plan > self.options.discard_steps,
                samples=attempt.samples,
                items=attempt.items,
                batch_bytes=tuple(tensor_bytes(tensors(batch)) for batch in attempt.batches),
                loss=attempt.loss,
                stepped=attempt.stepped,
                # A tensor, where the optimizer is to be compiled.
                learning_rate=float(self.update.optimizer.param_groups[0]["lr"]),
            )
        )
        self._rates.advance()

    def _judge(self, window: Window, attempt: _Attempt) -> None:
        """End the window if the completed step was not finite, went over the budget, or ended too late."""
        options = self.options
        if not attempt.stepped and not attempt.overflowed:
            window.fail(Failure.NON_FINITE, f"loss {attempt.loss}, gradient norm {attempt.norm}")
            return
        peak = self._peaks.get(self.plan, (0, 0))[0]
        if self.memory_budget_bytes is not None and peak > self.memory_budget_bytes:
            window.fail(Failure.OVER_BUDGET, f"peak {peak} bytes over {self.memory_budget_bytes}")
        elif options.time_limit_s is not None and (elapsed := self.agreed(window.elapsed())) > options.time_limit_s:
            window.fail(Failure.TIMEOUT, f"{elapsed:.1f} s over {options.time_limit_s:g} s")

    def _count_flops(self) -> tuple[tuple[torch.Size, ...], int] | None:
        """Return the shapes of the first batch and the operations of its step, if the device's peak rate is known."""
        batch = self._pending[0]
        if peak_of(self.device, (Precision.FP32,)) is None:
            return None
        flops = model_flops(self.job.name, self.model, self.job.loss, batch)
        return None if flops is None else (_shapes(batch), flops)

    def _flops_of(self, batches: Sequence[Any]) -> int | None:
        """Return the operations of a step on batches; ``None`` if they are not like the batch that was counted."""
        if self._counted is None or any(_shapes(batch) != self._counted[0] for batch in batches):
            return None
        return self._counted[1] * len(batches)

    def _parts(self, window: Window) -> StepParts | None:
        """Return the parts of the window's timed steps, by their mean shares over all ranks."""
        reports = window.reports
        if not reports or window.failure is Failure.OUT_OF_MEMORY:
            return None
        own = [report.parts.get(part, 0.0) for report in reports for part in PARTS]
        ranks = []
        for values in self.gathered(own):
            steps = [dict(zip(PARTS, values[start:], strict=False)) for start in range(0, len(values), len(PARTS))]
            ranks.append([step for step, report in zip(steps, reports, strict=True) if report.stepped and report.timed])
        timed = [report for report in reports if report.stepped and report.timed]
        seconds = math.fsum(report.seconds for report in timed)
        if not seconds:
            return None
        parts = parts_of_ranks(
            ranks,
            samples_per_s=sum(report.samples for report in timed) / seconds,
            items_per_s=None if self.job.count is None else sum(report.items for report in timed) / seconds,
        )
        if parts is None:
            return None
        # Ranks begin and end a step together but for moments.
        own_parts = parts.of_step(seconds / len(timed))
        return self._with_utilisation(own_parts, [report.flops for report in timed], seconds)

    def _with_utilisation(self, parts: StepParts, flops: Sequence[int | None], seconds: float) -> StepParts:
        """Return parts with the utilisation of the devices, if the operations of all steps are known."""
        known = [one for one in flops if one is not None]
        if len(known) < len(flops):
            return parts
        with self._own_settings():
            peak = peak_of(self.device, {self.plan.precision_of(unit.name) for unit in self.space.units})
        if peak is None:
            return parts
        return replace(parts, mfu=sum(known) / (seconds * peak.rate * self.world), peak_source=peak.source)

    def gathered(self, values: Sequence[float]) -> list[Sequence[float]]:
        """Return the values of all ranks, in their order; there is one rank here."""
        return [values]

    def _take_batches(self) -> list[Any]:
        """Return the batches of the next step, which are the same again after a failure."""
        needed = 1 if self.job.batching == "fixed" else self.plan.accumulation_steps
        while len(self._pending) < needed:
            self._pending.append(self._stream.take())
        return self._pending[:needed]

    def set_learning_rate(self, samples: int) -> None:
        """Set the learning rate of the step that consumes the next ``samples`` samples."""
        done = self.progress.samples + samples
        self._rates.set(self.update.optimizer, k=self.plan.accumulation_steps, samples=done)

    @contextlib.contextmanager
    def metering(self, batches: Sequence[Any]) -> Iterator[bool]:
        """Meter the body unless this plan was already metered with a batch as large; yield whether it is metered.

        The first step of a run is not metered: it creates the optimizer's state, so that its reading would be too low.
        """
        size = self._load(batches)
        known = self._peaks.get(self.plan, (0, 0))
        unsettled = self.progress.steps == 0 or self._steps_under_plan < self.settling()
        meters = self.options.meter_memory and self._meter.available
        if not meters or unsettled or size <= known[1]:
            yield False
            return
        self._meter.reset()
        with self._meter.metering(self.resident(batches)):
            yield True
        if self._meter.peak_bytes is not None:
            self._peaks[self.plan] = max(known[0], int(self.agreed(self._meter.peak_bytes))), size
        if self._meter.reserved_bytes is not None:
            self._reserved[self.plan] = int(self.agreed(self._meter.reserved_bytes))

    def _load(self, batches: Sequence[Any]) -> int:
        """Return the bytes by which batches are compared: a plan needs no more memory for those with fewer."""
        if self.job.split == "samples" or self.job.batching == "adaptive":
            return tensor_bytes(tensors(batches))
        # Micro-batches of batches of one size may differ. A trimmed one may be a view of a larger tensor.
        pieces = self.cut(batches[0], self.plan.accumulation_steps * self.divides_by)
        return max(sum(leaf.numel() * leaf.element_size() for leaf in tensors(piece)) for piece in pieces)

    def cut(self, batch: Any, pieces: int) -> list[Any]:
        """Return a batch in micro-batches, those of the last call for the same ones."""
        if self._cut is None or self._cut[0] is not batch or self._cut[1] != pieces:
            self._cut = batch, pieces, Cutting.of(self.job).pieces(batch, pieces)
        return self._cut[2]

    def settling(self) -> int:
        """Return the number of steps under the plan after which its memory no longer changes."""
        return max(self.settling_steps, int(self.plan.compiles))

    def resident(self, batches: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors that are alive before a step begins."""
        return resident_tensors(self.model, self.update.optimizer, batches)

    def agreed(self, value: float) -> float:
        """Return the maximum of a value over all ranks; there is one rank here."""
        return value

    def total(self, losses: Sequence[torch.Tensor]) -> float:
        """Return the sum of a step's weighted losses over all ranks."""
        return float(torch.stack(list(losses)).sum()) if losses else math.nan

    def shares(self, pieces: Sequence[Any]) -> cutting.Shares:
        """Return the micro-batches of a step that run in this process, with their weights.

        Args:
            pieces: the step's micro-batches.
        """
        return cutting.shares(pieces, self.job.count)

    def passes(self, shares: cutting.Shares, probe: GradientProbe | None) -> list[torch.Tensor]:
        """Run the passes of a step's micro-batches, and return their weighted losses.

        Args:
            shares: the micro-batches of :meth:`shares`.
            probe: the probe to tell where a micro-batch begins; ``None`` for a step that is not sampled.
        """
        losses = []
        for piece, weight in shares.here:
            if probe is not None:
                probe.next_micro_batch()
            self.phase("forward")
            loss = self.job.loss(self.called, piece)
            self.phase("backward")
            self.update.backward(loss, weight)
            self.phase("update")
            losses.append(loss.detach() * weight)
        return losses

    def probe(self) -> GradientProbe:
        """Return the probe that observes a sampled step's gradients."""
        return GradientProbe(self.update.parameters)

    def phase(self, name: Phase) -> None:
        """Note that a phase of a step begins; overridden by engines that trace steps."""

    def may_split(self) -> bool:
        """Return whether a step may be split in two to measure the noise scale."""
        splittable = self.job.batching == "fixed" and "accumulation_steps" not in self.locks
        return self.options.split_to_learn_noise and splittable and self.plan.accumulation_steps == 1

    def _sample_is_due(self, first_step: int) -> bool:
        """Return whether the next step is sampled: the first possible step of a window, then every n-th."""
        if self.options.statistics_every is None or not self.update.keeps_gradients:
            return False
        sampled_at = self.monitor.state.sampled_at
        since = self.progress.steps - sampled_at
        return sampled_at < first_step or since >= self.options.statistics_every

    @contextlib.contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Run the body with this run's random state, and leave the caller's unchanged."""
        with self._own_settings(), randomness.isolated():
            randomness.restore(self._random)
            try:
                yield
            finally:
                self._random = randomness.capture()

    @contextlib.contextmanager
    def _own_settings(self) -> Iterator[None]:
        """Run the body with the settings of the process that the job's launch choices make."""
        with devices.fp32_computed_in(self.job.launch.fp32), knobs.settings_of(self.job.launch.knobs):
            yield

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a snapshot by name, without those of the optimizer."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def _put_back(self, undo: _Undo) -> None:
        self._cut = None
        self.update.discard()
        write_buffers(self.model, undo.buffers)
        randomness.restore(undo.random)
        self.monitor.state = undo.statistics


class _Attempt:
    """One attempt at an optimizer step of an engine.

    Attributes:
        batches: the batches that the step consumes.
        samples: number of samples in the batches.
        items: number of loss-bearing items in the batches.
        loss: mean loss per item, after accumulation.
        norm: 2-norm of the unscaled gradient, after accumulation.
        representative: whether the wall time is that of an ordinary step.
        stepped: whether the update was made, not skipped.
    """

    def __init__(self, engine: TorchEngine, batches: list[Any], *, sample: bool) -> None:
        self._engine = engine
        self._sample = sample
        self.batches = batches
        self.samples = sum(cutting.num_samples(batch) for batch in batches)
        self.items = 0
        self.loss = math.nan
        self.norm = math.nan
        self.representative = True
        self.stepped = False
        self._finishing = False

    def accumulate(self, *, metered: bool) -> None:
        """Run all micro-batches and unscale; the parameters then have the true gradient."""
        engine = self._engine
        engine.update.scaled = engine.plan.needs_loss_scaling
        engine.set_learning_rate(self.samples)
        shares = engine.shares(self._pieces(may_split=not metered))
        self.items = shares.items
        self.representative = self.representative and not metered
        if self._sample and not metered:
            self._run_sampled(shares)
        else:
            self._run(shares)

    @property
    def overflowed(self) -> bool:
        """Return whether a skipped update is due to an overflow of the scaled gradient; the next step scales less."""
        return self._engine.update.scaled and math.isfinite(self.loss)

    @property
    def updating(self) -> bool:
        """Return whether the optimizer's update has begun, after which the step cannot be undone."""
        return self._finishing or self._engine.update.updating

    def finish(self) -> None:
        """Clip and make the update; skip it if the loss or the gradient is not finite."""
        self._engine.clock.enter("update")
        self._engine.update.clip(self.norm)
        self._finishing = True
        self.stepped = self._engine.update.finish(self.norm, abandon=not math.isfinite(self.loss))
        self._engine.clock.enter("control")

    def _pieces(self, *, may_split: bool) -> list[Any]:
        engine = self._engine
        if engine.job.batching == "adaptive":
            return self.batches
        if self._sample and may_split and engine.may_split():
            # The noise scale needs micro-batches of samples at random.
            self.representative = False
            return cutting.split(self.batches[0], 2)
        return engine.cut(self.batches[0], engine.plan.accumulation_steps)

    def _run(self, shares: cutting.Shares, probe: GradientProbe | None = None) -> None:
        engine = self._engine
        engine.update.begin(len(shares.here))
        engine.clock.enter("compute")
        losses = engine.passes(shares, probe)
        engine.clock.enter("update")
        self.norm = engine.update.unscale()
        self.loss = engine.total(losses)
        engine.clock.enter("control")

    def _run_sampled(self, shares: cutting.Shares) -> None:
        engine = self._engine
        scale = engine.update.loss_scale
        with engine.probe() as probe:
            self._run(shares, probe)
        engine.monitor.observe(
            probe.read(),
            step=engine.progress.steps,
            norm=self.norm,
            micro_samples=shares.samples,
            scales=[weight * scale for weight in shares.weights],
        )


def _shapes(batch: Any) -> tuple[torch.Size, ...]:
    return tuple(leaf.shape for leaf in tensors(batch))
