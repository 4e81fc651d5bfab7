"""Read the energy that a device has used, with the source of the reading.

GPUs are read through zeus. Processors are read from the kernel's powercap files, because zeus detects counter
wrap-arounds in a separate process that polls once a second: a window that ends before the next poll reads a whole range
too little, and the process loads the measured machine. Readings include everything else that runs on the device.
Energy is estimated only from watts that the user gave.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from autotune.errors import InputError
from autotune.measurement import ABSENT
from autotune.mechanics import devices

POWERCAP = Path("/sys/class/powercap")
_WINDOW = "autotune"

logger = logging.getLogger(__name__)


class EnergyMeter(Protocol):
    """A meter of the energy that a device uses.

    Attributes:
        source: source of the figures, one of ``autotune.measurement.ENERGY_SOURCES``.
    """

    source: str

    def read(self) -> float | None:
        """Return the joules used since the meter was made; ``None`` if unknown."""


class NoMeter:
    """Meter for devices whose energy is unknown."""

    source = ABSENT

    def read(self) -> float | None:
        """Return ``None``."""
        return None


class TdpMeter:
    """Estimate of energy as constant power times elapsed time.

    Args:
        watts: the power, for example the thermal design power of the processor or GPU.
    """

    source = "estimated:tdp"

    def __init__(self, watts: float) -> None:
        self._watts = watts
        self._began = time.perf_counter()

    def read(self) -> float | None:
        """Return watts times seconds."""
        return self._watts * (time.perf_counter() - self._began)


@dataclass(slots=True)
class _Counter:
    """One powercap counter, which wraps around to 0.

    Attributes:
        path: its file, in microjoules.
        range_uj: microjoules at which it wraps around.
        last_uj: last reading in microjoules.
    """

    path: Path
    range_uj: int
    last_uj: int

    @classmethod
    def of(cls, zone: Path) -> _Counter:
        return cls(zone / "energy_uj", _number(zone / "max_energy_range_uj"), _number(zone / "energy_uj"))

    def advance(self) -> int:
        """Return the microjoules since the last call, with at most one wrap-around."""
        now = _number(self.path)
        passed = now - self.last_uj if now >= self.last_uj else now + self.range_uj - self.last_uj
        self.last_uj = now
        return passed


class RaplMeter:
    """Meter of the processor packages and the memory, from the kernel's RAPL driver.

    The counter of a package includes its cores and graphics; memory has a separate counter. The counter of the whole
    platform (``psys``) would count the packages twice.

    Args:
        root: the powercap folder.

    Raises:
        OSError: if a counter cannot be read; on many systems only root may read them (CVE-2020-8694).
        LookupError: if there is no counter.
    """

    source = "measured:rapl"

    def __init__(self, root: Path) -> None:
        packages = [zone for zone in sorted(root.glob("intel-rapl:*")) if _name(zone).startswith("package")]
        parts = [part for package in packages for part in sorted(package.glob("intel-rapl:*"))]
        self._counters = [_Counter.of(zone) for zone in [*packages, *(part for part in parts if _name(part) == "dram")]]
        if not self._counters:
            raise LookupError(f"no processor package in {root}")
        self._total_uj = 0

    def read(self) -> float | None:
        """Return the joules since the meter was made; call it before a counter can wrap around twice (minutes)."""
        self._total_uj += sum(counter.advance() for counter in self._counters)
        return self._total_uj / 1e6


class GpuMeter:
    """Meter of a GPU, which zeus reads from NVIDIA's NVML or AMD's SMI.

    Args:
        device: the GPU.

    Raises:
        LookupError: if zeus finds no such GPU.
    """

    def __init__(self, device: torch.device) -> None:
        from zeus.monitor import ZeusMonitor

        self.source = f"measured:{devices.energy_library()}"
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        # Without CPUs: zeus would start a process for each.
        self._monitor: Any = ZeusMonitor(gpu_indices=[index], cpu_indices=[])
        if len(self._monitor.gpus) <= index:
            raise LookupError(f"zeus finds {len(self._monitor.gpus)} GPUs")
        self._total_j = 0.0
        self._monitor.begin_window(_WINDOW, sync_execution=False)

    def read(self) -> float | None:
        """Return the joules since the meter was made; the driver updates its counter a few times per second."""
        self._total_j += self._monitor.end_window(_WINDOW, sync_execution=False).total_energy
        self._monitor.begin_window(_WINDOW, sync_execution=False)
        return self._total_j


def find_meter(device: torch.device, watts: float | None = None) -> EnergyMeter:
    """Return the best meter for a device: a measurement, otherwise an estimate, otherwise none.

    Args:
        device: the device of the training.
        watts: the device's power, for an estimate; ``None`` for no estimate.

    Raises:
        InputError: if the power is not a number above 0.
    """
    require_watts(watts)
    try:
        if devices.is_accelerator(device) and importlib.util.find_spec("zeus") is not None:
            return GpuMeter(device)
        if device.type == "cpu":
            return RaplMeter(POWERCAP)
    except Exception as error:  # noqa: BLE001 - drivers and their libraries fail in many ways; training goes on
        logger.info("energy is not measured: %s: %s", type(error).__name__, error)
    return estimate(watts)


def estimate(watts: float | None) -> EnergyMeter:
    """Return the meter for a device that cannot be measured: an estimate from the user's watts, or none."""
    return NoMeter() if watts is None else TdpMeter(watts)


def require_watts(watts: float | None) -> None:
    """Check a power in watts.

    Raises:
        InputError: if it is not a number above 0.
    """
    if watts is not None and not 0 < watts < math.inf:
        raise InputError(f"is {watts!r}", where="--watts", allowed="a number above 0")


def _name(zone: Path) -> str:
    return (zone / "name").read_text(encoding="ascii").strip()


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))
