"""Published figures of devices in machines of several: links, power, processors, and the capacity that drivers report.

``autotune.cost_model.device_table`` has the peak rates; this file adds what only many devices need.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from autotune.cost_model.device_table import DEVICES, DeviceSpec, find_device
from autotune.errors import InputError
from autotune.plan import Precision

_GB = 10**9
_GIB = 2**30
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device, and the links and power of the node that it sits in.

    Attributes:
        name: name of the device.
        peak_flops: peak operations per second of 16-bit products.
        bandwidth: memory bandwidth in bytes per second.
        capacity_bytes: memory that the driver reports.
        processors: multiprocessors or compute units.
        watts: power limit of one device.
        joules_per_flop: relative energy of one operation in the chip's process, 4 nm being 1.
        attention_factor: rate of attention kernels relative to products, over that relation on an A100.
        float8: whether products of 8 bits run at twice the rate of those of 16.
        link: bytes per second that one device sends to the others of its node, one direction.
        node_link: bytes per second that one node sends to other nodes, one direction.
        per_node: devices of one node.
    """

    name: str
    peak_flops: float
    bandwidth: float
    capacity_bytes: int
    processors: int
    watts: float
    joules_per_flop: float
    attention_factor: float
    float8: bool
    link: float
    node_link: float
    per_node: int = 8

    @property
    def node_rate(self) -> float:
        """Return the share of the node's link for one of its devices, in bytes per second."""
        return self.node_link / self.per_node


# Per device: GiB that the driver reports (nvidia-smi, rocm-smi), multiprocessors, watts, GB/s to the devices of its
# node in one direction (NVLink, Infinity Fabric or PCIe), and GB/s of its network card. Source: the data sheets that
# the device table names; network cards as in the vendor's reference node (DGX A100: 200 Gbit/s; DGX H100 and HGX: 400).
_NODE: Mapping[str, tuple[float, int, float, float, float]] = MappingProxyType(
    {
        "gb200": (184.0, 152, 1200, 900, 50),
        "b200": (179.0, 148, 1000, 900, 50),
        "h200": (139.8, 132, 700, 450, 50),
        "h100": (79.6, 132, 700, 450, 50),
        "a100": (79.3, 108, 400, 300, 25),
        "a100-40gb": (39.6, 108, 400, 300, 25),
        "l40s": (44.9, 142, 350, 32, 25),
        "l4": (22.5, 58, 72, 32, 12.5),
        "rtx5090": (31.8, 170, 575, 64, 12.5),
        "rtx4090": (23.9, 128, 450, 32, 12.5),
        "rtx3090": (23.9, 82, 350, 32, 12.5),
        "v100": (31.7, 80, 300, 150, 12.5),
        "t4": (14.7, 40, 70, 16, 12.5),
        "mi355x": (287.0, 256, 1400, 537, 50),
        "mi325x": (255.0, 304, 1000, 448, 50),
        "mi300x": (191.0, 304, 750, 448, 50),
    }
)
# Relative energy of an operation: 7 nm chips need about 1.4 times the energy of 4 nm ones at equal work, 12 nm twice.
# Source: TSMC's published power reductions between nodes (7 to 5 nm: 30 %; 5 to 4 nm: 5 %), rounded.
_ENERGY = {"a100": 1.4, "a100-40gb": 1.4, "rtx3090": 1.4, "v100": 2.0, "t4": 2.0}
# FlashAttention-2 uses the instructions of Ampere, with which Hopper and later reach about two thirds of their rate.
# Source: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), section 1: 35 % of an H100's peak.
_ATTENTION = dict.fromkeys(("h100", "h200", "b200", "gb200"), 0.65)
_WITH_FLOAT8 = frozenset({"gb200", "b200", "h200", "h100", "l40s", "l4", "rtx5090", "rtx4090"}) | {
    "mi355x",
    "mi325x",
    "mi300x",
}


def machine(key: str, spec: DeviceSpec) -> Machine:
    """Return the machine of a device of the table."""
    gib, processors, watts, link, card = _NODE[key]
    peak = spec.flops.get(Precision.BF16) or spec.flops.get(Precision.FP16) or spec.flops[Precision.FP32]
    return Machine(
        name=spec.name,
        peak_flops=peak,
        bandwidth=spec.bandwidth,
        capacity_bytes=int(gib * _GIB),
        processors=processors,
        watts=watts,
        joules_per_flop=_ENERGY.get(key, 1.0),
        attention_factor=_ATTENTION.get(key, 1.0),
        float8=key in _WITH_FLOAT8,
        link=link * _GB,
        node_link=8 * card * _GB,
    )


def find_machine(name: str) -> Machine:
    """Return the machine of a device that is named as in the device table.

    Args:
        name: key of the table, or the name that the driver reports. Memory and a power limit may follow, as in
            ``h100_96gb_500w``.

    Raises:
        InputError: if the device is not in the table.
    """
    base, gigabytes, watts = _parts(name)
    spec = find_device(base)
    key = next(key for key, one in DEVICES.items() if one is spec)
    if key == "a100" and gigabytes == 40:
        key = "a100-40gb"
    found = machine(key, DEVICES[key])
    if gigabytes == 96 and key == "h100":
        # HBM2e instead of HBM3. Source: the device's description in torchtitan's published runs.
        found = replace(found, bandwidth=2400.0 * _GB, capacity_bytes=int(95.0 * _GIB))
    elif gigabytes is not None and not 0.25 <= gigabytes * _GB / DEVICES[key].memory_bytes <= 2:
        raise _odd(name, f"{gigabytes:g} GB", f"a quarter to twice of {DEVICES[key].memory_bytes / _GB:g} GB")
    elif gigabytes is not None and abs(gigabytes * _GB - DEVICES[key].memory_bytes) > 0.1 * gigabytes * _GB:
        found = replace(found, capacity_bytes=int(0.99 * gigabytes * _GIB))
    if watts is not None and not 0.2 <= watts / found.watts <= 1.5:
        raise _odd(name, f"a limit of {watts:g} W", f"0.2 to 1.5 of {found.watts:g} W")
    return found if watts is None else replace(found, watts=watts)


def _odd(name: str, what: str, allowed: str) -> InputError:
    return InputError(f"device {name!r} has {what}", where="--device", allowed=allowed)


_SIZE = re.compile(r"[ _-]?(\d{2,3})\s?gb(?![a-z0-9])", re.IGNORECASE)
_WATTS = re.compile(r"[ _-](\d{2,4})\s?w(?![a-z0-9])", re.IGNORECASE)

# Form factor and kind of memory, which the table's devices have anyway.
_FORM = re.compile(r"[ _-](sxm\d?|hbm\d?e?)(?![a-z0-9])", re.IGNORECASE)


def _parts(name: str) -> tuple[str, float | None, float | None]:
    """Return a device's name without the memory and the power limit that it mentions, and both."""
    watts, size = _WATTS.search(name), _SIZE.search(name)
    base = _FORM.sub("", _SIZE.sub("", _WATTS.sub("", name))).strip(" _-")
    if not base:
        raise InputError(f"device is {name!r}", where="--device", allowed=DEVICES, given=name)
    return base, float(size[1]) if size else None, float(watts[1]) if watts else None
