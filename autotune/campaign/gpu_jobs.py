"""Choose what a device is measured with: the paper's two models, and a GPT of 1.3 B parameters where it fits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from autotune.catalog import load_job
from autotune.data import DATA_VARIABLE
from autotune.errors import JobError
from autotune.job import Job

_PAPER_JOBS = ("gpt2_wikitext2", "resnet50_cifar10")
_LARGE_JOB = "gpt2_wikitext2:billion"
# Weights, gradients and AdamW's two states in fp32 are 21 GB; the baseline's activations take as much again.
_LARGE_BYTES = 60 * 2**30
# To try the command where there is no such device.
_SMALL_JOBS = ("digits", "charlm:short")


def gpu_jobs(names: Sequence[str] | None, data: Path | None, device: str) -> list[Job]:
    """Return the jobs, the most important first.

    Args:
        names: jobs by name; ``None`` for those of this file.
        data: a folder with WikiText-2 and CIFAR-10; a job whose data is not there runs on random data of its shape.
        device: where they will run; small ones on ``cpu``.

    Raises:
        JobError: if a name is none, or the folder that was named is none.
    """
    if names is not None:
        return [load_job(name) for name in names]
    if torch.device(device).type == "cpu":
        return [load_job(name) for name in _SMALL_JOBS]
    if data is not None:
        if not data.is_dir():
            raise JobError(f"{str(data)!r} is no folder", where="--data", allowed="a folder with the data sets")
        os.environ[DATA_VARIABLE] = str(data)
    return [*(_real_or_random(name) for name in _PAPER_JOBS), *_large(device)]


def _real_or_random(name: str) -> Job:
    job = load_job(name)
    try:
        next(iter(job.batches(0)))
    except JobError:
        return load_job(f"{name}:random")
    return job


def _large(device: str) -> Iterator[Job]:
    if torch.cuda.get_device_properties(torch.device(device)).total_memory >= _LARGE_BYTES:
        yield load_job(_LARGE_JOB)
