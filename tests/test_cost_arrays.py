"""Tests that array costs equal the costs of single plans to the byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.cost_model.cost_arrays import CostArrays, Plans
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.time_model import seconds_per_step
from autotune.plan import Precision
from autotune.simulator.random_jobs import Shape, draw_profile

THREE = (Precision.FP32, Precision.BF16, Precision.FP16)


def some_profiles(seed: int):
    generator = np.random.default_rng(seed)
    return [
        draw_profile(generator, Shape(units=units, precisions=precisions, accumulation_choices=ks, batching=batching))
        for units, precisions, ks, batching in (
            (1, THREE[:2], (1, 2, 4), "fixed"),
            (5, THREE, (1,), "fixed"),
            (9, THREE[:2], (1, 2, 4, 8), "adaptive"),
        )
    ]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000))
def test_cost_arrays_equal_the_cost_of_each_plan_to_the_byte(seed: int):
    profiles = some_profiles(seed)
    arrays = CostArrays(profiles, max_units=13)
    generator = np.random.default_rng(seed)
    plans = [(job, profiles[job].space.sample(generator)) for job in generator.integers(0, 3, 12).tolist()]
    encoded = [arrays.encode(job, plan) for job, plan in plans]
    batch = Plans(
        job=np.array([job for job, _ in plans]),
        k=np.array([k for k, _ in encoded]),
        choices=np.stack([choices for _, choices in encoded]),
    )
    peaks, seconds = arrays.peak_bytes(batch), arrays.seconds_per_step(batch)
    for (job, plan), peak, time in zip(plans, peaks, seconds, strict=True):
        assert peak == peak_bytes(profiles[job], plan)
        assert time == pytest.approx(seconds_per_step(profiles[job], plan), rel=1e-12)
    for number, (job, plan) in enumerate(plans):
        assert arrays.decode(job, int(batch.k[number]), batch.choices[number]) == plan


@given(st.integers(0, 1000), st.floats(1.0, 3.0))
@settings(deadline=None, max_examples=20)
def test_longer_sequences_never_cost_less(seed: int, length: float):
    (profile,) = some_profiles(seed)[:1]
    arrays = CostArrays([profile])
    k, choices = arrays.encode(0, profile.space.sample(np.random.default_rng(seed)))
    batch = Plans(job=np.array([0]), k=np.array([k]), choices=choices[None])
    assert arrays.peak_bytes(batch, length) >= arrays.peak_bytes(batch)
    assert arrays.seconds_per_step(batch, length) >= arrays.seconds_per_step(batch)
