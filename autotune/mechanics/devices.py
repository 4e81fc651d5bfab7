"""Say where jobs train on this machine."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def device_kind(ranks: int = 1) -> str:
    """Return where a job trains on this machine if nobody says otherwise: ``cuda``, or ``cpu``.

    Args:
        ranks: how many processes train it, each on a GPU of its own.
    """
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= ranks else "cpu"


def device_name() -> str:
    """Return what the job's device is called: the GPU's name, or the processor's."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
