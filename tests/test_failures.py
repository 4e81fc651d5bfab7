"""Tests of failures: they are returned with the window, and a failed step leaves nothing behind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_jobs import (
    UNMETERED,
    adamw,
    convolution_job,
    differences,
    gpt_job,
    perceptron_job,
    squared_loss,
    training_state,
    weights_of,
)
from small_models import ReplacedBuffers
from torch import nn

from autotune import EngineOptions, Failure, Job, TorchEngine
from autotune.errors import JobError

STEPS = 4


class Fault:
    """A fault in one call of the loss.

    Attributes:
        countdown: calls of the loss until the fault; ``None`` while it is not armed.
        fired: how often it occurred.
    """

    def __init__(self, strike: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        self.strike = strike
        self.countdown: int | None = None
        self.fired = 0

    def arm(self, micro_batch: int) -> None:
        self.countdown = micro_batch

    def into(self, job: Job) -> Job:
        """Return the job with this fault in its loss function."""

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            value = job.loss(model, batch)
            if self.countdown is None:
                return value
            self.countdown -= 1
            if self.countdown >= 0:
                return value
            self.countdown = None
            self.fired += 1
            return self.strike(model, value)

        return dataclasses.replace(job, loss=loss)


class FaultyBackward(torch.autograd.Function):
    """Identity whose backward pass raises or changes the gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.act = act
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.act(gradient), None


def raising(error: BaseException) -> Callable[..., Any]:
    def act(*_: Any) -> Any:
        raise error

    return act


def in_forward(error: BaseException) -> Fault:
    """Return a fault that raises after forward has drawn random numbers and written its buffers."""
    return Fault(raising(error))


def in_backward(error: BaseException) -> Fault:
    return Fault(lambda model, loss: FaultyBackward.apply(loss, raising(error)))


def engine_of(job: Job, k: int, *, recompute: bool = False, options: EngineOptions = UNMETERED) -> TorchEngine:
    engine = TorchEngine(job, seed=1, options=options)
    space = engine.space
    names = space.recomputable if recompute else ()
    engine.apply(space.plan(accumulation_steps=k, precision=space.precisions[0], recomputed=names))
    return engine


def uninjured(job: Job, k: int, *, recompute: bool = False) -> tuple[list[Any], list[float | None]]:
    """Return the states before the first and after each step, and the losses."""
    engine = engine_of(job, k, recompute=recompute)
    states, losses = [training_state(engine)], []
    for _ in range(STEPS):
        measured = engine.run(1)
        assert measured.failure is None
        losses.append(measured.loss)
        states.append(training_state(engine))
    return states, losses


def outlast(engine: TorchEngine, spoil: Callable[[int], None], expected: Any, failure: Failure) -> None:
    """Run the steps with a fault in one of them, and compare the states before and after the retry."""
    states, losses = expected
    failed = 0
    for step in range(STEPS):
        spoil(step)
        measured = engine.run(1)
        if measured.failure is not None:
            failed += 1
            assert measured.failure is failure
            assert "\n" not in measured.failure_detail
            assert (measured.steps, measured.samples, measured.loss) == (0, 0, None)
            # Only the learning rate is already that of the next step, because each step sets it.
            left = differences(states[step], training_state(engine))
            assert [key for key in left if not isinstance(states[step][key], float)] == []
            measured = engine.run(1)
        assert measured.failure is None
        assert measured.loss == losses[step]
        assert differences(states[step + 1], training_state(engine)) == []
    assert failed == 1


ERRORS = {
    "out of memory on a device": (lambda: torch.OutOfMemoryError("out of memory"), Failure.OUT_OF_MEMORY),
    "out of memory in python": (MemoryError, Failure.OUT_OF_MEMORY),
    "out of memory on the host": (
        lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        Failure.OUT_OF_MEMORY,
    ),
    "no kernel": (
        lambda: NotImplementedError("\"lstm\" not implemented for 'Half'"),
        Failure.UNSUPPORTED,
    ),
    "no kernel, as torch says it": (
        lambda: RuntimeError("\"addmm\" not implemented for 'Half'"),
        Failure.UNSUPPORTED,
    ),
    "mixed types": (lambda: RuntimeError("mat1 and mat2 must have the same dtype"), Failure.UNSUPPORTED),
    "a fault of the user's": (lambda: KeyError("two\nlines"), Failure.CRASHED),
}
JOBS: dict[str, tuple[Callable[[], Job], int]] = {
    "dropout, fixed batching": (gpt_job, 4),
    "BatchNorm, adaptive batching": (convolution_job, 2),
    "replaced buffers": (lambda: perceptron_job(model=ReplacedBuffers, optimizer=adamw), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("name", JOBS)
def test_step_that_failed_in_forward_or_backward_is_repeated_bit_for_bit(name, recompute):
    build, k = JOBS[name]
    expected = uninjured(build(), k, recompute=recompute)
    spots = 0
    for place in (in_forward, in_backward):
        for make_error, failure in ERRORS.values():
            for at_step, micro_batch in ((0, 0), (STEPS - 1, k - 1), (1, k // 2)):
                fault = place(make_error())
                engine = engine_of(fault.into(build()), k, recompute=recompute)

                def spoil(step: int, fault=fault, at_step=at_step, micro_batch=micro_batch) -> None:
                    if step == at_step:
                        fault.arm(micro_batch)

                outlast(engine, spoil, expected, failure)
                assert fault.fired == 1
                spots += 1
    assert spots == 42


@pytest.mark.some(2)
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("method", ["unscale", "clip"])
def test_step_that_failed_while_unscaling_or_clipping_is_repeated_bit_for_bit(name, method, moment):
    build, k = JOBS[name]
    expected = uninjured(build(), k)
    for at_step in range(STEPS):
        engine = engine_of(build(), k)
        original = getattr(engine.update, method)
        fired: list[int] = []

        def faulty(*args: Any, original=original, fired=fired, engine=engine) -> Any:
            if moment == "after":
                original(*args)
            delattr(engine.update, method)
            fired.append(1)
            raise torch.OutOfMemoryError("injected")

        def spoil(step: int, at_step=at_step, engine=engine, faulty=faulty) -> None:
            if step == at_step:
                setattr(engine.update, method, faulty)

        outlast(engine, spoil, expected, Failure.OUT_OF_MEMORY)
        assert fired == [1]


def test_step_that_failed_inside_a_unit_is_repeated_bit_for_bit():
    expected = uninjured(convolution_job(), 2)
    for unit in ("stem", "blocks.1", "head"):
        engine = engine_of(convolution_job(), 2)
        fired: list[str] = []

        def spoil(step: int, engine=engine, unit=unit, fired=fired) -> None:
            if step != 2:
                return

            def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
                handle.remove()
                fired.append(unit)
                raise torch.OutOfMemoryError("injected")

            handle = engine.model.get_submodule(unit).register_forward_hook(hook)

        outlast(engine, spoil, expected, Failure.OUT_OF_MEMORY)
        assert fired == [unit]


def test_metered_step_that_failed_is_repeated_bit_for_bit():
    expected = uninjured(gpt_job(), 2)
    fault = in_backward(torch.OutOfMemoryError("injected"))
    engine = engine_of(fault.into(gpt_job()), 2, options=EngineOptions())
    outlast(engine, lambda step: fault.arm(1) if step == 1 else None, expected, Failure.OUT_OF_MEMORY)
    assert fault.fired == 1
    assert engine.run(1).peak_bytes is not None


def test_window_ends_at_its_failure_and_keeps_the_steps_before_it():
    fault = in_forward(MemoryError())
    engine = engine_of(fault.into(gpt_job()), 2)
    fault.arm(2 * 3)
    measured = engine.run(5)
    assert fault.fired == 1
    assert (measured.steps, measured.samples, measured.failure) == (3, 12, Failure.OUT_OF_MEMORY)
    assert engine.progress.steps == 3
    assert measured.loss is not None


def test_step_repeated_under_another_plan_sees_the_same_data():
    seen: list[float] = []
    job = perceptron_job(batching="adaptive")

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            seen.append(float(batch[0][0, 0]))
        return squared_loss(model, batch)

    job = dataclasses.replace(job, loss=loss)
    order = engine_of(job, 8)
    order.run(1)
    batches = list(seen)
    assert len(set(batches)) == 8
    fault = in_forward(MemoryError())
    engine = engine_of(fault.into(job), 4)
    fault.arm(3)
    assert engine.run(1).failure is Failure.OUT_OF_MEMORY
    assert fault.fired == 1
    engine.apply(engine.plan.changed(accumulation_steps=2))
    seen.clear()
    assert engine.run(4).failure is None
    # No update skips a batch or sees one twice.
    assert seen == batches
    assert engine.progress.batches == 8


def test_failure_before_a_restore_keeps_the_data_order():
    fault = in_forward(MemoryError())
    job = perceptron_job(batching="adaptive")
    plain = engine_of(job, 2)
    plain.run(3)
    engine = engine_of(fault.into(job), 2)
    engine.run(1)
    start = engine.snapshot()
    engine.apply(engine.plan.changed(accumulation_steps=8))
    fault.arm(5)
    assert engine.run(1).failure is Failure.OUT_OF_MEMORY
    engine.restore(start)
    engine.apply(engine.plan.changed(accumulation_steps=2))
    engine.run(2)
    assert fault.fired == 1
    assert differences(training_state(plain), training_state(engine)) == []


def test_statistics_of_a_repeated_step_equal_those_of_an_undisturbed_step():
    plain = engine_of(gpt_job(), 2)
    fault = in_backward(MemoryError())
    engine = engine_of(fault.into(gpt_job()), 2)
    for step in range(STEPS):
        expected = plain.run(1).gradient
        if step == 2:
            fault.arm(1)
            assert engine.run(1).failure is Failure.OUT_OF_MEMORY
        seen = engine.run(1).gradient
        assert expected is not None
        assert seen == expected, f"step {step}"
    assert fault.fired == 1


def test_gradient_sample_taken_before_the_failure_is_not_averaged_twice():
    plain = engine_of(gpt_job(), 2)
    engine = engine_of(gpt_job(), 2)
    original = engine.update.clip

    def faulty(norm: float) -> None:
        del engine.update.clip
        raise MemoryError

    for step in range(STEPS):
        plain.run(1)
        if step == 2:
            engine.update.clip = faulty
            assert engine.run(1).failure is Failure.OUT_OF_MEMORY
            assert engine.update.clip == original
        engine.run(1)
    assert engine.monitor.state.average == plain.monitor.state.average


def test_window_without_samples_reports_no_gradient():
    fault = in_backward(MemoryError())
    engine = engine_of(fault.into(gpt_job()), 2)
    assert engine.run(1).gradient is not None
    fault.arm(0)
    failed = engine.run(1)
    assert failed.failure is Failure.OUT_OF_MEMORY
    assert failed.gradient is None


# ---------------------------------------------------------------------------------------- what passes through


class FaultyOptimizer(torch.optim.SGD):
    """An optimizer that raises in the second step, after half of the weights are updated."""

    error: BaseException = MemoryError("in the optimizer")
    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        if self.num_steps == 2:
            raise self.error
        return super().step(closure)


def test_exception_in_the_optimizer_step_is_told_with_its_cause(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FaultyOptimizer, "error", KeyError("in the optimizer"))
    engine = engine_of(perceptron_job(optimizer=lambda parameters: FaultyOptimizer(parameters, lr=0.1)), 2)
    assert engine.run(1).failure is None
    with pytest.raises(JobError, match=r"optimizer\.step raised KeyError: 'in the optimizer'") as caught:
        engine.run(1)
    assert isinstance(caught.value.__cause__, KeyError)
    assert engine.update.optimizer.num_steps == 2


def test_out_of_memory_in_the_optimizer_step_is_a_failed_window():
    engine = engine_of(perceptron_job(optimizer=lambda parameters: FaultyOptimizer(parameters, lr=0.1)), 2)
    assert engine.run(1).failure is None
    window = engine.run(1)
    assert window.failure is Failure.OUT_OF_MEMORY
    assert "in the optimizer" in window.failure_detail
    assert engine.run(1).failure is None


@pytest.mark.parametrize("place", [in_forward, in_backward])
@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), SystemExit("stop")], ids=repr)
def test_interrupt_propagates_and_training_can_continue_unchanged(place, error):
    states, losses = uninjured(gpt_job(), 4)
    fault = place(error)
    engine = engine_of(fault.into(gpt_job()), 4)
    engine.run(1)
    fault.arm(2)
    with pytest.raises(type(error), match="stop"):
        engine.run(1)
    assert fault.fired == 1
    assert differences(states[1], training_state(engine)) == []
    assert engine.run(1).loss == losses[1]
    assert differences(states[2], training_state(engine)) == []


# -------------------------------------------------------------------------------------------- budget and time


def test_window_whose_peak_exceeds_the_budget_fails_as_over_budget():
    free = engine_of(gpt_job(), 1, options=EngineOptions())
    free.run(3)
    peak = free.run(1).peak_bytes
    assert peak is not None
    for budget, failure in ((peak, None), (peak - 1, Failure.OVER_BUDGET)):
        engine = engine_of(gpt_job(), 1, options=EngineOptions())
        engine.memory_budget_bytes = budget
        measured = engine.run(3)
        assert measured.failure is failure
        assert measured.within_budget is (failure is None)
        assert measured.memory_budget_bytes == budget
        assert measured.peak_bytes == peak


def test_window_that_takes_too_long_fails_as_timeout_after_a_whole_step():
    engine = engine_of(gpt_job(), 1, options=EngineOptions(meter_memory=False, time_limit_s=1e-9))
    measured = engine.run(5)
    assert measured.failure is Failure.TIMEOUT
    assert measured.steps == engine.progress.steps == 1
    assert measured.loss is not None


# --------------------------------------------------------------------------------------- NaN and infinities


def spoiled_loss(bad: float) -> Fault:
    # A constant is added, so that the gradient stays finite and the loss does not.
    return Fault(lambda model, loss: loss + bad)


def spoiled_loss_and_gradient(bad: float) -> Fault:
    return Fault(lambda model, loss: loss * bad)


def spoiled_gradient(bad: float) -> Fault:
    return Fault(lambda model, loss: FaultyBackward.apply(loss, lambda gradient: gradient * bad))


BAD = [math.nan, math.inf, -math.inf]
SPOILERS = [spoiled_loss, spoiled_loss_and_gradient, spoiled_gradient]


def check_bad_step(engine: TorchEngine, spoil: Callable[[], None], k: int, samples: int) -> None:
    """Make the third step of a run fail, and check everything that it must leave unchanged."""
    assert engine.run(2).failure is None
    before, counted = training_state(engine), engine.snapshot().progress
    untouched = {*weights_of(engine), *(key for key in before if key.startswith("tensor "))}
    spoil()
    measured = engine.run(1)
    assert measured.failure is Failure.NON_FINITE
    assert (measured.steps, measured.skipped_steps, measured.samples) == (1, 1, samples)
    assert measured.loss is None
    after = training_state(engine)
    assert [key for key in differences(before, after) if key in untouched] == []
    assert all(torch.isfinite(p).all() for p in engine.model.parameters())
    assert all(p.grad is None for p in engine.model.parameters())
    progress = engine.snapshot().progress
    assert (progress.steps, progress.samples) == (counted.steps + 1, counted.samples + samples)
    again = engine.run(2)
    assert (again.failure, again.steps, again.skipped_steps) == (None, 2, 0)
    assert math.isfinite(again.loss)
    assert set(differences(before, training_state(engine))) >= set(weights_of(engine)) - constant_keys(engine)


def constant_keys(engine: TorchEngine) -> set[str]:
    """Return the keys of the optimizer's settings, which no step changes."""
    state = training_state(engine)
    return {key for key in weights_of(engine) if not isinstance(state[key], torch.Tensor)}


@pytest.mark.some(2)
@pytest.mark.parametrize("spoiler", SPOILERS)
@pytest.mark.parametrize("name", JOBS)
def test_nonfinite_loss_or_gradient_never_reaches_a_weight_or_buffer(name, spoiler):
    build, k = JOBS[name]
    injections = 0
    for bad in BAD:
        for micro_batch in range(k):
            fault = spoiler(bad)
            job = fault.into(build())
            samples = job.batch_size * (k if job.batching == "adaptive" else 1)
            check_bad_step(engine_of(job, k), lambda: fault.arm(micro_batch), k, samples)  # noqa: B023
            assert fault.fired == 1
            injections += 1
    assert injections == 3 * k


@pytest.mark.some(2)
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("name", ["dropout, fixed batching", "BatchNorm, adaptive batching"])
def test_nonfinite_activation_never_reaches_a_weight_or_buffer(name, recompute):
    build, k = JOBS[name]
    for bad in BAD:
        for micro_batch in range(k):
            job = build()
            engine = engine_of(job, k, recompute=recompute)
            calls: list[int] = []

            def spoil(engine=engine, calls=calls, micro_batch=micro_batch, bad=bad) -> None:
                def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
                    calls.append(len(calls))
                    if len(calls) <= micro_batch:
                        return output
                    handle.remove()
                    return output + bad

                handle = engine.model.get_submodule("blocks.0").register_forward_hook(hook)

            samples = job.batch_size * (k if job.batching == "adaptive" else 1)
            check_bad_step(engine, spoil, k, samples)
            assert len(calls) == micro_batch + 1


def test_window_ends_at_the_first_nonfinite_step():
    fault = spoiled_gradient(math.nan)
    engine = engine_of(fault.into(gpt_job()), 2)
    fault.arm(2 * 3 + 1)
    measured = engine.run(6)
    assert fault.fired == 1
    assert (measured.steps, measured.skipped_steps, measured.failure) == (4, 1, Failure.NON_FINITE)
    assert measured.samples == 16
