"""The batch with which a job is profiled, and the cache key of its profile."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autotune.cost_model.profile import PROFILE_VERSION
from autotune.engines.job_checks import ask, build_model, build_optimizer
from autotune.errors import JobError
from autotune.job import Job
from autotune.mechanics import devices
from autotune.mechanics.cutting import Cutting
from autotune.mechanics.memory_meter import tensor_bytes
from autotune.mechanics.randomness import isolated, seed_all
from autotune.mechanics.storage_acts import offered
from autotune.mechanics.trees import map_tensors, tensors
from autotune.profiling.code_digest import code_digest, settings_of

# Number of first batches from which the largest is chosen.
_CANDIDATES = 8


def fixed_shape(job: Job, seed: int = 0) -> Job:
    """Return the job with a copy of the same batch in every step: the largest of its first few batches.

    Args:
        job: the job.
        seed: random seed for its batches.

    Raises:
        JobError: if it has no batches, or they cannot be drawn.
    """
    batch = _largest(job, _first_batches(job, seed))
    return replace(job, batches=lambda _seed: (map_tensors(torch.clone, batch) for _ in itertools.count()))


def other_batch(job: Job, seed: int = 0) -> Any:
    """Return a batch that differs from that of :func:`fixed_shape`; ``None`` if the job yields a single one.

    Args:
        job: the job.
        seed: random seed for its batches.

    Raises:
        JobError: if it has no batches, or they cannot be drawn.
    """
    found = _first_batches(job, seed)
    largest = _largest(job, found)
    return next((batch for batch in reversed(found) if batch is not largest), None)


def length_spread(job: Job, seed: int = 0) -> float:
    """Return the standard deviation of the logarithm of the bytes of a job's first few batches.

    Args:
        job: the job.
        seed: random seed for its batches.

    Raises:
        JobError: if it has no batches, or they cannot be drawn.
    """
    sizes = [tensor_bytes(tensors(batch)) for batch in _first_batches(job, seed)]
    return statistics.pstdev(math.log(max(size, 1)) for size in sizes)


def _largest(job: Job, batches: list[Any]) -> Any:
    """Return the batch with the most bytes; of several that are cut by cost, the most costly one."""
    cutting = Cutting.of(job)

    def size(batch: Any) -> tuple[int, float]:
        return tensor_bytes(tensors(batch)), sum(cutting.costs(batch)) if cutting.by_cost else 0.0

    return max(batches, key=size)


def _first_batches(job: Job, seed: int) -> list[Any]:
    found = ask(job, "batches", lambda: list(itertools.islice(job.batches(seed), _CANDIDATES)))
    if not found:
        raise JobError("batches yields nothing", where=f"job {job.name!r}", allowed="at least one batch")
    return found


def _told(module: nn.Module) -> list[Any]:
    return [f"{type(module).__module__}.{type(module).__qualname__}", settings_of(module)]


def profile_key(job: Job, device_name: str) -> str:
    """Return a SHA-256 of everything that a profile depends on, the code of the job included, without running it.

    Args:
        job: the job; its model is built and its first batch drawn.
        device_name: name of the device.
    """
    with isolated():
        seed_all(0)
        model = build_model(job)
        batch = ask(job, "batches", lambda: next(iter(job.batches(0)), None))
        optimizer = build_optimizer(job, model)
    facts = {
        "job": job.name,
        "model": [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()],
        "modules": [[name, *_told(module)] for name, module in model.named_modules()],
        "batch": [[list(tensor.shape), str(tensor.dtype)] for tensor in tensors(batch)],
        "code": code_digest([job.loss, job.batches, job.count, job.optimizer, model]),
        "optimizer": type(optimizer).__qualname__,
        "batching": [job.batching, job.batch_size, list(job.accumulation_choices)],
        **({} if job.split == "samples" else {"split": [job.split, code_digest([job.sample_cost, job.trim])]}),
        "units": None if job.units is None else list(job.units),
        "storages": list(offered(job.storages, devices.lacks_copies_beside(devices.device_kind()))),
        "clips": job.clip_norm is not None,
        "device": device_name,
        "threads": torch.get_num_threads(),
        "mkldnn": bool(torch.backends.mkldnn.enabled),
        "versions": [torch.__version__, PROFILE_VERSION],
        # The device's name does not tell where the job trains, or with which settings.
        **devices.settings(devices.device_kind()),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
