"""Tests of the gradient error of low precision, and of the noise scale against a careful estimate."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path

import pytest
import tiny_job
import torch
import torch.nn.functional as F
from small_jobs import gpt_job
from torch import nn

from autotune import TorchEngine
from autotune.catalog import load_job
from autotune.engines.torch_engine import EngineOptions
from autotune.mechanics.cutting import split
from autotune.mechanics.trees import tensors
from autotune.plan import Precision
from autotune.profiling.convergence_runs import cached_convergence, measure_convergence
from autotune.profiling.gradient_error import squared_errors

BF16 = Precision.BF16


def engine_of(**changes: object) -> TorchEngine:
    engine = TorchEngine(gpt_job(**changes), options=EngineOptions(meter_memory=False))
    if BF16 not in engine.space.precisions:
        pytest.skip("bf16 has no fast path on this machine")
    engine.run(3)
    return engine


def test_gradient_under_a_plan_is_repeatable_and_leaves_training_unchanged() -> None:
    engine, untouched = engine_of(), engine_of()
    plan = engine.space.baseline()
    first, second = engine.gradient(plan), engine.gradient(plan)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert engine.plan == plan
    assert engine.run(3).loss == untouched.run(3).loss


def test_errors_are_small_positive_and_additive() -> None:
    engine = engine_of()
    errors = squared_errors(engine)
    assert set(errors) == {unit.name for unit in engine.space.units}
    singles = [entry["bf16"] for entry in errors.values()]
    assert all(0 <= error < 0.05 for error in singles)
    assert any(error > 0 for error in singles)
    exact = engine.gradient(engine.space.baseline())
    lowered = engine.gradient(engine.space.plan(accumulation_steps=1, precision=BF16))
    size = sum(float(gradient.double().square().sum()) for gradient in exact)
    whole = sum(float((two.double() - one.double()).square().sum()) for one, two in zip(exact, lowered, strict=True))
    # Rounding errors of different units are nearly independent, at this width up to a factor of a few.
    assert 0.2 < (whole / size) / sum(singles) < 5


class OtherMasks(tiny_job.Block):
    """A block whose dropout draws other masks in other formats, as a GPU's does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x))
        torch.rand(y.element_size())
        attended = F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None], dropout_p=0.3)[:, 0]
        return x + F.dropout(self.down(F.gelu(attended)), 0.3)


def test_masks_of_dropout_do_not_count_as_errors_of_a_precision() -> None:
    def model() -> nn.Module:
        network = tiny_job.Network()
        network.blocks = nn.ModuleList(OtherMasks() for _ in range(3))
        return network

    engine = TorchEngine(tiny_job.make(model=model), options=EngineOptions(meter_memory=False))
    if BF16 not in engine.space.precisions:
        pytest.skip("bf16 has no fast path on this machine")
    masked = squared_errors(engine)
    assert all(0 < masked[f"blocks.{number}"]["bf16"] < 1e-3 for number in range(3)), masked


def test_convergence_model_of_a_real_job_describes_its_runs(tmp_path: Path) -> None:
    job = gpt_job(max_steps=60, target=1.0)
    model = measure_convergence(job)
    assert model.runs == 2
    assert model.steps == 2 * 36
    assert model.loss_error_frac < 0.2
    assert set(model.squared_errors) <= {unit.name for unit in TorchEngine(job).space.units}
    first, path, cached = cached_convergence(job, tmp_path)
    assert not cached
    again, _, cached = cached_convergence(job, tmp_path)
    assert cached
    assert again == first
    assert path.is_file()


def test_runs_of_an_adaptive_job_differ_in_k() -> None:
    model = measure_convergence(gpt_job(batching="adaptive", max_steps=48))
    assert model.runs == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trained", [8, 40])
def test_noise_scale_of_charlm_matches_a_careful_estimate_at_frozen_weights(trained: int) -> None:
    job = load_job("charlm")
    teacher = TorchEngine(job, options=EngineOptions(meter_memory=False, statistics_every=None))
    teacher.run(trained)
    frozen = copy.deepcopy(teacher.model)
    careful = careful_noise_scale(job, frozen, batches=16)
    still = dataclasses.replace(
        job,
        model=lambda: copy.deepcopy(frozen),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        schedule=None,
    )
    engine = TorchEngine(still, seed=5, options=EngineOptions(meter_memory=False, statistics_every=1))
    engine.apply(engine.space.baseline().changed(accumulation_steps=4))
    estimate = engine.run(24).gradient
    assert estimate is not None
    assert estimate.noise_scale is not None
    assert abs(math.log2(estimate.noise_scale / careful)) < 1


def careful_noise_scale(job, model, batches: int) -> float:
    """Return tr(Sigma)/|G|^2 from the gradients of single samples, all of them kept: no two batch sizes involved."""
    model.train()
    parameters = list(model.parameters())
    stream = job.batches(77)
    total, squares, count = [torch.zeros_like(p, dtype=torch.float64) for p in parameters], 0.0, 0
    for _ in range(batches):
        batch = next(stream)
        for sample in split(batch, len(tensors(batch)[0])):
            gradients = torch.autograd.grad(job.loss(model, sample), parameters)
            for sum_, gradient in zip(total, gradients, strict=True):
                sum_ += gradient.double()
            squares += sum(float(gradient.double().square().sum()) for gradient in gradients)
            count += 1
    mean_square = sum(float((sum_ / count).square().sum()) for sum_ in total)
    trace = (squares - count * mean_square) / (count - 1)
    return trace / (mean_square - trace / count)
