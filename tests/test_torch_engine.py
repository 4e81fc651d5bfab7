"""Tests of the torch engine: it trains like a plain loop under any plan and has no side effects."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_job
import torch
import torch.nn.functional as F
from small_jobs import (
    adamw,
    convolution_job,
    differences,
    global_generators,
    gpt_job,
    image_loss,
    next_token_loss,
    perceptron_job,
    squared_loss,
    token_batches,
    training_state,
    vector_batches,
)
from small_models import Perceptron, TinyConvolution, TinyGPT
from torch import nn

from autotune import (
    EngineOptions,
    Failure,
    Job,
    JobError,
    Plan,
    PlanError,
    Precision,
    Storage,
    TorchEngine,
    WarmupCosine,
)
from autotune.engines.engine import Engine
from autotune.errors import EngineError
from autotune.mechanics import controls, randomness


def engine_of(job: Job, *, seed: int = 1, **options: Any) -> TorchEngine:
    return TorchEngine(job, seed=seed, options=EngineOptions(**{"meter_memory": False, **options}))


def with_k(engine: TorchEngine, k: int) -> TorchEngine:
    engine.apply(engine.plan.changed(accumulation_steps=k))
    return engine


# ------------------------------------------------------------------------------------------- a plain training loop


def test_baseline_trains_bit_for_bit_like_a_plain_loop():
    job = gpt_job(clip_norm=0.5)
    engine = engine_of(job, seed=7)
    losses = [engine.run(1).loss for _ in range(6)]
    norms = []
    with randomness.isolated():
        randomness.seed_all(7)
        model = job.model()
        optimizer = adamw(model.parameters())
        expected = []
        for batch, _ in zip(job.batches(7), range(6), strict=False):
            loss = job.loss(model, batch)
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
    # Clipping was active.
    assert max(norms) > 0.5
    assert losses == pytest.approx(expected, rel=1e-7)
    assert differences(dict(model.named_parameters()), dict(engine.model.named_parameters())) == []


class Spectral(nn.Module):
    """A network with a complex parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)
        self.weight = nn.Parameter(torch.ones(9, dtype=torch.complex64))

    def forward(self, x):
        return self.last(torch.fft.irfft(torch.fft.rfft(torch.tanh(self.first(x))) * self.weight, n=16))


def noise_batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, 8, generator=generator)


def penalized(model, batch):
    """Return a loss with a penalty on the gradient with respect to the batch, for which it differentiates within."""
    x = batch.clone().requires_grad_()
    output = model(x).square().mean()
    (gradient,) = torch.autograd.grad(output, x, create_graph=True)
    return output + (gradient.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("loss", [penalized, lambda model, batch: model(batch).square().mean()])
def test_gradient_penalties_and_complex_parameters_train_like_a_plain_loop(loss):
    job = tiny_job.make(
        model=Spectral,
        batches=noise_batches,
        loss=loss,
        optimizer=adamw,
        clip_norm=0.05,
        evaluate=lambda _model: 0.0,
        schedule=None,
    )
    engine = engine_of(job, seed=7)
    engine.run(4)
    with randomness.isolated():
        randomness.seed_all(7)
        model = job.model()
        optimizer = adamw(model.parameters())
        for batch, _ in zip(job.batches(7), range(4), strict=False):
            loss(model, batch).backward()
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05
            optimizer.step()
            optimizer.zero_grad()
    assert differences(dict(model.named_parameters()), dict(engine.model.named_parameters())) == []


def test_torch_engine_satisfies_the_engine_protocol():
    assert isinstance(engine_of(perceptron_job()), Engine)


def test_equal_seeds_train_identically_and_different_seeds_differently():
    states = []
    for seed in (3, 3, 4):
        engine = engine_of(gpt_job(), seed=seed)
        engine.run(3)
        states.append(training_state(engine))
    assert differences(states[0], states[1]) == []
    assert "tensor head.weight" in differences(states[0], states[2])


def test_windows_of_any_length_train_identically():
    long, short = engine_of(gpt_job(), statistics_every=1000), engine_of(gpt_job(), statistics_every=1000)
    long.run(6)
    for steps in (1, 3, 2):
        short.run(steps)
    assert differences(training_state(long), training_state(short)) == []


def test_window_of_zero_steps_measures_nothing():
    measured = engine_of(perceptron_job()).run(0)
    assert (measured.steps, measured.samples, measured.loss, measured.failure) == (0, 0, None, None)


def test_window_reports_what_it_ran():
    engine = with_k(engine_of(perceptron_job()), 2)
    measured = engine.run(6)
    assert (measured.steps, measured.samples, measured.items) == (6, 48, 48)
    assert (measured.skipped_steps, measured.failure, measured.loss_scale) == (0, None, None)
    # The first two steps of a plan are run but not timed.
    assert len(measured.step_s) == 4
    assert min(measured.step_s) > 0
    assert sum(measured.step_s) <= measured.total_s
    assert min(measured.step_s) <= measured.seconds_per_step <= max(measured.step_s)
    assert measured.samples_per_step == 8
    assert measured.throughput == 8 / measured.seconds_per_step
    assert measured.learning_rate == 0.1


def test_loss_of_a_window_is_the_mean_over_its_items():
    engine, single = (with_k(engine_of(counted_job()), 2) for _ in range(2))
    windows = [single.run(1) for _ in range(4)]
    items = [window.items for window in windows]
    assert len(set(items)) > 1
    expected = sum(window.loss * window.items for window in windows) / sum(items)
    assert engine.run(4).loss == pytest.approx(expected, rel=1e-12)


def test_first_steps_are_discarded_after_a_switch_but_not_after_the_same_plan():
    engine = engine_of(perceptron_job())
    engine.run(2)
    engine.apply(engine.plan)
    assert len(engine.run(3).step_s) == 3
    with_k(engine, 2)
    assert len(engine.run(3).step_s) == 1


# ---------------------------------------------------------------------------------------------------- isolation


def draw_everything(_: object = None) -> float:
    import random

    import numpy as np

    random.random()
    np.random.rand()  # noqa: NPY002
    torch.rand(3)
    return 0.5


def test_all_engine_operations_leave_the_callers_generators_unchanged():
    def model() -> nn.Module:
        draw_everything()
        return TinyGPT()

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        draw_everything()
        return next_token_loss(model, batch)

    torch.manual_seed(11)
    before = global_generators()
    engine = engine_of(gpt_job(model=model, loss=loss, evaluate=draw_everything))
    assert differences(before, global_generators()) == []
    start = engine.snapshot()
    for act in (lambda: engine.run(2), engine.evaluate, lambda: engine.restore(start), engine.close):
        act()
        assert differences(before, global_generators()) == []


def test_random_draws_of_the_caller_do_not_affect_the_run():
    calm, disturbed = engine_of(gpt_job()), engine_of(gpt_job())
    for _ in range(4):
        calm.run(1)
        draw_everything()
        disturbed.run(1)
    assert differences(training_state(calm), training_state(disturbed)) == []


def test_evaluation_does_not_change_the_run():
    calm, evaluated = engine_of(convolution_job()), engine_of(convolution_job())
    for _ in range(3):
        calm.run(1)
        evaluated.run(1)
        before = training_state(evaluated)
        evaluated.evaluate()
        assert differences(before, training_state(evaluated)) == []
    calm.run(1)
    evaluated.run(1)
    assert differences(training_state(calm), training_state(evaluated)) == []


def test_evaluation_gets_the_users_model_in_evaluation_mode_without_gradients():
    seen: list[Any] = []

    def evaluate(model: nn.Module) -> float:
        seen.append((model.training, torch.is_grad_enabled(), [module.training for module in model.modules()]))
        hidden: list[torch.dtype] = []
        handle = model.blocks[0].mix.register_forward_hook(lambda m, a, output: hidden.append(output.dtype))
        value = next_token_loss(model, next(token_batches(5))).item()
        handle.remove()
        seen.append(hidden)
        return value

    engine = engine_of(gpt_job(evaluate=evaluate))
    full = engine.evaluate()
    space = engine.space
    engine.apply(space.plan(accumulation_steps=1, precision=Precision.BF16, recomputed=space.recomputable))
    engine.model.blocks[1].eval()
    modes = [module.training for module in engine.model.modules()]
    assert engine.evaluate() == full
    assert [module.training for module in engine.model.modules()] == modes
    for training, gradients, all_modes in seen[0::2]:
        assert (training, gradients, any(all_modes)) == (False, False, False)
    assert seen[1::2] == [[torch.float32], [torch.float32]]
    assert set(controls.recomputations(engine.model)) == {unit.name for unit in space.units}


def test_training_mode_is_restored_even_if_the_evaluation_raises():
    def evaluate(model: nn.Module) -> float:
        raise KeyError("user")

    engine = engine_of(gpt_job(evaluate=evaluate))
    engine.model.blocks[1].eval()
    modes = [module.training for module in engine.model.modules()]
    with pytest.raises(JobError, match="evaluate raised KeyError: 'user'"):
        engine.evaluate()
    assert [module.training for module in engine.model.modules()] == modes


# ---------------------------------------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("build", [gpt_job, convolution_job])
@pytest.mark.parametrize("k", [1, 2])
def test_restored_run_continues_bit_for_bit(build, k):
    engine = with_k(engine_of(build(schedule=WarmupCosine())), k)
    engine.run(3)
    start = engine.snapshot()
    losses = [engine.run(1).loss for _ in range(3)]
    end = training_state(engine)
    for _ in range(2):
        engine.restore(start)
        assert [engine.run(1).loss for _ in range(3)] == losses
        assert differences(end, training_state(engine)) == []


def test_snapshot_restores_into_another_engine_of_the_same_job():
    engine, other = engine_of(gpt_job()), engine_of(gpt_job())
    engine.run(3)
    start = engine.snapshot()
    engine.run(2)
    other.run(1)
    other.restore(start)
    other.run(2)
    assert differences(training_state(engine), training_state(other)) == []


def test_snapshot_shares_no_memory_with_its_engine():
    engine = engine_of(convolution_job())
    engine.run(2)
    start = engine.snapshot()
    before = {name: tensor.clone() for name, tensor in start.tensors.items()}
    engine.run(2)
    assert differences(before, start.tensors) == []
    engine.restore(start)
    engine.run(2)
    assert differences(before, start.tensors) == []
    assert start.progress.steps == 2


def test_statistics_after_a_restore_are_those_of_the_restored_run():
    engine = with_k(engine_of(gpt_job(), statistics_every=4, split_to_learn_noise=True), 1)
    engine.run(2)
    start = engine.snapshot()
    expected = engine.run(6)
    end = training_state(engine)
    engine.run(20)
    engine.restore(start)
    seen = engine.run(6)
    assert expected.gradient is not None
    assert seen.gradient == expected.gradient
    assert seen.gradient.noise_scale_age_steps >= 0
    assert differences(end, training_state(engine)) == []


# -------------------------------------------------------------------------------------------------------- plans


def test_engine_begins_with_the_baseline():
    engine = engine_of(gpt_job())
    assert engine.plan == engine.space.baseline()
    assert set(engine.plan.precision.values()) == {Precision.FP32}
    assert engine.plan.accumulation_steps == 1


def test_plan_outside_the_space_is_rejected_and_the_previous_one_stays():
    engine = with_k(engine_of(gpt_job()), 2)
    former = engine.plan
    for plan, message in (
        (former.changed(accumulation_steps=3), r"accumulation_steps is 3 \(allowed: 1, 2, 4\)"),
        (Plan(precision={"body": "bf16"}), "precision names unknown unit 'body'"),
        (Plan(storage={"head": "recompute"}), "storage names unknown unit 'head'"),
    ):
        with pytest.raises(PlanError, match=message):
            engine.apply(plan)
        assert engine.plan == former
    assert engine.run(1).failure is None


def test_applying_a_plan_leaves_the_training_state_unchanged():
    engine = engine_of(gpt_job())
    engine.run(2)
    before = training_state(engine)
    engine.apply(engine.space.leanest())
    assert differences(before, training_state(engine)) == []
    engine.apply(engine.space.baseline())
    assert differences(before, training_state(engine)) == []


def test_user_can_leave_units_uncontrolled():
    engine = engine_of(gpt_job())
    engine.apply(Plan())
    assert set(engine.plan.precision.values()) == {Precision.INHERIT}
    assert set(engine.plan.storage.values()) == {Storage.SAVE}
    assert controls.recomputations(engine.model) == {}
    baseline = engine_of(gpt_job())
    baseline.run(2)
    engine.run(2)
    assert differences(training_state(baseline), training_state(engine)) == []


def test_16_bit_units_compute_in_16_bit():
    engine = engine_of(gpt_job())
    engine.apply(engine.space.plan(accumulation_steps=1, precision=Precision.BF16))
    seen: set[torch.dtype] = set()
    engine.model.blocks[0].mix.register_forward_hook(lambda m, a, output: seen.add(output.dtype))
    assert engine.run(2).failure is None
    assert seen == {torch.bfloat16}
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}


def test_units_are_in_forward_order():
    class HeadFirst(TinyGPT):
        def __init__(self) -> None:
            super().__init__()
            # The unit is registered first and called last.
            children = dict(self._modules)
            self._modules.clear()
            self._modules.update({name: children[name] for name in ("head", "blocks", "embedding")})

    engine = engine_of(gpt_job(model=HeadFirst))
    names = [unit.name for unit in engine.space.units]
    assert names == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]


def test_unit_that_the_loss_never_calls_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture):
    class WithSpare(TinyGPT):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(2, 2)

    with caplog.at_level(logging.WARNING):
        engine = engine_of(gpt_job(model=WithSpare))
    assert "spare" not in {unit.name for unit in engine.space.units}
    assert "unit 'spare' is never called by the loss" in caplog.text
    assert engine.run(2).failure is None


def test_space_contains_the_units_named_by_the_user():
    engine = engine_of(gpt_job(units=["blocks.1", "head"]))
    assert [(unit.name, unit.recomputable) for unit in engine.space.units] == [("blocks.1", True), ("head", True)]


def test_closed_engine_leaves_a_plain_model_and_refuses_to_run():
    engine = engine_of(gpt_job())
    engine.apply(engine.space.leanest())
    engine.run(1)
    engine.close()
    assert not any("forward" in vars(module) for module in engine.model.modules())
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    with pytest.raises(EngineError, match="the engine is closed; create another one"):
        engine.run(1)


# ----------------------------------------------------------------------------------------------- fixed batching


def gradients_of_a_step(engine: TorchEngine) -> dict[str, torch.Tensor]:
    """Return the gradients that reach the optimizer in the next step."""
    seen: dict[str, torch.Tensor] = {}
    original = engine.update.finish

    def note(norm: float, **options: Any) -> bool:
        for name, parameter in engine.model.named_parameters():
            seen[name] = parameter.grad.detach().clone()
        return original(norm, **options)

    engine.update.finish = note
    assert engine.run(1).failure is None
    del engine.update.finish
    return seen


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_k_does_not_change_the_gradient_under_fixed_batching(k, recompute):
    job = gpt_job(model=lambda: TinyGPT(dropout=0.0), clip_norm=None)
    expected = gradients_of_a_step(engine_of(job))
    engine = engine_of(job)
    names = engine.space.recomputable if recompute else ()
    engine.apply(engine.space.plan(accumulation_steps=k, precision=Precision.FP32, recomputed=names))
    for name, gradient in gradients_of_a_step(engine).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


def counted_job(sizes: tuple[int, ...] = (8,), **changes: Any) -> Job:
    """Return a job in which some samples are ignored in the loss, with batches of the given sizes in turn."""

    def batches(seed: int) -> Iterator[dict[str, Any]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            for size in sizes:
                mask = torch.rand(size, generator=generator) < 0.5
                mask[0] = True
                yield {
                    "inputs": torch.randn(size, 3, generator=generator),
                    "targets": torch.randn(size, 3, generator=generator),
                    "mask": mask,
                    "note": "passes whole",
                }

    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        mask = batch["mask"]
        return F.mse_loss(model(batch["inputs"][mask]), batch["targets"][mask])

    settings = {"batches": batches, "loss": loss, "count": lambda batch: int(batch["mask"].sum())}
    return perceptron_job(**{**settings, **changes})


@pytest.mark.parametrize("k", [2, 4, 8])
def test_micro_batches_are_weighted_by_their_items_and_empty_ones_ignored(k):
    expected = gradients_of_a_step(engine_of(counted_job()))
    engine = with_k(engine_of(counted_job()), k)
    mask = engine._pending[0]["mask"]
    assert k < 8 or not mask.all()
    for name, gradient in gradients_of_a_step(engine).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


def test_batch_without_items_changes_no_weight_and_training_continues():
    def batches(seed: int) -> Iterator[dict[str, Any]]:
        for index, batch in enumerate(counted_job().batches(seed)):
            yield {**batch, "mask": torch.zeros_like(batch["mask"])} if index == 1 else batch

    engine = with_k(engine_of(counted_job(batches=batches)), 2)
    engine.run(1)
    before = training_state(engine)
    measured = engine.run(1)
    assert (measured.steps, measured.items, measured.skipped_steps) == (1, 0, 1)
    after = training_state(engine)
    assert [key for key in differences(before, after) if key.startswith(("tensor", "optimizer"))] == []
    assert engine.run(2).failure is None


def test_short_batch_is_split_into_as_many_pieces_as_it_has_samples():
    calls: list[int] = []
    base = counted_job(sizes=(8, 3, 1))

    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        if model.training:
            calls.append(len(batch["inputs"]))
        return F.mse_loss(model(batch["inputs"]), batch["targets"])

    engine = with_k(engine_of(counted_job(batches=base.batches, loss=loss, count=None)), 4)
    measured = engine.run(4)
    assert calls == [2, 2, 2, 2, 1, 1, 1, 1, 2, 2, 2, 2]
    assert (measured.samples, measured.items) == (20, 20)


def test_exhausted_batches_restart_in_another_order():
    def batches(seed: int) -> Iterator[Any]:
        endless = vector_batches(seed)
        for _ in range(3):
            yield next(endless)

    seen: list[float] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            seen.append(float(batch[0][0, 0]))
        return squared_loss(model, batch)

    engine = engine_of(perceptron_job(batches=batches, loss=loss))
    assert engine.run(9).failure is None
    assert len(set(seen)) == 9


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_batch_norm_locks_k_under_fixed_batching_with_a_reason(kind):
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), kind(3), nn.Linear(3, 3))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model[2](model[0](batch[0])), batch[1])

    engine = engine_of(perceptron_job(model=model, loss=loss))
    assert engine.space.accumulation_choices == (1,)
    assert "BatchNorm" in engine.locks["accumulation_steps"]
    with pytest.raises(PlanError, match=r"accumulation_steps is 2 \(allowed: 1\)"):
        with_k(engine, 2)


def test_k_is_not_locked_without_batch_norm_or_under_adaptive_batching():
    for job in (gpt_job(), convolution_job()):
        engine = engine_of(job)
        assert engine.space.accumulation_choices == (1, 2, 4)
        assert "accumulation_steps" not in engine.locks


# -------------------------------------------------------------------------------------------- adaptive batching


def test_adaptive_step_is_one_step_on_the_k_batches_together():
    job = perceptron_job(batching="adaptive", lr_rule="none")
    engine = with_k(engine_of(job), 4)
    gradients = gradients_of_a_step(engine)
    stream = job.batches(1)
    parts = [next(stream) for _ in range(4)]
    whole = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    fresh = engine_of(job)
    squared_loss(fresh.model, whole).backward()
    for name, parameter in fresh.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)
    assert (engine.progress.batches, engine.progress.samples, engine.progress.steps) == (4, 32, 1)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_learning_rate_follows_the_rule_under_adaptive_batching(rule, factor):
    engine = with_k(engine_of(perceptron_job(batching="adaptive", lr_rule=rule)), 4)
    assert engine.run(1).learning_rate == pytest.approx(0.1 * factor)
    with_k(engine, 1)
    assert engine.run(1).learning_rate == pytest.approx(0.1)


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_learning_rate_does_not_depend_on_k_under_fixed_batching(rule):
    engine = with_k(engine_of(perceptron_job(lr_rule=rule)), 4)
    assert engine.run(1).learning_rate == 0.1


def test_schedule_advances_by_samples_whatever_k_is():
    schedule = WarmupCosine(warmup_frac=0.25, minimum_frac=0.1)
    job = perceptron_job(batching="adaptive", lr_rule="none", schedule=schedule, max_steps=16)
    engine, samples = engine_of(job), 0
    for k in (1, 1, 4, 2, 8):
        with_k(engine, k)
        samples += 8 * k
        rate = engine.run(1).learning_rate
        assert rate == pytest.approx(0.1 * schedule.factor(samples / (16 * 8)), rel=1e-12)
    assert samples == 16 * 8


def test_length_of_the_schedule_can_be_set():
    job = perceptron_job(schedule=WarmupCosine(), max_steps=16)
    engine = engine_of(job, total_samples=80)
    rates = [engine.run(1).learning_rate for _ in range(12)]
    assert rates[9:] == pytest.approx([0.01] * 3)
    assert rates[8] > 0.01


def test_every_parameter_group_keeps_its_own_base_rate():
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = list(parameters)
        return torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": rest, "lr": 0.05}])

    engine = with_k(engine_of(perceptron_job(optimizer=optimizer, batching="adaptive")), 2)
    engine.run(2)
    assert [group["lr"] for group in engine.update.optimizer.param_groups] == [0.4, 0.1]


# -------------------------------------------------------------------------------------------- 16-bit parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_with_other_parameter_dtypes_train(dtype):
    def batches(seed: int) -> Iterator[Any]:
        return vector_batches(seed, dtype=dtype if dtype is torch.float64 else torch.float32)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0].to(dtype)).double(), batch[1].double()).float()

    job = perceptron_job(model=lambda: Perceptron().to(dtype), batches=batches, loss=loss)
    engine = with_k(engine_of(job), 2)
    before = engine.model.layers[0].weight.detach().clone()
    measured = engine.run(3)
    assert (measured.failure, measured.failure_detail) == (None, "")
    assert not torch.equal(engine.model.layers[0].weight, before)


def test_model_with_16_bit_parameters_only_supports_inherit_with_a_reason():
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return squared_loss(model, tuple(part.bfloat16() for part in batch)).float()

    engine = engine_of(perceptron_job(model=lambda: Perceptron().bfloat16(), loss=loss))
    assert engine.space.precisions == (Precision.INHERIT,)
    assert "16-bit parameters" in engine.locks["precision"]
    with pytest.raises(PlanError, match=r"precision of 'layers.0' is 'fp32' \(allowed: inherit\)"):
        engine.apply(Plan(precision={"layers.0": "fp32"}))
    engine.apply(engine.space.leanest())
    assert engine.run(1).failure is None
    assert set(engine.recomputations().values()) == {8}


# ----------------------------------------------------------------------------------------------------- bad jobs


def raising(*_: Any) -> Any:
    raise KeyError("two\nlines")


def no_batches(seed: int) -> Iterator[Any]:
    return iter(())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": lambda model, batch: 3.0}, r"loss returned 3.0 \(allowed: a scalar tensor, the mean"),
        (
            {"loss": lambda model, batch: model(batch[0])},
            r"loss returned a float32 tensor of shape \(8, 3\) \(allowed: a scalar tensor",
        ),
        ({"loss": lambda model, batch: None}, r"loss returned None \(allowed: a scalar tensor"),
        (
            {"loss": lambda model, batch: model(batch[0]).argmax()},
            r"loss returned a int64 tensor of shape \(\) \(allowed: a scalar tensor",
        ),
        ({"loss": raising}, r"loss raised KeyError: 'two\\nlines'"),
        ({"loss": lambda model, batch: model(batch[0][:, :2]).mean()}, r"loss raised RuntimeError: mat1 and mat2"),
        ({"loss": lambda model, batch: torch.zeros(())}, r"loss .*gradient"),
        ({"loss": lambda model, batch: squared_loss(model, batch).detach()}, r"loss .*gradient"),
        ({"batches": no_batches}, r"batches yields nothing \(allowed: at least one batch\)"),
        ({"batches": lambda seed: iter([{}])}, r"a batch has no samples"),
        ({"batches": lambda seed: iter([torch.ones(0, 3)])}, r"a batch has no samples"),
        ({"batches": lambda seed: 3}, r"batches"),
        ({"batches": raising}, r"batches raised KeyError"),
        ({"count": lambda batch: -1}, r"count returned -1 \(allowed: a whole number >= 0\)"),
        ({"count": lambda batch: 1.5}, r"count returned 1.5"),
        ({"count": lambda batch: None}, r"count returned None"),
        ({"count": raising}, r"count raised KeyError"),
        ({"units": ["body"]}, r"unit 'body' is not a module of the model"),
        ({"units": ["layers.0", "layers.0.weight"]}, r"unit 'layers.0.weight' is not a module"),
        ({"model": raising}, r"model raised KeyError"),
        ({"model": lambda: "model"}, r"model returned 'model'"),
        ({"optimizer": raising}, r"optimizer raised KeyError"),
        ({"optimizer": lambda parameters: "adam"}, r"optimizer returned 'adam'"),
    ],
)
def test_untrainable_job_is_rejected_at_once_in_one_line(changes, message):
    torch.manual_seed(11)
    before = global_generators()
    with pytest.raises(JobError, match=message) as raised:
        engine_of(perceptron_job(**changes))
    assert "\n" not in str(raised.value)
    assert differences(before, global_generators()) == []


def test_an_optimizer_that_raises_is_named_in_one_line():
    engine = engine_of(perceptron_job(optimizer=torch.optim.SparseAdam))
    with pytest.raises(JobError, match=r"job '.*': optimizer.step raised RuntimeError: SparseAdam does not support"):
        engine.run(1)


class HungryAdam(torch.optim.Adam):
    def step(self, *args: Any) -> Any:
        raise MemoryError


def test_an_optimizer_that_runs_out_of_memory_is_a_failure_of_the_window():
    assert engine_of(perceptron_job(optimizer=HungryAdam)).run(1).failure is Failure.OUT_OF_MEMORY


def test_inspecting_a_job_changes_no_weight_buffer_mode_or_hook():
    engine = engine_of(convolution_job(), seed=3)
    with randomness.isolated():
        randomness.seed_all(3)
        fresh = TinyConvolution()
    tensors = {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}
    assert differences(tensors, engine.snapshot().tensors) == []
    assert all(module.training for module in engine.model.modules())
    assert not any(module._forward_pre_hooks for module in engine.model.modules())


def test_job_whose_whole_batch_does_not_fit_is_inspected_in_pieces():
    def crowded(model: nn.Module, batch: Any) -> torch.Tensor:
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("somebody else is on this device")
        return squared_loss(model, batch)

    engine = engine_of(perceptron_job(loss=crowded, accumulation_choices=(1, 2, 4)))
    failures = [with_k(engine, k).run(1).failure for k in (1, 2, 4)]
    assert failures == [Failure.OUT_OF_MEMORY, Failure.OUT_OF_MEMORY, None]
    assert "borders" not in engine.locks
    with pytest.raises(JobError, match="OutOfMemoryError"):
        engine_of(perceptron_job(loss=crowded, accumulation_choices=(1, 2)))


# --------------------------------------------------------------------------------------------------- statistics


def test_noise_scale_is_known_after_steps_of_several_micro_batches():
    engine = with_k(engine_of(gpt_job(), statistics_every=1), 4)
    gradient = engine.run(8).gradient
    assert gradient.noise_scale is None or gradient.noise_scale > 0
    assert engine.monitor.state.average.count == 8
    assert gradient.variance > 0
    assert gradient.noise_scale_age_steps == 1
    assert set(gradient.per_unit) == {unit.name for unit in engine.space.units}
    assert all(unit.signal_to_noise is None or unit.signal_to_noise >= 0 for unit in gradient.per_unit.values())


def test_noise_scale_stays_unknown_at_k_1():
    gradient = engine_of(gpt_job(), statistics_every=1).run(4).gradient
    assert gradient.norm > 0
    assert (gradient.noise_scale, gradient.noise_scale_age_steps, gradient.variance) == (None, None, None)


def test_noise_scale_is_learned_at_k_1_by_splitting_sampled_steps():
    calls: list[int] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if model.training:
            calls.append(len(batch))
        return next_token_loss(model, batch)

    engine = engine_of(gpt_job(loss=loss), statistics_every=3, split_to_learn_noise=True, discard_steps=0)
    measured = engine.run(7)
    # Steps 0, 3 and 6 are sampled and split in two.
    assert calls == [2, 2, 4, 4, 2, 2, 4, 4, 2, 2]
    assert engine.monitor.state.average.count == 3
    assert measured.gradient.variance > 0
    # A split step does not measure the plan's speed.
    assert len(measured.step_s) == 4


def test_locked_k_is_not_split():
    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            calls.append(len(batch["images"]))
        return image_loss(model, batch)

    job = convolution_job(loss=loss, batching="fixed")
    gradient = engine_of(job, split_to_learn_noise=True).run(3).gradient
    assert calls == [4, 4, 4]
    assert gradient.noise_scale is None


def test_noise_scale_ages_without_new_samples():
    engine = with_k(engine_of(gpt_job(), statistics_every=1000), 4)
    ages = [engine.run(steps).gradient.noise_scale_age_steps for steps in (1, 3)]
    assert ages == [1, 3]
    with_k(engine, 1)
    ages = [engine.run(steps).gradient.noise_scale_age_steps for steps in (2, 5)]
    # The last sample was the first step of the second window, three steps before its end.
    assert ages == [5, 10]


def test_first_step_of_a_window_and_every_nth_after_it_are_sampled():
    engine = with_k(engine_of(gpt_job(), statistics_every=4), 2)
    engine.run(9)
    assert engine.monitor.state.average.count == 3
    engine.run(1)
    assert engine.monitor.state.average.count == 4


def test_reported_norm_is_that_of_the_gradient_before_clipping():
    job = gpt_job(model=lambda: TinyGPT(dropout=0.0), clip_norm=1e-3)
    engine, fresh = engine_of(job), engine_of(job)
    next_token_loss(fresh.model, fresh._pending[0]).backward()
    expected = math.sqrt(sum(float(p.grad.square().sum()) for p in fresh.model.parameters()))
    assert expected > 1e-3
    assert engine.run(1).gradient.norm == pytest.approx(expected, rel=1e-5)


def test_sampling_changes_no_result():
    rarely, always = engine_of(gpt_job(), statistics_every=1000), engine_of(gpt_job(), statistics_every=1)
    with_k(rarely, 2).run(6)
    with_k(always, 2).run(6)
    assert always.monitor.state.average.count == 6
    assert differences(training_state(rarely), training_state(always)) == []


# ------------------------------------------------------------------------------------------------------- memory


def test_plan_is_metered_once_and_metering_changes_no_result():
    plain, metered = engine_of(gpt_job()), engine_of(gpt_job(), meter_memory=True, discard_steps=0)
    assert plain.run(5).peak_bytes is None
    measured = metered.run(5)
    assert measured.peak_bytes > sum(4 * p.numel() for p in metered.model.parameters())
    assert differences(training_state(plain), training_state(metered)) == []
    # The metered step is not timed, and no other step is metered under this plan.
    assert len(measured.step_s) == 4
    again = metered.run(2)
    assert (len(again.step_s), again.peak_bytes) == (2, measured.peak_bytes)


def test_more_micro_batches_and_recomputation_never_need_more_memory():
    job = gpt_job(
        model=lambda: TinyGPT(width=32, blocks=4), batches=lambda seed: token_batches(seed, size=8, length=33)
    )
    engine = engine_of(job, meter_memory=True)
    peaks = {}
    engine.run(1)
    for k in (1, 2, 4):
        for names in ((), engine.space.recomputable):
            plan = engine.space.plan(accumulation_steps=k, precision=Precision.FP32, recomputed=names)
            engine.apply(plan)
            peaks[k, bool(names)] = engine.run(1).peak_bytes
    for k in (1, 2, 4):
        assert peaks[k, True] < peaks[k, False]
    for recompute in (False, True):
        assert peaks[1, recompute] > peaks[2, recompute] > peaks[4, recompute]


def test_peak_includes_at_least_resident_memory_and_gradients():
    engine = engine_of(gpt_job(), meter_memory=True)
    peak = engine.run(3).peak_bytes
    parameters = 4 * sum(parameter.numel() for parameter in engine.model.parameters())
    # Weights, gradients and two moments.
    assert peak >= 4 * parameters


def test_window_within_its_budget_reports_it():
    engine = engine_of(gpt_job(), meter_memory=True)
    engine.memory_budget_bytes = 2**30
    measured = engine.run(2)
    assert (measured.memory_budget_bytes, measured.within_budget, measured.failure) == (2**30, True, None)


# ------------------------------------------------------------------------------------------------- unsupported


def test_layer_unsupported_in_a_precision_fails_as_unsupported():
    class Refusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            if y.dtype is torch.bfloat16:
                raise RuntimeError("\"cauchy\" not implemented for 'BFloat16'")
            return y

    job = perceptron_job(model=lambda: nn.Sequential(Refusing(), Refusing()))
    engine = engine_of(job)
    engine.run(1)
    before = training_state(engine)
    engine.apply(engine.space.plan(accumulation_steps=1, precision=Precision.BF16))
    measured = engine.run(1)
    assert measured.failure is Failure.UNSUPPORTED
    assert "not implemented for 'BFloat16'" in measured.failure_detail
    assert differences(before, training_state(engine)) == []
    engine.apply(engine.space.baseline())
    assert engine.run(1).failure is None


# --------------------------------------------------------------------------------------------------------- fp16


def fp16_engine(**changes: Any) -> TorchEngine:
    """Return an engine with fp16 in its space, even if this device runs it slowly."""
    engine = engine_of(perceptron_job(**changes), statistics_every=1)
    engine.space = dataclasses.replace(engine.space, precisions=(Precision.FP32, Precision.FP16))
    engine.apply(engine.space.plan(accumulation_steps=2, precision=Precision.FP16))
    return engine


def test_fp16_overflow_is_a_skipped_step_and_not_a_failure():
    engine = fp16_engine()
    first = engine.run(1)
    assert (first.failure, first.skipped_steps, first.loss_scale) == (None, 0, 65536.0)
    before = training_state(engine)
    handle = engine.model.layers[0].weight.register_hook(lambda gradient: gradient * math.inf)
    measured = engine.run(2)
    handle.remove()
    assert (measured.failure, measured.steps, measured.skipped_steps) == (None, 2, 2)
    assert measured.loss_scale == 65536.0 / 4
    after = training_state(engine)
    assert [key for key in differences(before, after) if key.startswith(("tensor", "optimizer"))] == []
    again = engine.run(2)
    assert (again.failure, again.skipped_steps, again.loss_scale) == (None, 0, 65536.0 / 4)
    assert "tensor layers.0.weight" in differences(before, training_state(engine))


def test_fp16_statistics_are_those_of_the_unscaled_gradient():
    full = with_k(engine_of(perceptron_job(), statistics_every=1), 2).run(1).gradient
    half = fp16_engine().run(1).gradient
    assert half.norm == pytest.approx(full.norm, rel=0.02)
    assert half.variance == pytest.approx(full.variance, rel=0.05)
    for name, unit in full.per_unit.items():
        assert half.per_unit[name].rms == pytest.approx(unit.rms, rel=0.02)


def test_nonfinite_loss_is_a_failure_in_fp16_too():
    engine = fp16_engine(loss=lambda model, batch: squared_loss(model, batch) * (math.nan if model.training else 1))
    measured = engine.run(2)
    assert (measured.failure, measured.steps) == (Failure.NON_FINITE, 1)


def test_loss_scale_is_part_of_a_snapshot():
    engine = fp16_engine()
    engine.run(2)
    start = engine.snapshot()
    handle = engine.model.layers[0].weight.register_hook(lambda gradient: gradient * math.inf)
    assert engine.run(1).loss_scale == 65536.0 / 2
    handle.remove()
    engine.restore(start)
    expected = fp16_engine()
    expected.run(3)
    assert engine.run(1).loss_scale == 65536.0
    assert differences(training_state(expected), training_state(engine)) == []


def test_the_inspection_of_a_loss_with_a_backward_pass_of_its_own_leaves_no_gradient() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        tiny_job.mean_loss(model, batch).backward()
        return tiny_job.mean_loss(model, batch)

    engine = TorchEngine(tiny_job.make(loss=loss))
    assert all(parameter.grad is None for parameter in engine.model.parameters())


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_learning_rate_that_is_a_tensor_is_followed_and_restored(scheduled: bool) -> None:
    def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    changes = {"schedule": None, "scheduler": halving} if scheduled else {}

    def losses(rate: float | torch.Tensor) -> list[float | None]:
        def optimizer(parameters: object) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, lr=rate, foreach=False)  # type: ignore[arg-type]

        engine = TorchEngine(tiny_job.make(optimizer=optimizer, **changes), options=EngineOptions(meter_memory=False))
        engine.run(2)
        snapshot = engine.snapshot()
        first = [engine.run(1) for _ in range(2)]
        engine.restore(snapshot)
        again = [engine.run(1) for _ in range(2)]
        assert [one.loss for one in first] == [one.loss for one in again]
        return [one.loss for one in first]

    assert losses(torch.tensor(0.01)) == pytest.approx(losses(0.01), rel=1e-4)
