"""Tests of the tensors between units: fp32 in mixed plans, 16 bits if one 16-bit precision covers the whole model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from small_jobs import adamw, convolution_job, gpt_job, image_batches
from small_models import TinyConvolution
from torch import nn

from autotune import Job, TorchEngine
from autotune.cost_model.cost_arrays import CostArrays, Plans
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.price_solver import PriceSolver
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import samples_of_progress, solve
from autotune.cost_model.time_model import seconds_per_step
from autotune.engines.torch_engine import EngineOptions
from autotune.mechanics import controls
from autotune.plan import Plan, Precision, Storage
from autotune.profiling.profile_cache import validate
from autotune.profiling.profiler import ProfilerOptions, profile

BF16, FP32 = Precision.BF16, Precision.FP32
QUICK = ProfilerOptions(seconds=1.0, max_rounds=2, calibration_plans=3)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = []
        for block in self.blocks:
            x = block(x)
            self.seen.append(x.dtype)
        x = self.head(x)
        self.seen.append(x.dtype)
        return x


def plan_of(*precisions: Precision) -> Plan:
    names = ["blocks.0", "blocks.1", "blocks.2", "head"]
    return Plan(accumulation_steps=1, precision=dict(zip(names, precisions, strict=False)), storage={})


@pytest.mark.parametrize(
    ("plan", "seen"),
    [
        (plan_of(BF16, BF16, BF16, BF16), [torch.bfloat16] * 3 + [torch.float32]),
        (plan_of(BF16, BF16, BF16, FP32), [torch.float32] * 4),
        (plan_of(FP32, FP32, FP32, FP32), [torch.float32] * 4),
        # The head stays in fp32, because it could not take a 16-bit input.
        (plan_of(BF16, BF16, BF16), [torch.float32] * 4),
    ],
)
def test_tensors_pass_in_16_bits_only_if_the_whole_model_uses_one_16_bit_precision(
    plan: Plan, seen: list[torch.dtype]
) -> None:
    model = Stack()
    controls.apply(model, plan)
    model(torch.zeros(2, 8))
    assert model.seen == seen
    controls.apply(model, plan, fp32_borders=True)
    model(torch.zeros(2, 8))
    assert model.seen == [torch.float32] * 4


def wide_convolution(**changes: object) -> Job:
    settings = {
        "model": lambda: TinyConvolution(width=32, blocks=3),
        "batches": lambda seed: image_batches(seed, size=16),
        "batch_size": 16,
        "accumulation_choices": (1, 4),
    }
    job = convolution_job(**{**settings, **changes})
    if BF16 not in TorchEngine(job).space.precisions:
        pytest.skip("bf16 has no fast path on this machine")
    return job


@pytest.mark.slow
def test_uniform_plans_have_their_own_costs_and_are_predicted_exactly(found: Profile) -> None:
    job = wide_convolution()
    assert set(found.uniform_tables) == {"bf16"}
    assert type(found).from_json(found.to_json()) == found
    engine = TorchEngine(job, options=EngineOptions(statistics_every=None))
    engine.run(1)
    for recomputed in ((), found.space.recomputable, found.space.recomputable[:1]):
        for k in (1, 4):
            plan = found.space.plan(accumulation_steps=k, precision=BF16, recomputed=recomputed)
            engine.apply(plan)
            assert peak_bytes(found, plan) == pytest.approx(engine.run(1).peak_bytes, rel=0.01)
    checked = validate(job, found, 8)
    assert checked.memory_error_p95 < 0.02
    assert checked.memory_underprediction_max < 0.005


@pytest.fixture(scope="module")
def found() -> Profile:
    return profile(wide_convolution(), device_name="here", options=QUICK)


def test_solver_uses_the_costs_of_uniform_plans(found: Profile) -> None:
    uniform = found.space.plan(accumulation_steps=1, precision=BF16)
    table = found.uniform_tables["bf16"][0]
    assert found.table_for(uniform) is table
    mixed = uniform.changed(precision={**uniform.precision, "head": FP32})
    assert found.table_for(mixed) is found.tables[0]
    assert peak_bytes(found, uniform) < peak_bytes(found, mixed)
    budget = int(peak_bytes(found, uniform) * 1.02)
    everything = [found.space.decode(list(indices)) for indices in np.ndindex(*found.space.sizes)]
    fitting = [plan for plan in everything if peak_bytes(found, plan) <= budget * 0.995]
    # Under adaptive batching k batches are worth less than k single ones, depending on the noise scale.
    best = min(
        seconds_per_step(found, plan) / samples_of_progress(found, plan.accumulation_steps, None) for plan in fitting
    )
    assert solve(found, budget).seconds_per_sample == pytest.approx(best, rel=1e-6)


def test_cost_arrays_and_price_solver_include_uniform_plans(found: Profile) -> None:
    arrays = CostArrays([found])
    generator = np.random.default_rng(0)
    plans = [found.space.sample(generator) for _ in range(6)]
    plans += [plan.changed(precision=dict.fromkeys(plan.precision, BF16)) for plan in plans]
    encoded = [arrays.encode(0, plan) for plan in plans]
    batch = Plans(np.zeros(12, dtype=np.int64), np.array([k for k, _ in encoded]), np.stack([c for _, c in encoded]))
    assert arrays.peak_bytes(batch).tolist() == [peak_bytes(found, plan) for plan in plans]
    np.testing.assert_allclose(arrays.seconds_per_step(batch), [seconds_per_step(found, plan) for plan in plans])
    leanest = min(peak_bytes(found, plan) for plan in plans)
    chosen, fits = PriceSolver(arrays).solve(np.array([0]), np.array([leanest * 1.01]))
    assert fits[0]
    assert arrays.peak_bytes(chosen)[0] <= leanest * 1.01


def test_model_whose_units_return_fp32_has_no_uniform_costs() -> None:
    found = profile(gpt_job(accumulation_choices=(1,)), device_name="here", options=QUICK)
    assert found.uniform_tables == {}


def test_code_between_units_that_needs_fp32_keeps_fp32_borders() -> None:
    class Strict(TinyConvolution):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(self.stem(x) if x.shape[1] == 1 else x)
                # A product with an fp32 constant, outside any unit.
                x = torch.einsum("bchw,cd->bdhw", x, torch.eye(x.shape[1]))
            return self.head(x.mean((2, 3)))

    job = wide_convolution(model=lambda: Strict(width=32))
    engine = TorchEngine(job)
    assert "does not accept bf16 tensors" in engine.locks["borders"]
    engine.apply(engine.space.plan(accumulation_steps=1, precision=BF16))
    assert engine.run(2).failure is None


def test_recomputation_changes_no_loss_in_uniform_plans() -> None:
    job = dataclasses.replace(wide_convolution(), optimizer=adamw)

    def losses(storage: Storage) -> list[float]:
        engine = TorchEngine(job, options=EngineOptions(meter_memory=False, statistics_every=None))
        recomputed = engine.space.recomputable if storage is Storage.RECOMPUTE else ()
        engine.apply(engine.space.plan(accumulation_steps=1, precision=BF16, recomputed=recomputed))
        return [engine.run(1).loss for _ in range(5)]

    assert losses(Storage.SAVE) == losses(Storage.RECOMPUTE)
