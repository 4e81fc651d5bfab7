"""Tests of devices that lack features or fail: the error names the feature, and the user's run is unaffected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import device_jobs
import pytest
import torch
from test_accelerator import DEVICE, LIVELY, Loop, _asked_anew, engine  # noqa: F401

import autotune
from autotune.campaign.baselines import measure_references
from autotune.campaign.comparison import pilot
from autotune.cli.main import run
from autotune.engines.torch_engine import TorchEngine
from autotune.engines.tuning_windows import make_engine
from autotune.errors import InputError
from autotune.mechanics import devices, randomness
from autotune.mechanics import known_precisions as known
from autotune.mechanics.precision import excluded_precisions, useful_precisions
from autotune.plan import Precision
from autotune.profiling.profiler import ProfilerOptions, profile

JOB = str(Path(device_jobs.__file__)) + ":job"


@pytest.fixture(autouse=True)
def _precisions_asked_anew() -> Iterator[None]:
    known.forget()
    yield
    known.forget()


def test_jobs_train_on_the_accelerator_if_there_is_one(accelerator: ModuleType) -> None:
    assert devices.device_kind() == DEVICE
    assert devices.device_kind(ranks=2) == ("fake" if torch.accelerator.device_count() > 1 else "cpu")
    assert TorchEngine(device_jobs.make()).device.type == DEVICE
    assert TorchEngine(device_jobs.make(), device="cpu").device.type == "cpu"
    # Places where campaigns measure and where compared runs train.
    assert make_engine(device_jobs.make(), 0).device.type == DEVICE
    accelerator.calls.clear()
    pilot(device_jobs.make(), 100)
    assert accelerator.calls["kernels"] > 0
    accelerator.present(False)
    try:
        assert devices.device_kind() == "cpu"
        with pytest.raises(InputError, match=r"there is no device 'fake' here \(allowed: cpu\)"):
            TorchEngine(device_jobs.make(), device=DEVICE)
    finally:
        accelerator.present(True)


@pytest.mark.parametrize("device", ["cuda", "fake:9", "mps", "nonsense", "fake:"])
def test_absent_device_is_rejected_in_one_line(accelerator: ModuleType, device: str) -> None:
    with pytest.raises(InputError, match="allowed: ") as caught:
        TorchEngine(device_jobs.make(), device=device)
    assert "\n" not in str(caught.value)


def test_doctor_lists_missing_device_features(accelerator: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with accelerator.without("peak statistics", "events", "fp16", "memory info"):
        assert run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["lacks"]) == {"peak statistics", "events", "fp16", "free memory"}
    assert "fp16" not in found["precisions"]
    assert found["settings"]["kind"] == DEVICE


def test_device_without_memory_statistics_trains_and_is_profiled(accelerator: ModuleType) -> None:
    with accelerator.without("statistics", "events", "memory info"):
        known = profile(
            device_jobs.make(accumulation_choices=(1,)),
            device_name="fake",
            device=DEVICE,
            options=ProfilerOptions.lean(0),
        )
        assert known.fragments_bytes == 0
        running = TorchEngine(device_jobs.make(), device=DEVICE)
        window = running.run(3)
        assert window.failure is None
        assert window.peak_bytes is None
        assert window.seconds_per_step is not None
        with pytest.raises(InputError, match="the device does not report the memory of a step"):
            measure_references(running, None)


def test_precision_that_the_device_lacks_is_in_no_plan(accelerator: ModuleType) -> None:
    with accelerator.without("bf16", "fp16"):
        assert useful_precisions(DEVICE) == (Precision.FP32,)
        assert "autocast has no bf16" in excluded_precisions(DEVICE)[Precision.BF16]


def test_attached_run_continues_if_the_device_reports_nothing(accelerator: ModuleType) -> None:
    with accelerator.without("statistics", "memory info", "events"):
        plain = Loop()
        for _ in range(12):
            plain.step()
        loop = Loop()
        tuner = autotune.attach(loop.model, loop.optimizer, runs_dir=None, limits=LIVELY)
        loop.attached(tuner, 12, accelerator)
        assert tuner.attached
        tuner.detach()
    assert all(torch.equal(*pair) for pair in zip(plain.model.parameters(), loop.model.parameters(), strict=True))


def test_lost_device_ends_the_window_and_can_return(accelerator: ModuleType) -> None:
    running = engine()
    running.run(2)
    accelerator.vanish(True)
    with pytest.raises(RuntimeError, match="device lost"):
        # The caller must be told if the state cannot be restored.
        running.run(1)
    accelerator.vanish(False)


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (0, "device 'fake' cannot be used: nothing can be allocated on it"),
        (1, "job 'transformer': model raised OutOfMemoryError"),
        # Before the update and during it.
        (2, "the first step ends with out_of_memory"),
        (4, "the first step ends with out_of_memory"),
    ],
)
def test_profiling_fails_with_one_line_if_another_process_holds_the_memory(
    accelerator: ModuleType, free: int, said: str
) -> None:
    accelerator.capacity(64 * 2**20)
    accelerator.small_segments(64)
    accelerator.others((64 - free) * 2**20)
    with pytest.raises(InputError, match=said) as caught:
        profile(device_jobs.make(), device_name="fake", device=DEVICE, options=ProfilerOptions.lean(0))
    assert "\n" not in str(caught.value)
    assert devices.device_kind() == DEVICE


def test_device_generator_is_saved_and_restored(accelerator: ModuleType) -> None:
    torch.zeros(1, device=DEVICE)
    state = randomness.capture()
    assert state.accelerators
    first = torch.rand(8, device=DEVICE)
    randomness.restore(state)
    assert torch.equal(torch.rand(8, device=DEVICE), first)
    before = torch.rand(8, device=DEVICE)
    randomness.restore(state)
    torch.rand(8, device=DEVICE)
    # Training uses its own generators and leaves the caller's unchanged.
    engine(meter_memory=False).run(2)
    assert torch.equal(torch.rand(8, device=DEVICE), before)


def test_restored_snapshot_is_bit_identical(accelerator: ModuleType) -> None:
    running = engine(meter_memory=False)
    running.run(2)
    kept = running.snapshot()
    running.run(3)
    first = [parameter.detach().clone() for parameter in running.model.parameters()]
    running.restore(kept)
    running.run(3)
    assert all(torch.equal(one, two) for one, two in zip(first, running.model.parameters(), strict=True))
