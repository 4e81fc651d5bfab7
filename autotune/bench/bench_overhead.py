"""Overhead of the engine: its step against a hand-written loop of the same job, interleaved in one run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from autotune.bench.harness import SILENT, document_of
from autotune.engines.measured_window import Window
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.mechanics.randomness import seed_all
from autotune.stats import paired_ratio

# A block contains one sampled step at the default sampling, like every ten steps of a run.
_BLOCK = 10


class Loop(Protocol):
    """A training loop."""

    def run(self, steps: int) -> object:
        """Train some steps."""
        ...


class PlainLoop:
    """A training loop written by hand: no controls, no statistics, no metering.

    Args:
        job: the job; a step consumes one whole batch.
        seed: random seed for weights and batches.
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


class InterleavedEngine(TorchEngine):
    """An engine that runs one step of a plain loop for each of its own, alternately after and before it.

    A machine that is slow for some seconds is slow for both. When blocks of ten steps alternated, on two ranks, ratios
    of one build ranged from 0.87 to 1.24, and their medians from 1.00 to 1.03.
    """

    plain: Loop
    plain_s = 0.0
    _leads = False

    def _advance(self, window: Window, *, sample: bool) -> None:
        self._leads = not self._leads
        if self._leads:
            super()._advance(window, sample=sample)
        began = time.perf_counter()
        self.plain.run(1)
        self.plain_s += time.perf_counter() - began
        if not self._leads:
            super()._advance(window, sample=sample)


def bench_overhead(job: Job, *, pairs: int, seed: int, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Return the ratio of the engine's time to that of a hand-written loop.

    Both train the same job from the same seed under the baseline plan.

    Args:
        job: the job.
        pairs: pairs of blocks of ten steps.
        seed: random seed for both runs.
        reporter: shows progress.
    """
    reporter.stage(f"{job.name}: engine against a plain loop", pairs)
    engine = InterleavedEngine(job, seed=seed, options=EngineOptions())
    engine.plain = PlainLoop(job, seed)
    blocks = time_blocks(engine, pairs=pairs, reporter=reporter)
    engine.close()
    return overhead(job, blocks)


def time_blocks(engine: InterleavedEngine, *, pairs: int, reporter: Reporter = SILENT) -> list[tuple[float, float]]:
    """Return the seconds of blocks of ten steps: of the engine, and of its plain loop.

    Args:
        engine: the engine, with its loop.
        pairs: pairs of blocks.
        reporter: shows how many pairs are done.
    """
    engine.run(4)
    blocks = []
    for pair in range(pairs):
        engine.plain_s, began = 0.0, time.perf_counter()
        engine.run(_BLOCK)
        blocks.append((time.perf_counter() - began - engine.plain_s, engine.plain_s))
        reporter.advance(pair + 1)
    return blocks


def overhead(job: Job, blocks: Sequence[tuple[float, float]], *, starts: int = 1) -> dict[str, Any]:
    """Return the document of the ratio of an engine's time to a plain loop's.

    Args:
        job: the job that both trained.
        blocks: results of :func:`time_blocks`, one start after another.
        starts: number of starts.
    """
    own, plain = zip(*blocks, strict=True)
    figures = {
        "job": job.name,
        **paired_ratio(own, plain, starts=starts),
        "ratios": [first / second for first, second in blocks],
        "block_steps": _BLOCK,
        "pairs": len(blocks),
        "plain_s_per_step": sum(plain) / len(blocks) / _BLOCK,
    }
    return document_of("overhead", figures)


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the results in words."""
    low, high = document["ratio_ci95"]
    return [
        f"engine / plain loop = {document['ratio_median']:.4f} (median of {document['pairs']} pairs, 95 % interval "
        f"{low:.4f} to {high:.4f})"
    ]
