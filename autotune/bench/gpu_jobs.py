"""Jobs for the benchmark of a device: the paper's two models, and a GPT of 1.3 B parameters where it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.catalog import load_job
from autotune.errors import JobError
from autotune.job import Job
from autotune.mechanics import devices

_PAPER_JOBS = ("gpt2_wikitext2", "resnet50_cifar10")
_LARGE_JOB = "gpt2_wikitext2:billion"
# Weights, gradients and AdamW's two states in fp32 take 21 GB, and the activations of the baseline about the same.
_LARGE_BYTES = 60 * 2**30
# Jobs for trying the command without an accelerator.
_SMALL_JOBS = ("digits", "charlm:short")


def gpu_jobs(names: Sequence[str] | None, device: devices.AnyDevice) -> dict[str, Job]:
    """Return the jobs by reference, the most important first.

    By default, a paper job whose data is not in the folder ``AUTOTUNE_DATA`` runs on random data of its shape.

    Args:
        names: references of jobs; ``None`` for the jobs of this file.
        device: the device on which they will run; the default for ``cpu`` is small jobs.

    Raises:
        JobError: if a name is unknown.
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
