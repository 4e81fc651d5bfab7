"""Tests of the profiler on real models: predictions of unseen plans match engine measurements."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_jobs import convolution_job, gpt_job, perceptron_job
from small_models import has_bf16_lstm
from torch import nn

from autotune import Job, TorchEngine
from autotune.choices import REDUCED_PRECISIONS
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.profile import Profile
from autotune.cost_model.time_model import seconds_per_step
from autotune.engines.torch_engine import EngineOptions
from autotune.errors import ProfileError
from autotune.io.files import write_json
from autotune.mechanics import known_precisions
from autotune.mechanics.step_trace import rest_of
from autotune.profiling.job_shape import fixed_shape, profile_key
from autotune.profiling.profile_cache import cached_profile, find_profile, read_profile, validate
from autotune.profiling.profiler import ProfilerOptions, profile

QUICK = ProfilerOptions(seconds=1.0, max_rounds=2, calibration_plans=3)
# For what is done with a profile, whatever it says.
BRIEF = ProfilerOptions(seconds=0.1, max_rounds=1, call_checks=1, calibration_plans=1)


def profiled(job: Job) -> Profile:
    return profile(job, device_name="here", fingerprint="x", options=QUICK)


def memory_errors(job: Job, found: Profile, plans: int = 8) -> np.ndarray:
    """Return predicted over metered peak, minus 1, of random plans."""
    engine = TorchEngine(fixed_shape(job), seed=1, options=EngineOptions(statistics_every=None))
    engine.run(1)
    generator = np.random.default_rng(7)
    errors = []
    for _ in range(plans):
        plan = found.space.sample(generator)
        engine.apply(plan)
        errors.append(peak_bytes(found, plan) / engine.run(1).peak_bytes - 1)
    return np.array(errors)


class Recurrent(nn.Module):
    """A stack of recurrent layers whose state passes through a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values, _ = layer(values)
        return self.head(values[:, -1])


class Skipping(nn.Module):
    """A model that adds an early activation to a late one, as U-shaped networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](values)
        middle = self.blocks[2](self.blocks[1](first))
        return self.blocks[3](middle + first)


class Shared(nn.Module):
    """A model that runs the same blocks twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            values = block(values)
        return values


def job_of(model: type[nn.Module], *shape: int) -> Job:
    def batches(seed: int):
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randn(64, *shape, generator=generator)

    return Job(
        name=model.__name__,
        model=model,
        batches=batches,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        evaluate=lambda model: 1.0,
        target=0.0,
        batch_size=64,
        accumulation_choices=(1, 4),
    )


@pytest.mark.parametrize(
    ("job", "largest"),
    [
        (gpt_job(), 0.02),
        pytest.param(convolution_job(), 0.02, marks=pytest.mark.slow),
        (job_of(Recurrent, 12, 16), 0.02),
        # A skip tensor is counted until the backward pass has passed its first user.
        pytest.param(job_of(Skipping, 32), 0.05, marks=pytest.mark.slow),
        pytest.param(job_of(Shared, 32), 0.02, marks=pytest.mark.slow),
    ],
    ids=["gpt", "batch norm", "lstm", "skip", "twice"],
)
def test_peak_of_unseen_plans_is_predicted_and_never_too_low(job: Job, largest: float, request: pytest.FixtureRequest):
    if job.model is Recurrent and not has_bf16_lstm():
        request.addfinalizer(known_precisions.forget)
        known_precisions.keep("cpu", dict.fromkeys(REDUCED_PRECISIONS, "no kernel of an LSTM"))
    errors = memory_errors(job, profiled(job))
    assert errors.min() >= -0.005
    assert np.median(np.abs(errors)) <= largest
    assert errors.max() <= 4 * largest


def test_predicted_times_match_whole_steps_and_cover_every_choice():
    found = profiled(gpt_job())
    for table in found.tables:
        assert table.update_s > 0
        for segment in table.segments:
            for name, cost in segment.costs.items():
                assert cost.seconds >= 0, (segment.unit, name)
    assert found.noise_frac >= 0
    assert found.steps > 20
    checked = validate(gpt_job(), found, 4)
    assert checked.plans == 4
    assert checked.memory_underprediction_max <= 0.005


def test_units_called_only_sometimes_are_left_out_with_a_warning():
    class Moody(Shared):
        calls = 0

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            Moody.calls += 1
            blocks = list(self.blocks)
            if Moody.calls % 3 == 0:
                del blocks[1]
            for block in blocks:
                values = block(values)
            return values

    job = job_of(Moody, 32)
    found = profiled(job)
    Moody.calls = 0
    names = {unit.name for unit in TorchEngine(job).space.units}
    assert names - {unit.name for unit in found.units} == {"blocks.1"}
    assert "blocks.1" in found.warnings[0]
    # Its plans can still be applied.
    TorchEngine(job).apply(found.space.leanest())


class Sleepy(Shared):
    """A model that takes some milliseconds per unit, and four times as long in steps on a busy machine."""

    steps = 0
    busy = range(0)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        Sleepy.steps += 1
        return super().forward(values)


class SleepyBlock(nn.Linear):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        time.sleep(0.12 if Sleepy.steps in Sleepy.busy else 0.03)
        return super().forward(values)


def sleepy(busy: range) -> Profile:
    def model() -> nn.Module:
        found = Sleepy()
        found.blocks = nn.ModuleList(SleepyBlock(32, 32) for _ in range(4))
        return found

    job = dataclasses.replace(job_of(model, 32), accumulation_choices=(1,))
    made = TorchEngine(job)
    made.close()
    Sleepy.steps, Sleepy.busy = 0, busy
    try:
        return profile(job, device_name="here", fingerprint="x", options=ProfilerOptions.lean())
    finally:
        Sleepy.busy = range(0)


@pytest.mark.slow
@pytest.mark.parametrize("busy", [range(6, 10), range(6, 10**9)], ids=["for a while", "from then on"])
def test_lean_profile_is_timed_again_if_the_machine_was_busy_for_part_of_it(busy: range):
    quiet, disturbed = sleepy(range(0)), sleepy(busy)
    assert quiet.steps < disturbed.steps
    assert not disturbed.warnings
    plans = [
        quiet.space.plan(accumulation_steps=1, precision=precision, recomputed=recomputed)
        for precision in quiet.space.precisions
        for recomputed in ((), quiet.space.recomputable)
    ]
    ratios = [seconds_per_step(disturbed, plan) / seconds_per_step(quiet, plan) for plan in plans]
    # Plans are compared with each other, because a machine that stays busy is slower under all of them.
    assert max(ratios) / min(ratios) < 1.5
    assert busy.stop > quiet.steps or max(ratios) < 1.5


@pytest.mark.slow
def test_lean_profile_with_inconsistent_times_warns():
    # The machine is busy whenever a recomputing plan runs, in both rounds.
    disturbed = sleepy(range(10, 22))
    assert "times that should agree differ by a factor of" in disturbed.warnings[-1]


@pytest.mark.parametrize("batching", ["fixed", "adaptive"])
def test_interpolated_k_is_predicted_as_exactly_as_profiled_k(batching: str):
    job = dataclasses.replace(gpt_job(), batching=batching, accumulation_choices=(1, 2, 3, 4))
    found = profile(job, device_name="here", fingerprint="x", options=ProfilerOptions.lean())
    assert "k = 2, 3 is interpolated from k = 1, 4" in found.warnings
    assert found.accumulation_choices == (1, 2, 3, 4)
    assert found.steps < 40
    engine = TorchEngine(fixed_shape(job), seed=1, options=EngineOptions(statistics_every=None))
    engine.run(1)
    generator = np.random.default_rng(7)
    for number in range(9):
        plan = found.space.sample(generator).changed(accumulation_steps=2 + number % 2)
        if number % 3 == 0:
            plan = plan.changed(precision=dict.fromkeys(plan.precision, found.space.lowest_precision))
        engine.apply(plan)
        share = peak_bytes(found, plan) / engine.run(1).peak_bytes
        # Three micro-batches of four samples have different sizes, and all are assumed as large as the first.
        assert 0.995 <= share <= (1.15 if batching == "fixed" and plan.accumulation_steps == 3 else 1.005), plan


@pytest.mark.slow
@pytest.mark.parametrize("lean", [False, True])
def test_probes_that_run_out_of_memory_become_bounds(lean: bool):
    class Fat(Shared):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            recomputing = "forward" in self.blocks[0].__dict__ and self.blocks[0].forward.storage == "recompute"
            if self.training and len(values) > 32 and not recomputing:
                raise torch.OutOfMemoryError("pretended")
            return super().forward(values)

    job = dataclasses.replace(job_of(Fat, 32), accumulation_choices=(1, 2, 4, 8))
    options = ProfilerOptions.lean() if lean else QUICK
    found = profile(job, device_name="here", fingerprint="x", options=options)
    assert any("k = 1 with fp32/save ends with out_of_memory" in warning for warning in found.warnings)
    baseline = found.space.baseline()
    free = dataclasses.replace(job_of(Shared, 32), accumulation_choices=(1, 2, 4, 8))
    truth = profiled(free)
    assert peak_bytes(found, baseline) == pytest.approx(peak_bytes(truth, baseline), rel=0.05)


def test_profile_is_cached_until_the_job_changes(tmp_path: Path):
    job = perceptron_job(accumulation_choices=(1, 2))
    first, path, cached = cached_profile(job, tmp_path, options=BRIEF)
    assert not cached
    again, same, cached = cached_profile(job, tmp_path, options=BRIEF)
    assert cached
    assert (again, same) == (first, path)
    assert read_profile(path, job) == first
    other = perceptron_job(batch_size=4, accumulation_choices=(1, 2))
    _, elsewhere, cached = cached_profile(other, tmp_path, options=BRIEF)
    assert not cached
    assert elsewhere != path
    with pytest.raises(ProfileError, match=r"was made for job 'perceptron' on .*autotune profile makes one"):
        read_profile(path, other)
    path.write_text("{")
    _, _, cached = cached_profile(job, tmp_path, options=BRIEF)
    assert not cached


def test_lean_profile_takes_fewer_steps_and_never_replaces_a_full_one(tmp_path: Path):
    job = perceptron_job()
    lean, path, _ = cached_profile(job, tmp_path, options=ProfilerOptions.lean())
    full, elsewhere, cached = cached_profile(job, tmp_path, options=ProfilerOptions(seconds=0.1))
    assert not cached
    assert elsewhere != path
    assert lean.steps < 0.4 * full.steps
    # Both kinds of profile trace the same memory.
    for plan in (lean.space.baseline(), lean.space.leanest()):
        assert peak_bytes(lean, plan) == peak_bytes(full, plan)
    # Once there is a full profile, it serves both.
    assert cached_profile(job, tmp_path, options=ProfilerOptions.lean()) == (full, elsewhere, True)
    elsewhere.unlink()
    assert cached_profile(job, tmp_path, options=ProfilerOptions.lean()) == (lean, path, True)
    assert find_profile(job, tmp_path) == lean


def test_profile_of_another_version_names_its_origin(tmp_path: Path):
    path = tmp_path / "profile.json"
    brief = profile(perceptron_job(accumulation_choices=(1,)), device_name="here", options=BRIEF)
    write_json(path, {**brief.to_json(), "version": 99})
    with pytest.raises(ProfileError, match=r"version is 99, made for job 'perceptron' on 'here'"):
        read_profile(path)


def test_profile_key_depends_on_the_model_and_not_on_the_weights():
    assert profile_key(gpt_job(), "a") == profile_key(gpt_job(), "a")
    assert profile_key(gpt_job(), "a") != profile_key(gpt_job(), "b")


WIDTH, CALLS = 2, 0


class Edited(nn.Linear):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values).tanh()


class Again(nn.Linear):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values).exp()


def wide(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).repeat(1, WIDTH).mean()


def counted(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    return model(batch).mean()


def test_profile_key_depends_on_the_code_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(**other: Any) -> str:
        job = Job(
            name="coded",
            model=lambda: Edited(4, 4),
            batches=lambda _seed: iter([torch.ones(2, 4)]),
            loss=wide,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
            evaluate=lambda _model: 0.0,
            batch_size=2,
            accumulation_choices=(1, 2),
        )
        return profile_key(dataclasses.replace(job, **other), "here")

    def scaled(factor: float) -> Callable[..., torch.Tensor]:
        return lambda model, batch: factor * wide(model, batch)

    keys = [key(), key(loss=counted), key(loss=scaled(1.0)), key(loss=scaled(2.0)), key(model=lambda: Again(4, 4))]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]
    # A count that the code itself keeps says nothing about the code.
    counted(Edited(4, 4), torch.ones(2, 4))
    assert key(loss=counted) == keys[1]
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 200)
    assert key() != keys[0]


def test_profile_key_depends_on_what_modules_are_set_to_and_not_on_variables_that_code_assigns() -> None:
    class Configured(nn.Linear):
        def __init__(self, chance: float, attention: str) -> None:
            super().__init__(4, 4)
            self.dropout = nn.Dropout(chance)
            self.config = argparse.Namespace(attention=attention, layers=["full", "full"])

    def key(chance: float = 0.1, attention: str = "eager", count: int = 0) -> str:
        def counting(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return model(batch).mean()

        job = dataclasses.replace(perceptron_job(), model=lambda: Configured(chance, attention), loss=counting)
        return profile_key(job, "here")

    keys = [key(), key(chance=0.0), key(attention="sdpa")]
    assert len(set(keys)) == len(keys)
    assert key(count=5) == keys[0]


KEY = """
from transformers import GPT2Config, GPT2LMHeadModel
from small_jobs import perceptron_job
import dataclasses
from autotune.profiling.job_shape import profile_key

def key(**options):
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=99, bos_token_id=1, eos_token_id=1, **options)
    return profile_key(dataclasses.replace(perceptron_job(), model=lambda: GPT2LMHeadModel(config)), "here")

print(key(), key(attn_pdrop=0.0), key(attn_implementation="eager"))
"""


@pytest.mark.slow
def test_profile_key_of_a_transformer_is_the_same_in_every_process() -> None:
    found = []
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", KEY], env=environment, capture_output=True, text=True, check=True)
        found.append(done.stdout.split())
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


def test_profiling_leaves_nothing_alive() -> None:
    made: list[weakref.ref[nn.Module]] = []

    def model() -> nn.Module:
        found = perceptron_job().model()
        made.append(weakref.ref(found))
        return found

    profile(
        dataclasses.replace(perceptron_job(), model=model),
        device_name="here",
        device="cpu",
        options=ProfilerOptions.lean(0),
    )
    gc.collect()
    assert made
    assert not [one for one in made if one() is not None]


def test_update_time_is_never_negative() -> None:
    seconds = {("forward", 0): 0.25, ("backward", 1): 0.5, ("update", -1): 9.0}
    assert rest_of(1.0, seconds) == 0.25
    # Device events and the host's clock may differ slightly.
    assert rest_of(0.7, seconds) == 0.0
