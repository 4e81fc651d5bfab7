"""Tests of the device layer without an accelerator; no other file may name a backend."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import autotune
from autotune.errors import InputError
from autotune.mechanics import devices

PACKAGE = Path(autotune.__file__).parent
BACKENDS = frozenset({"cuda", "hip", "xpu", "mps", "mtia", "hpu", "npu"})
LIBRARIES = frozenset({"nccl", "rccl", "xccl", "hccl"})
LAYER = PACKAGE / "mechanics" / "devices.py"


def named_backends(source: str) -> list[str]:
    """Return the parts of a file's code, without strings, that name a backend."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.removeprefix("is_") in BACKENDS:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            word = node.value.partition(":")[0]
            if word in BACKENDS | LIBRARIES:
                found.append(repr(node.value))
    return found


def test_scan_finds_named_backends() -> None:
    source = 'import torch\ntorch.cuda.synchronize()\nif device.type == "xpu:0" or tensor.is_cuda: init("nccl")'
    assert len(named_backends(source)) == 4


def test_only_the_device_layer_names_a_backend() -> None:
    named = {
        f"{path.relative_to(PACKAGE)}: {found}"
        for path in PACKAGE.rglob("*.py")
        # The per-backend settings of torch are named in the file that restores them.
        if path not in (LAYER, LAYER.with_name("ambient.py"))
        for found in named_backends(path.read_text(encoding="utf-8"))
    }
    assert not named


@pytest.mark.parametrize(
    "said",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "HIP out of memory. Tried to allocate 2.00 GiB",
        "XPU out of memory. Tried to allocate 2.00 GiB",
        "MPS backend out of memory (MPS allocated: 9.0 GB, other allocations: 1 KB, max allowed: 9.07 GB)",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
        "NCCL error: unhandled cuda error\nFailed to CUDA calloc async 608 bytes",
        "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_out_of_memory_error_of_every_backend_is_recognized(said: str) -> None:
    assert devices.is_out_of_memory(RuntimeError(said))
    assert not devices.is_out_of_memory(ValueError(said))


@pytest.mark.parametrize("said", ["shape mismatch", "device-side assert triggered", "invalid device ordinal"])
def test_other_errors_are_not_mistaken_for_out_of_memory(said: str) -> None:
    assert not devices.is_out_of_memory(RuntimeError(said))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", "xpu", "privateuseone", "", "cpu:x", "a b"])
def test_absent_device_is_rejected(device: str) -> None:
    with pytest.raises(InputError, match=r"device .*\(allowed: cpu\)"):
        devices.resolved(device)


def test_cpu_needs_nothing_from_the_device_layer() -> None:
    cpu = devices.resolved("cpu")
    assert not devices.is_accelerator(cpu)
    assert devices.allocated(cpu) is None
    assert devices.free_bytes(cpu) is None
    assert dict(devices.lacks(cpu)) == {}
    assert devices.settings(cpu) == {}
    devices.synchronize(cpu)
    devices.forget_peaks(cpu)
    stamps = [devices.stamp_for(cpu)() for _ in range(3)]
    assert devices.seconds_between(stamps, cpu) == [stamp - stamps[0] for stamp in stamps]


def test_fp32_arithmetic_follows_torch_switches() -> None:
    def shown(device: str) -> str:
        return devices.arithmetic_shown(devices.fp32_arithmetic(device))

    assert shown("cuda") == "fp32, convolutions in tf32"
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert shown("cuda") == "tf32"
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert devices.fp32_arithmetic("cuda") == {"matrix products": "fp32", "convolutions": "tf32"}
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert shown("cpu") == "fp32"
