"""A device whose rates were measured, as ``autotune calibrate`` writes it to a file and ``autotune plan`` reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.cost_model.device_table import DeviceSpec
from autotune.cost_model.measured_rates import ALLOWED, MeasuredRates
from autotune.errors import InputError
from autotune.io.files import read_json
from autotune.plan import Precision

_VERSION = 1
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
    document = read_json(path)
    if document.get("calibration") != _VERSION:
        raise InputError("no calibration of this version", where=str(path), allowed=ALLOWED)
    rates = MeasuredRates.from_json(_object(document, "rates", path), str(path))
    try:
        numbers = {name: document[name] for name in _NUMBERS}
        flops = {Precision(name): float(rate) for name, rate in _object(document, "flops", path).items()}
        told = f"autotune calibrate, with {int(document['threads'])} thread(s) and torch {document['torch']}"
        known = Precision.FP32 in flops and all(
            isinstance(value, int | float) and 0 <= value < math.inf for value in (*numbers.values(), *flops.values())
        )
        if not known:
            raise ValueError("numbers are missing")
        return DeviceSpec(
            name=str(document["device"]),
            flops=flops,
            source=told,
            is_cpu=bool(document["is_cpu"]),
            measured=rates,
            **numbers,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"no calibration ({error})", where=str(path), allowed=ALLOWED) from error


def _object(document: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    found = document.get(key)
    if not isinstance(found, Mapping):
        raise InputError(f"{key} is {found!r}", where=str(path), allowed=ALLOWED)
    return found
