"""Tests of the memory meter: exact for known cases, close to the kernel's count for others."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import TinyGPT

from autotune import EngineOptions, Plan, PlanSpace, TorchEngine, load_job
from autotune.mechanics.devices import is_out_of_memory
from autotune.mechanics.known_precisions import PRECISIONS_VARIABLE
from autotune.mechanics.memory_meter import (
    MemoryMeter,
    resident_tensors,
    tensor_bytes,
)

CPU = torch.device("cpu")
KIB = 1024


def peak_of(body, resident=()) -> int:
    meter = MemoryMeter(CPU)
    with meter.metering(resident):
        body()
    assert meter.peak_bytes is not None
    return meter.peak_bytes


def block(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_simultaneous_tensors_add_up():
    def body() -> None:
        kept = [block(64), block(32), block(16)]
        assert len(kept) == 3

    assert peak_of(body) == 112 * KIB


def test_consecutive_tensors_do_not_add_up():
    def body() -> None:
        for kib in (64, 96, 32):
            block(kib)

    assert peak_of(body) == 96 * KIB


def test_garbage_of_an_earlier_step_is_not_subtracted_from_a_later_one() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me, self.held = self, block(512)

    def later() -> None:
        first = block(64)
        # Enough objects to trigger a collection of every generation if collection were on.
        for _ in range(200_000):
            _ = Cycle.__new__(Cycle)
            _.me = _  # type: ignore[attr-defined]
        assert first is not None
        block(64)

    gc.collect()
    peak_of(Cycle)
    assert peak_of(later) == 128 * KIB
    assert gc.isenabled()


def test_peak_is_the_largest_intermediate_sum():
    def body() -> None:
        first = block(64)
        second = block(64)
        del first
        third = block(32)
        del second
        fourth = block(8)
        assert third.numel() + fourth.numel() == 40 * KIB

    assert peak_of(body) == 128 * KIB


def test_memory_alive_before_the_body_is_counted():
    resident = [block(50), block(14)]
    assert peak_of(lambda: block(64), resident) == 128 * KIB


def test_memory_freed_during_the_body_never_makes_the_peak_too_low():
    held = [block(64)]

    def body() -> None:
        held.clear()
        kept = [block(48), block(32)]
        assert len(kept) == 2

    assert peak_of(body, held) >= 80 * KIB


def test_peak_of_a_body_without_allocations_is_the_memory_alive():
    assert peak_of(lambda: None, [block(10)]) == 10 * KIB
    assert peak_of(lambda: None) == 0


def test_activations_of_a_chain_are_counted_exactly():
    parameter = torch.ones(16 * KIB, requires_grad=True)

    def body() -> None:
        # Two kept results of 64 KiB, and the scalar of the sum.
        value = parameter.exp().exp()
        assert value.requires_grad

    assert peak_of(body, [parameter]) == 3 * 64 * KIB


def test_peak_is_the_largest_of_all_metered_bodies_until_reset():
    meter = MemoryMeter(CPU)
    seen = []
    for kib in (32, 64, 16):
        with meter.metering([]):
            block(kib)
        seen.append(meter.peak_bytes)
    assert seen == [32 * KIB, 64 * KIB, 64 * KIB]
    meter.reset()
    assert meter.peak_bytes is None


def test_exception_leaves_the_peak_unknown_and_the_meter_usable():
    meter = MemoryMeter(CPU)
    with pytest.raises(KeyError, match="user"), meter.metering([]):
        raise KeyError("user")
    assert meter.peak_bytes is None
    with meter.metering([]):
        block(8)
    assert meter.peak_bytes == 8 * KIB


@pytest.mark.parametrize("level", [None, "3"])
def test_metering_leaves_the_environment_unchanged(level, monkeypatch: pytest.MonkeyPatch):
    if level is None:
        monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    else:
        monkeypatch.setenv("KINETO_LOG_LEVEL", level)
    peak_of(lambda: block(1))
    assert os.environ.get("KINETO_LOG_LEVEL") == level


def test_metering_prints_nothing(capfd: pytest.CaptureFixture[str]):
    peak_of(lambda: block(1))
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_metering_draws_no_random_numbers():
    before = torch.get_rng_state()
    peak_of(lambda: block(1))
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------- what lives before


def test_storage_shared_by_several_tensors_counts_once():
    base = torch.zeros(KIB, dtype=torch.float32)
    assert tensor_bytes([base, base.view(2, -1), base[10:], base.detach()]) == 4 * KIB
    assert tensor_bytes([base, base.clone()]) == 8 * KIB
    assert tensor_bytes([]) == 0


def test_view_counts_as_the_whole_storage_it_keeps_alive():
    assert tensor_bytes([torch.zeros(KIB)[:1]]) == 4 * KIB


def test_resident_memory_includes_all_persistent_tensors_and_tied_weights_once():
    model = TinyGPT()
    model.register_buffer("table", torch.zeros(100))
    model.head.weight = model.embedding.weight
    optimizer = torch.optim.AdamW(model.parameters())
    batch = {"inputs": torch.zeros(3, 2), "nested": [torch.zeros(5)], "text": "x"}
    parameters = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert tensor_bytes(resident_tensors(model, optimizer, batch)) == parameters + 4 * 100 + 4 * 11
    model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    assert tensor_bytes(resident_tensors(model, optimizer, [])) == 2 * parameters + 4 * 100
    optimizer.step()
    optimizer.zero_grad()
    # Two moments a parameter and a step count of four bytes each.
    counts = 4 * len(list(model.parameters()))
    assert tensor_bytes(resident_tensors(model, optimizer, [])) == 3 * parameters + counts + 4 * 100


# ----------------------------------------------------------------------------------------------- out of memory


def allocation_error() -> RuntimeError:
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        torch.empty(2**60, dtype=torch.uint8)
    return raised.value


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("can't allocate memory"), False),
        (KeyError("x"), False),
    ],
    ids=str,
)
def test_out_of_memory_is_distinguished_from_other_errors(error, expected):
    assert is_out_of_memory(error) is expected


def test_host_allocation_error_of_torch_is_out_of_memory():
    assert is_out_of_memory(allocation_error())


# -------------------------------------------------------------------------------------------- the kernel's count


def peaks_of(job: str, plan: Plan, space: PlanSpace) -> dict[str, int]:
    """Return the peaks measured in a new process, which takes this one's word for the useful precisions."""
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "16384",
        "OMP_NUM_THREADS": "1",
        PRECISIONS_VARIABLE: ",".join(map(str, space.precisions)),
        "PYTHONPATH": os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, here / "peak_of_a_plan.py", job, json.dumps(plan.to_json())],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["charlm", "digits"])
@pytest.mark.usefixtures("measuring_precisions")
def test_metered_peak_is_within_3_percent_of_the_kernel_for_4_random_plans(name):
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("/proc/self/clear_refs cannot be written on this system")
    job = load_job(name)
    space = TorchEngine(job, options=EngineOptions(meter_memory=False)).space
    generator = np.random.default_rng(0)
    differences = []
    # Each plan is trained in its own process, which takes a while.
    for _ in range(4):
        plan = space.sample(generator)
        peaks = peaks_of(name, plan, space)
        assert peaks["by_kernel_bytes"] > peaks["static_bytes"] > 0
        differences.append(peaks["by_meter_bytes"] / peaks["by_kernel_bytes"] - 1)
    print(f"{name}: median {np.median(np.abs(differences)):.4f}, worst {np.max(np.abs(differences)):.4f}")  # noqa: T201
    assert max(map(abs, differences)) <= 0.03
