"""Tests of switching plans during a run: bit-identical results and exact counts."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from small_jobs import (
    UNMETERED,
    convolution_job,
    differences,
    gpt_job,
    perceptron_job,
    squared_loss,
    training_state,
    vector_batches,
)
from torch import nn

from autotune import Job, Plan, Precision, Storage, TorchEngine
from autotune.choices import EXACT_STORAGES

# Those that a CPU can have.
STORAGES = tuple(one for one in EXACT_STORAGES if not (one.needs_accelerator or one.keeps_gathered))

# The quick tests switch as often as suffices to switch every unit many times; the slow ones a thousand times.
QUICK, MANY = 100, 1000


def switched_and_plain(job: Job, precision: Precision, switches: int) -> None:
    """Train twice, once with random storage changes before every step, and compare all states."""
    job = dataclasses.replace(job, storages=STORAGES)
    plain, switched = (TorchEngine(job, seed=3, options=UNMETERED) for _ in range(2))
    base = plain.space.plan(accumulation_steps=1, precision=precision)
    plain.apply(base)
    generator = np.random.default_rng(0)
    expected_counts = dict.fromkeys(plain.space.recomputable, 0)
    plans: list[Plan] = []
    for step in range(switches):
        drawn = generator.integers(len(STORAGES), size=len(expected_counts))
        storage = {name: STORAGES[choice] for name, choice in zip(expected_counts, drawn, strict=True)}
        switched.apply(base.changed(storage=storage))
        plans.append(switched.plan)
        for name, choice in storage.items():
            expected_counts[name] += choice is Storage.RECOMPUTE
        first, second = plain.run(1), switched.run(1)
        assert (first.loss, first.failure) == (second.loss, second.failure), f"step {step}"
        assert first.failure is None
        if step % 100 == 99:
            assert differences(training_state(plain), training_state(switched)) == [], f"step {step}"
    # The switches happened, and each recomputed the right units.
    assert sum(one != other for one, other in pairwise(plans)) >= switches / 2
    counted = switched.recomputations()
    assert {name: counted[name] for name in expected_counts} == expected_counts
    assert min(expected_counts.values()) >= switches / (2 * len(STORAGES))
    assert sum(plain.recomputations().values()) == 0


def test_storage_switches_with_dropout_and_adamw_change_nothing():
    switched_and_plain(gpt_job(), Precision.FP32, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_1000_storage_switches_with_dropout_and_adamw_change_nothing(precision):
    switched_and_plain(gpt_job(), precision, MANY)


def test_storage_switches_with_batch_norm_change_nothing():
    switched_and_plain(convolution_job(), Precision.BF16, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_1000_storage_switches_with_batch_norm_change_nothing(precision):
    switched_and_plain(convolution_job(), precision, MANY)


def test_backward_recomputes_once_per_micro_batch():
    engine = TorchEngine(gpt_job(), options=UNMETERED)
    plan = engine.space.plan(accumulation_steps=4, precision=Precision.FP32, recomputed=["blocks.1"])
    engine.apply(plan)
    before = [block.num_calls for block in engine.model.blocks]
    engine.run(3)
    assert engine.recomputations()["blocks.1"] == 12
    calls = [block.num_calls - old for block, old in zip(engine.model.blocks, before, strict=True)]
    # Counters updated by recomputation are restored.
    assert calls == [12, 12, 12]


def counting_job(calls: list[int], **changes: Any) -> Job:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            calls.append(len(batch[0]))
        return squared_loss(model, batch)

    return perceptron_job(loss=loss, **changes)


@pytest.mark.parametrize("switches", [QUICK, pytest.param(2 * MANY, marks=pytest.mark.slow)])
def test_micro_batch_counts_are_exact_over_random_switches_of_k(switches):
    calls: list[int] = []
    engine = TorchEngine(counting_job(calls), options=UNMETERED)
    generator = np.random.default_rng(1)
    plans = {k: engine.plan.changed(accumulation_steps=k) for k in (1, 2, 4, 8)}
    applied = []
    for _ in range(switches):
        k = int(generator.choice([1, 2, 4, 8]))
        engine.apply(plans[k])
        calls.clear()
        measured = engine.run(1)
        assert calls == [8 // k] * k
        assert (measured.steps, measured.samples, measured.items) == (1, 8, 8)
        applied.append(k)
    assert sum(one != other for one, other in pairwise(applied)) >= 0.7 * switches
    assert engine.progress.steps == engine.progress.batches == switches


@pytest.mark.parametrize("switches", [QUICK, pytest.param(MANY, marks=pytest.mark.slow)])
def test_adaptive_batching_consumes_k_batches_per_step_over_random_switches_of_k(switches):
    calls: list[int] = []
    engine = TorchEngine(counting_job(calls, batching="adaptive"), options=UNMETERED)
    generator = np.random.default_rng(0)
    consumed = 0
    for _ in range(switches):
        k = int(generator.choice([1, 2, 4, 8]))
        engine.apply(engine.plan.changed(accumulation_steps=k))
        calls.clear()
        measured = engine.run(1)
        consumed += k
        assert calls == [8] * k
        assert measured.samples == 8 * k
    assert engine.progress.batches == consumed


def test_switching_k_under_fixed_batching_does_not_change_training():
    def course(switching: bool) -> dict[str, torch.Tensor]:
        job = perceptron_job(model=lambda: perceptron_job().model().double(), batches=double_batches)
        engine = TorchEngine(job, options=UNMETERED)
        generator = np.random.default_rng(0)
        for _ in range(50):
            if switching:
                k = int(generator.choice([1, 2, 4, 8]))
                engine.apply(engine.plan.changed(accumulation_steps=k))
            assert engine.run(1).failure is None
        return dict(engine.model.named_parameters())

    plain, switched = course(switching=False), course(switching=True)
    for name, value in plain.items():
        torch.testing.assert_close(value, switched[name], rtol=1e-12, atol=1e-12)


def double_batches(seed: int) -> Any:
    return vector_batches(seed, dtype=torch.float64)
