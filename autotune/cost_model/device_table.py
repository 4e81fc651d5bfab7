"""Published figures of devices, for planning without the device, and the GPU memory that torch reserves.

Rates are those of dense matrix products with fp32 accumulation: half of what a data sheet gives with sparsity. ``fp32``
is the rate of ordinary fp32 arithmetic. ``tf32`` is the rate of fp32 products that torch rounds to TF32: by default
only convolutions on NVIDIA; matrix products on request.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autotune.cost_model.measured_rates import MeasuredRates
from autotune.errors import InputError
from autotune.plan import Precision

_GB = 10**9
_KIB, _MIB = 2**10, 2**20
_TERA = 1e12
# Shares of the published peaks that single kernels reach, and the time of a kernel launch: assumptions, not
# measurements of these devices. Whole training steps are reported to use 21 to 46 % of the peak (Chowdhery et al.
# 2022, arXiv:2204.02311, table 3), so estimates tend to be too fast.
_COMPUTE_SHARE = 0.6
_BANDWIDTH_SHARE = 0.8
_LAUNCH_S = 4e-6
# The caching allocator rounds every block up to a multiple of this, on CUDA and on ROCm. Source: kMinBlockSize in
# torch's c10/core/AllocatorConfig.h.
_BLOCK_BYTES = 512
# Each thread that runs matrix products keeps a workspace in the caching allocator's memory until the process ends: the
# forward thread and the backward thread. Source: aten/src/ATen/cuda/CublasHandlePool.cpp of torch 2.13.
_THREADS = 2
# The workspace that cuBLAS and cuBLASLt share: 32 MiB on Hopper and, since pytorch/pytorch#175344, on Blackwell;
# ":4096:2:16:8" on older devices, and on Blackwell before.
_HOPPER_WORKSPACE = _THREADS * 32 * _MIB
_AMPERE_WORKSPACE = _THREADS * (2 * 4096 + 8 * 16) * _KIB
# The workspace of hipBLASLt, which torch prefers on CDNA 3 and 4 (80 MiB after torch 2.13, pytorch/pytorch#197201).
# Products that it does not support go to hipBLAS, which would keep another 128 MiB per thread.
_CDNA_WORKSPACE = _THREADS * 76 * _MIB
# The driver's context and its loaded kernels, which no allocator counts. An assumption: 300 MB are reported before most
# kernels are loaded (pytorch/pytorch#107667), and every library in use adds more.
_CONTEXT_BYTES = 500 * 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Published figures of one device, and the memory that torch reserves on it.

    Attributes:
        name: name of the device.
        memory_bytes: memory capacity.
        bandwidth: memory bandwidth in bytes per second.
        flops: peak floating-point operations per second, by precision; only precisions with a fast path.
        source: where the figures are published.
        tf32: peak rate of fp32 products that are rounded to TF32; ``None`` for a device without TF32.
        tf32_convolutions: whether convolutions use TF32 by default.
        block_bytes: the allocator rounds every block up to a multiple of this; 1 if it does not round, as on a CPU.
        workspace_bytes: bytes that matrix products keep allocated.
        context_bytes: bytes of the capacity that the driver uses and no allocator counts.
        is_cpu: whether it is a processor, not an accelerator.
        measured: the rates of its operators, if they were measured.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: Mapping[Precision, float]
    source: str
    tf32: float | None = None
    tf32_convolutions: bool = False
    block_bytes: int = 1
    workspace_bytes: int = 0
    context_bytes: int = 0
    is_cpu: bool = False
    measured: MeasuredRates | None = None

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Return fp32 and the device's best 16-bit precision: bf16 if supported, otherwise fp16."""
        return (Precision.FP32, *[one for one in (Precision.BF16, Precision.FP16) if one in self.flops][:1])

    @property
    def usable_bytes(self) -> int:
        """Return the capacity that is left for the allocator."""
        return self.memory_bytes - self.context_bytes

    def allocated(self, size_bytes: int) -> int:
        """Return the bytes that the allocator counts for a block."""
        return -(-size_bytes // self.block_bytes) * self.block_bytes

    def seconds(self, operations: float, moved_bytes: float, precision: Precision, *, tf32: bool = False) -> float:
        """Return the estimated seconds of one operator: the larger of compute and memory time, plus its launch.

        Args:
            operations: floating-point operations.
            moved_bytes: bytes read and written.
            precision: the format of the computation.
            tf32: whether torch may round fp32 to TF32.

        Source: the roofline model (Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785).
        """
        rate = self.flops.get(precision, self.flops[Precision.FP32])
        if tf32 and precision is Precision.FP32 and self.tf32 is not None:
            rate = self.tf32
        computing, moving = operations / (rate * _COMPUTE_SHARE), moved_bytes / (self.bandwidth * _BANDWIDTH_SHARE)
        return max(computing, moving) + _LAUNCH_S


def _gpu(
    name: str,
    memory_gb: float,
    bandwidth_gb: float,
    source: str,
    *,
    workspace: int,
    fp32: float,
    fp16: float,
    tf32: float | None = None,
    bf16: bool = True,
) -> DeviceSpec:
    """Return a GPU, given its rates in TFLOP/s; bf16, if the device has it, is as fast as fp16."""
    rates = {Precision.FP32: fp32, **({Precision.BF16: fp16} if bf16 else {}), Precision.FP16: fp16}
    return DeviceSpec(
        name=name,
        memory_bytes=int(memory_gb * _GB),
        bandwidth=bandwidth_gb * _GB,
        flops={precision: rate * _TERA for precision, rate in rates.items()},
        source=source,
        tf32=None if tf32 is None else tf32 * _TERA,
        # MIOpen does not round to TF32 by default.
        tf32_convolutions=name.startswith("NVIDIA"),
        block_bytes=_BLOCK_BYTES,
        workspace_bytes=workspace,
        context_bytes=_CONTEXT_BYTES,
    )


# A device of Hopper or Blackwell, an older one of NVIDIA, and one of AMD.
_hopper = functools.partial(_gpu, workspace=_HOPPER_WORKSPACE)
_ampere = functools.partial(_gpu, workspace=_AMPERE_WORKSPACE)
_cdna = functools.partial(_gpu, workspace=_CDNA_WORKSPACE)
DEVICES: Mapping[str, DeviceSpec] = MappingProxyType(
    {
        "gb200": _hopper(
            "NVIDIA GB200", 186, 8000, "NVIDIA Blackwell datasheet, GB200 NVL72, per GPU", fp32=80, tf32=1250, fp16=2500
        ),
        "b200": _hopper(
            "NVIDIA B200", 180, 7700, "NVIDIA Blackwell datasheet, HGX B200, per GPU", fp32=75, tf32=1100, fp16=2250
        ),
        "h200": _hopper(
            "NVIDIA H200 SXM", 141, 4800, "NVIDIA H200 Tensor Core GPU datasheet", fp32=67, tf32=494.5, fp16=989.5
        ),
        "h100": _hopper(
            "NVIDIA H100 SXM", 80, 3350, "NVIDIA H100 Tensor Core GPU datasheet", fp32=67, tf32=494.5, fp16=989.5
        ),
        "a100": _ampere(
            "NVIDIA A100 80GB SXM", 80, 2039, "NVIDIA A100 Tensor Core GPU datasheet", fp32=19.5, tf32=156, fp16=312
        ),
        "a100-40gb": _ampere(
            "NVIDIA A100 40GB SXM", 40, 1555, "NVIDIA A100 Tensor Core GPU datasheet", fp32=19.5, tf32=156, fp16=312
        ),
        "l40s": _ampere("NVIDIA L40S", 48, 864, "NVIDIA L40S datasheet", fp32=91.6, tf32=183, fp16=362),
        "l4": _ampere("NVIDIA L4", 24, 300, "NVIDIA L4 Tensor Core GPU datasheet", fp32=30.3, tf32=60, fp16=121),
        "rtx5090": _hopper(
            "NVIDIA GeForce RTX 5090",
            32,
            1792,
            "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A",
            fp32=104.8,
            tf32=104.8,
            fp16=209.5,
        ),
        "rtx4090": _ampere(
            "NVIDIA GeForce RTX 4090",
            24,
            1008,
            "NVIDIA Ada GPU architecture whitepaper, appendix A",
            fp32=82.6,
            tf32=82.6,
            fp16=165.2,
        ),
        "rtx3090": _ampere(
            "NVIDIA GeForce RTX 3090",
            24,
            936,
            "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A",
            fp32=35.6,
            tf32=35.6,
            fp16=71,
        ),
        "v100": _ampere(
            "NVIDIA V100 SXM2 32GB", 32, 900, "NVIDIA V100 Tensor Core GPU datasheet", fp32=15.7, fp16=125, bf16=False
        ),
        "t4": _ampere("NVIDIA T4", 16, 320, "NVIDIA T4 Tensor Core GPU datasheet", fp32=8.1, fp16=65, bf16=False),
        # CDNA 4 matrix cores have no TF32; libraries emulate it with bf16, at an unpublished rate.
        "mi355x": _cdna(
            "AMD Instinct MI355X", 288, 8000, "AMD CDNA 4 architecture white paper, table 2", fp32=157.3, fp16=2500
        ),
        "mi325x": _cdna(
            "AMD Instinct MI325X", 256, 6000, "AMD Instinct MI325X data sheet", fp32=163.4, tf32=653.7, fp16=1307.4
        ),
        "mi300x": _cdna(
            "AMD Instinct MI300X", 192, 5300, "AMD Instinct MI300X data sheet", fp32=163.4, tf32=653.7, fp16=1307.4
        ),
    }
)
# Results of ``torch.cuda.get_device_name()`` that are neither a key nor a name of the table.
_REPORTED = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "Tesla V100-SXM2-32GB": "v100",
}
# Words and characters that do not distinguish devices; a virtual function (VF) of an MI300X is a whole device.
_WORDLESS = re.compile(r"\b(nvidia|geforce|tesla|amd|instinct|oam|vf)\b|\brtx|[^a-z0-9]")


def _bare(name: str) -> str:
    return _WORDLESS.sub("", name.lower())


_KEYS = {_bare(name): key for key, spec in DEVICES.items() for name in (key, spec.name)} | {
    _bare(name): key for name, key in _REPORTED.items()
}


def find_device(name: str) -> DeviceSpec:
    """Return the figures of a device.

    Args:
        name: key in the table, or result of ``torch.cuda.get_device_name()``; vendor and brand may be left out, as in
            ``RTX 4090`` or ``4090``.

    Raises:
        InputError: if the device is not in the table.
    """
    key = _KEYS.get(_bare(name))
    if key is None:
        raise InputError(f"device is {name!r}", where="--device", allowed=DEVICES, given=name)
    return DEVICES[key]
