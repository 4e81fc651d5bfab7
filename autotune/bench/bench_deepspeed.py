"""Overhead over DeepSpeed: the engine's step against a hand-written DeepSpeed loop, interleaved.

Run as a module, this file is one of the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from autotune.bench.bench_overhead import InterleavedEngine, overhead, time_blocks
from autotune.bench.harness import SILENT
from autotune.catalog import load_job
from autotune.engines.deepspeed_config import engine_config
from autotune.engines.deepspeed_engine import DeepSpeedEngine, sized
from autotune.engines.deepspeed_library import imported
from autotune.engines.rank_processes import Report, be_rank, run_on_ranks
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.mechanics import stepping
from autotune.mechanics.randomness import seed_all

# Number of starts of the ranks. Engine and loop alternate in being built first, so memory placement favours neither.
_STARTS = 4


class DeepSpeedLoop:
    """A hand-written DeepSpeed training loop on this rank.

    Args:
        job: the job; a step consumes one batch, of which each rank takes its share.
        zero_stage: ZeRO stage, 0 to 3.
        seed: random seed for weights and batches.
    """

    def __init__(self, job: Job, zero_stage: int, seed: int) -> None:
        seed_all(seed)
        self._job = job
        model = job.model()
        self._optimizer = job.optimizer(model.parameters())
        config = sized(engine_config(job, zero_stage), model.parameters())
        self._engine, *_ = imported("cpu").initialize(model=model, optimizer=self._optimizer, config=config)
        self._batches = job.batches(seed)
        self._base_rates = [group["lr"] for group in self._optimizer.param_groups]
        self._steps = 0

    def run(self, steps: int) -> None:
        """Train some steps."""
        job, rank, world = self._job, distributed.get_rank(), distributed.get_world_size()
        for _ in range(steps):
            self._steps += 1
            factor = 1.0 if job.schedule is None else job.schedule.factor(self._steps / job.max_steps)
            for group, base in zip(self._optimizer.param_groups, self._base_rates, strict=True):
                group["lr"] = base * factor
            loss = job.loss(self._engine, stepping.split(next(self._batches), world)[rank])
            self._engine.backward(loss)
            self._engine.step()
            loss.item()


class InterleavedDeepSpeedEngine(InterleavedEngine, DeepSpeedEngine):
    """A DeepSpeed engine that runs one step of a hand-written loop for each of its own."""


def bench_deepspeed(
    job: str, *, ranks: int, zero_stage: int, pairs: int, seed: int, reporter: Reporter = SILENT
) -> dict[str, Any]:
    """Return the ratio of the engine's time to that of a hand-written DeepSpeed loop, as rank 0 measures it.

    Args:
        job: the job's reference.
        ranks: number of ranks.
        zero_stage: ZeRO stage, 0 to 3.
        pairs: smallest number of pairs of ten-step blocks; every start of the ranks runs the same number.
        seed: random seed for both runs.
        reporter: shows progress.

    Raises:
        EngineError: if a rank fails; the message quotes its exception.
    """
    loaded = load_job(job)
    reporter.stage(f"{loaded.name}: engine against a plain loop", pairs)
    asked = {"job": job, "zero_stage": zero_stage, "pairs": -(-pairs // _STARTS), "seed": seed}
    blocks: list[tuple[float, float]] = []
    for start in range(_STARTS):
        found = run_on_ranks("autotune.bench.bench_deepspeed", {**asked, "engine_first": start % 2 == 0}, ranks=ranks)
        blocks += [(own, plain) for own, plain in found["blocks"]]
        reporter.advance(len(blocks))
    return {
        **overhead(loaded, blocks, starts=_STARTS),
        "threads": found["threads"],
        "ranks": ranks,
        "zero_stage": zero_stage,
        "starts": _STARTS,
    }


def _timed(asked: dict[str, Any], _: Report) -> dict[str, Any]:
    job, stage, seed = load_job(asked["job"]), asked["zero_stage"], asked["seed"]
    plain = None if asked["engine_first"] else DeepSpeedLoop(job, stage, seed)
    engine = InterleavedDeepSpeedEngine(job, zero_stage=stage, seed=seed)
    engine.plain = plain or DeepSpeedLoop(job, stage, seed)
    blocks = time_blocks(engine, pairs=asked["pairs"])
    distributed.barrier()
    return {"blocks": blocks, "threads": torch.get_num_threads()}


if __name__ == "__main__":
    be_rank(_timed)
