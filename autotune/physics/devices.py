"""Hold what makers publish of their devices, for plans that are made without them.

Peak rates are for dense matrix products with fp32 accumulation; fp32 is the rate of ordinary fp32 arithmetic, since
torch does not use TF32 unless it is asked to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autotune.errors import InputError
from autotune.plan import Precision

_GB = 10**9
_TERA = 1e12
# Shares of the published peaks that single kernels are taken to reach, and what each costs to launch: assumptions,
# not measurements of these devices. Whole training steps are reported to use 21 to 46 % of the peak (Chowdhery et al.
# 2022, arXiv:2204.02311, table 3), so that estimates are rather too fast than too slow.
_COMPUTE_SHARE = 0.6
_BANDWIDTH_SHARE = 0.8
_LAUNCH_S = 4e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Hold the published figures of one device.

    Attributes:
        name: what it is called.
        memory_bytes: capacity.
        bandwidth: of its memory, in bytes per second.
        flops: peak floating-point operations per second, by precision; a precision without a fast path is missing.
        source: where the figures are published.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: Mapping[Precision, float]
    source: str

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Return fp32 and the one 16-bit format that the device does best, bf16 where it can."""
        return (Precision.FP32, Precision.BF16 if Precision.BF16 in self.flops else Precision.FP16)

    def seconds(self, operations: float, moved_bytes: float, precision: Precision) -> float:
        """Return about how long one operator takes: what binds of computing and moving, and its launch.

        Args:
            operations: floating-point operations.
            moved_bytes: bytes that it reads and writes.
            precision: the format that it computes in.

        Source: the roofline model (Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785).
        """
        rate = self.flops.get(precision, self.flops[Precision.FP32])
        computing, moving = operations / (rate * _COMPUTE_SHARE), moved_bytes / (self.bandwidth * _BANDWIDTH_SHARE)
        return max(computing, moving) + _LAUNCH_S


def _spec(name: str, memory_gb: float, bandwidth_gb: float, source: str, **tera: float) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        memory_bytes=int(memory_gb * _GB),
        bandwidth=bandwidth_gb * _GB,
        flops={Precision(key): value * _TERA for key, value in tera.items()},
        source=source,
    )


DEVICES: Mapping[str, DeviceSpec] = MappingProxyType(
    {
        "h200": _spec(
            "NVIDIA H200 SXM", 141, 4800, "NVIDIA H200 Tensor Core GPU datasheet", fp32=67, bf16=989.5, fp16=989.5
        ),
        "h100": _spec(
            "NVIDIA H100 SXM", 80, 3350, "NVIDIA H100 Tensor Core GPU datasheet", fp32=67, bf16=989.5, fp16=989.5
        ),
        "a100": _spec(
            "NVIDIA A100 80GB SXM", 80, 2039, "NVIDIA A100 Tensor Core GPU datasheet", fp32=19.5, bf16=312, fp16=312
        ),
        "a100-40gb": _spec(
            "NVIDIA A100 40GB SXM", 40, 1555, "NVIDIA A100 Tensor Core GPU datasheet", fp32=19.5, bf16=312, fp16=312
        ),
        "l40s": _spec("NVIDIA L40S", 48, 864, "NVIDIA L40S datasheet", fp32=91.6, bf16=362, fp16=362),
        "l4": _spec("NVIDIA L4", 24, 300, "NVIDIA L4 Tensor Core GPU datasheet", fp32=30.3, bf16=121, fp16=121),
        "rtx4090": _spec(
            "NVIDIA GeForce RTX 4090",
            24,
            1008,
            "NVIDIA Ada GPU architecture whitepaper, appendix A",
            fp32=82.6,
            bf16=165.2,
            fp16=165.2,
        ),
        "rtx3090": _spec(
            "NVIDIA GeForce RTX 3090",
            24,
            936,
            "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A",
            fp32=35.6,
            bf16=71,
            fp16=71,
        ),
        "v100": _spec("NVIDIA V100 SXM2 32GB", 32, 900, "NVIDIA V100 Tensor Core GPU datasheet", fp32=15.7, fp16=125),
        "t4": _spec("NVIDIA T4", 16, 320, "NVIDIA T4 Tensor Core GPU datasheet", fp32=8.1, fp16=65),
    }
)


def find_device(name: str) -> DeviceSpec:
    """Return a device's figures.

    Raises:
        InputError: if the device is not in the table.
    """
    if name not in DEVICES:
        raise InputError(f"device is {name!r}", where="--device", allowed=list(DEVICES))
    return DEVICES[name]
