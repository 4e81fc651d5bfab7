"""Choose what a device is measured with: the paper's two models, and a GPT of 1.3 B parameters where it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.catalog import load_job
from autotune.errors import JobError
from autotune.job import Job
from autotune.mechanics import devices

_PAPER_JOBS = ("gpt2_wikitext2", "resnet50_cifar10")
_LARGE_JOB = "gpt2_wikitext2:billion"
# Weights, gradients and AdamW's two states in fp32 are 21 GB; the baseline's activations take as much again.
_LARGE_BYTES = 60 * 2**30
# To try the command where there is no such device.
_SMALL_JOBS = ("digits", "charlm:short")


def gpu_jobs(names: Sequence[str] | None, device: devices.AnyDevice) -> dict[str, Job]:
    """Return the jobs by reference, the most important first.

    A job whose data is not in the folder that ``AUTOTUNE_DATA`` names runs on random data of its shape.

    Args:
        names: references; ``None`` for those of this file.
        device: where they will run; small ones on ``cpu``.

    Raises:
        JobError: if a name is none.
    """
    if names is None and not devices.is_accelerator(device):
        names = _SMALL_JOBS
    if names is None:
        names = [*map(_real_or_random, _PAPER_JOBS), *_large(device)]
    return {name: load_job(name) for name in names}


def _real_or_random(name: str) -> str:
    try:
        next(iter(load_job(name).batches(0)))
    except JobError:
        return f"{name}:random"
    return name


def _large(device: devices.AnyDevice) -> Iterator[str]:
    if (devices.total_bytes(device) or 0) >= _LARGE_BYTES:
        yield _LARGE_JOB
