"""Measure what the engine costs: its step against a plain loop of the same job, interleaved in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.job import Job
from autotune.mechanics.devices import device_name
from autotune.mechanics.randomness import seed_all

# A block holds one sampled step at the default sampling, as every ten steps of a run do.
_BLOCK = 10


def bench_overhead(job: Job, *, pairs: int, seed: int, on_pair: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Return the ratio of the engine's time to a hand-written loop's.

    Both train the same job from the same seed under the baseline plan; blocks of ten steps alternate A B, B A.

    Args:
        job: the job.
        pairs: pairs of blocks.
        seed: of both runs.
        on_pair: is told of pairs done.
    """
    engine = TorchEngine(job, seed=seed, options=EngineOptions())
    document = compare_loops(job, engine, PlainLoop(job, seed), pairs=pairs, on_pair=on_pair)
    engine.close()
    return document


def compare_loops(
    job: Job, engine: Loop, plain: Loop, *, pairs: int, on_pair: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Return the ratio of an engine's time to a plain loop's, block by block in turn.

    Args:
        job: the job that both train.
        engine: the engine.
        plain: the loop.
        pairs: pairs of blocks.
        on_pair: is told of pairs done.
    """
    engine.run(4)
    plain.run(4)
    ratios, seconds = [], {"engine": 0.0, "plain": 0.0}
    for pair in range(pairs):
        times: dict[str, float] = {}
        order: list[tuple[str, Callable[[int], object]]] = [("engine", engine.run), ("plain", plain.run)]
        for name, run in order if pair % 2 == 0 else reversed(order):
            began = time.perf_counter()
            run(_BLOCK)
            times[name] = time.perf_counter() - began
            seconds[name] += times[name]
        ratios.append(times["engine"] / times["plain"])
        if on_pair is not None:
            on_pair(pair + 1)
    low, high = bootstrap_median(ratios)
    return {
        "version": 1,
        "benchmark": "overhead",
        "job": job.name,
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ratio_median": statistics.median(ratios),
        "ratio_ci95": [low, high],
        "ratio_total": seconds["engine"] / seconds["plain"],
        "ratios": ratios,
        "block_steps": _BLOCK,
        "pairs": pairs,
        "plain_s_per_step": seconds["plain"] / pairs / _BLOCK,
    }


class Loop(Protocol):
    """Be something that trains."""

    def run(self, steps: int) -> object:
        """Train some steps."""
        ...


class PlainLoop:
    """Train a job as anybody would by hand: no controls, no statistics, no metering.

    Args:
        job: the job; a step consumes one batch, whole.
        seed: of weights and batches.
    """

    def __init__(self, job: Job, seed: int) -> None:
        seed_all(seed)
        self.job = job
        self.model = job.model()
        self.model.train()
        self.batches = job.batches(seed)
        self.optimizer = job.optimizer(self.model.parameters())
        schedule = job.schedule
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: 1.0 if schedule is None else schedule.factor((step + 1) / job.max_steps),
        )
        self.losses: list[float] = []
        self._seed = seed

    def run(self, steps: int) -> None:
        """Train some steps."""
        for _ in range(steps):
            batch = next(self.batches, None)
            if batch is None:
                self._seed += 1
                self.batches = self.job.batches(self._seed)
                batch = next(self.batches)
            loss = self.job.loss(self.model, batch)
            loss.backward()
            if self.job.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip_norm)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.losses.append(loss.item())


def bootstrap_median(values: list[float], *, resamples: int = 5000, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile-bootstrap interval of a median."""
    array = np.asarray(values)
    generator = np.random.default_rng(seed)
    medians = np.median(generator.choice(array, size=(resamples, len(array))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)
