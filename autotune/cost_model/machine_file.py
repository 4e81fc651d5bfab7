"""A device whose rates were measured, as ``autotune calibrate`` writes it to a file and ``autotune plan`` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval, Len

from autotune.cost_model.device_table import DeviceSpec
from autotune.cost_model.measured_rates import OTHER, PRODUCT, MeasuredRates, Sample
from autotune.errors import InputError
from autotune.io.documents import Bytes, NotNegative, document, shown, validated
from autotune.io.files import read_json
from autotune.plan import Precision

_VERSION = 2
# Limits within which estimates stay finite: bytes, per second, seconds of one call, digits of the size of a head.
_Size = Annotated[int, Interval(ge=1, le=2**60)]
_Rate = Annotated[float, Interval(ge=1, le=1e24)]
_Overhead = Annotated[float, Interval(ge=0, le=3600)]
_Time = Annotated[float, Interval(ge=1e-9, le=3600)]
_DIGITS, _LONGEST = 5, 200
_COMPUTED = {Precision.FP32, Precision.BF16, Precision.FP16}
_NUMBERS = ("memory_bytes", "bandwidth", "block_bytes", "workspace_bytes", "context_bytes")


def to_json(device: DeviceSpec, *, threads: int, torch_version: str) -> dict[str, Any]:
    """Return a calibrated device as a JSON object.

    Args:
        device: the device, with measured rates.
        threads: the threads of a CPU that computed.
        torch_version: torch's version, whose kernels were measured.
    """
    assert device.measured is not None
    return {
        "calibration": _VERSION,
        "device": device.name,
        "is_cpu": device.is_cpu,
        "threads": threads,
        "torch": torch_version,
        **{name: getattr(device, name) for name in _NUMBERS},
        "flops": {str(precision): rate for precision, rate in device.flops.items()},
        "rates": device.measured.to_json(),
    }


def is_machine_file(name: str) -> bool:
    """Return whether a device is named by a file of ``autotune calibrate``."""
    return name.lower().endswith(".json")


def load(path: Path) -> DeviceSpec:
    """Return the device of a file.

    Raises:
        InputError: if the file is not one of ``autotune calibrate``.
    """
    values = read_json(path)
    version = values.get("calibration")
    if type(version) is not int or version != _VERSION:
        told = "a file of this version: run autotune calibrate again"
        raise InputError(f"calibration is {shown(version)}", where=str(path), allowed=told)
    found = validated(_Machine, values, where=str(path))
    return DeviceSpec(
        name=found.device,
        flops=found.flops,
        source=f"autotune calibrate, with {found.threads} thread(s) and torch {found.torch}",
        is_cpu=found.is_cpu,
        measured=found.rates.measured,
        **{name: getattr(found, name) for name in _NUMBERS},
    )


@document
class _Rates:
    call_s: _Overhead
    recompute_s: _Overhead
    alike: Mapping[str, str]
    samples: Mapping[str, Mapping[str, Annotated[list[tuple[NotNegative, NotNegative, _Time]], Len(1)]]]

    def __post_init__(self) -> None:
        for operator, formats in self.samples.items():
            base, _, variant = operator.partition("/")
            sizes = "convolution" in base or (variant.isdecimal() and len(variant) <= _DIGITS and int(variant) > 0)
            if not formats or ("/" in operator and not (variant.isascii() and sizes)):
                raise _wrong(f"operator {shown(operator)}", "a name and, for attention, /SIZE, with calls in a format")
        if not {PRODUCT, OTHER} <= self.alike.keys() or not self.samples.keys() >= {*self.alike.values()}:
            raise _wrong("alike", f"a measured operator for each kind, among them {PRODUCT} and {OTHER}")
        for kind, amount in ((PRODUCT, "operations"), (OTHER, "moved bytes")):
            if not all(one[kind == OTHER] for known in self.samples[self.alike[kind]].values() for one in known):
                raise _wrong(f"samples of {shown(self.alike[kind])}", f"{amount} above 0")

    @property
    def measured(self) -> MeasuredRates:
        samples = {
            name: {dtype: tuple(Sample(*one) for one in known) for dtype, known in formats.items()}
            for name, formats in self.samples.items()
        }
        return MeasuredRates(samples=samples, alike=self.alike, call_s=self.call_s, recompute_s=self.recompute_s)


@document
class _Machine:
    calibration: int
    device: str
    is_cpu: bool
    threads: Annotated[int, Interval(ge=1, le=2**16)]
    torch: str
    memory_bytes: _Size
    bandwidth: _Rate
    block_bytes: _Size
    workspace_bytes: Bytes
    context_bytes: Bytes
    flops: Mapping[Precision, _Rate]
    rates: _Rates

    def __post_init__(self) -> None:
        for name in ("device", "torch"):
            value = getattr(self, name)
            if not value.strip() or not value.isprintable() or len(value) > _LONGEST:
                raise _wrong(f"{name} is {shown(value)}", f"printable text of at most {_LONGEST} characters")
        if Precision.FP32 not in self.flops or not self.flops.keys() <= _COMPUTED:
            raise _wrong(f"flops are of {[str(one) for one in self.flops]}", "fp32, bf16, fp16, with fp32 among them")
        if self.context_bytes >= self.memory_bytes:
            raise _wrong(f"context_bytes is {self.context_bytes}", "less than memory_bytes")


def _wrong(problem: str, allowed: str) -> InputError:
    return InputError(problem, where="calibration", allowed=allowed)
