"""Measure what control costs over DeepSpeed: the engine's step against a DeepSpeed loop of one's own, interleaved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from autotune.bench.bench_overhead import Beside, overhead, time_blocks
from autotune.catalog import load_job
from autotune.engines.deepspeed_config import engine_config
from autotune.engines.deepspeed_engine import DeepSpeedEngine, sized
from autotune.engines.deepspeed_library import imported
from autotune.engines.rank_processes import Report, be_rank, run_on_ranks
from autotune.job import Job
from autotune.mechanics import stepping
from autotune.mechanics.randomness import seed_all

# So often ranks are started, the engine built first and the loop first in turn, so that where their memory comes to lie
# favours neither.
_STARTS = 4


class HandWrittenLoop:
    """Train a job on this rank as anybody would with DeepSpeed by hand.

    Args:
        job: the job; a step consumes one batch, each rank its share of it.
        zero_stage: 0 to 3.
        seed: of weights and batches.
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


class BesideSharded(Beside, DeepSpeedEngine):
    """A DeepSpeed engine beside each of whose steps a loop by hand takes one."""


def bench_deepspeed(
    job: str,
    *,
    ranks: int,
    zero_stage: int,
    pairs: int,
    seed: int,
    on_pair: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Return the ratio of the engine's time to a hand-written DeepSpeed loop's, as rank 0 sees it.

    Args:
        job: the job's reference.
        ranks: how many.
        zero_stage: 0 to 3.
        pairs: pairs of blocks of ten steps, at least; as many after each start of the ranks.
        seed: of both runs.
        on_pair: is told of pairs done.

    Raises:
        EngineError: if a rank fails; what it raised is quoted.
    """
    asked = {"job": job, "zero_stage": zero_stage, "pairs": -(-pairs // _STARTS), "seed": seed}
    blocks: list[tuple[float, float]] = []
    for start in range(_STARTS):
        found = run_on_ranks("autotune.bench.bench_deepspeed", {**asked, "engine_first": start % 2 == 0}, ranks=ranks)
        blocks += [(own, plain) for own, plain in found["blocks"]]
        if on_pair is not None:
            on_pair(len(blocks))
    return {
        **overhead(load_job(job), blocks, starts=_STARTS),
        "threads": found["threads"],
        "ranks": ranks,
        "zero_stage": zero_stage,
        "starts": _STARTS,
    }


def _timed(asked: dict[str, Any], _: Report) -> dict[str, Any]:
    job, stage, seed = load_job(asked["job"]), asked["zero_stage"], asked["seed"]
    plain = None if asked["engine_first"] else HandWrittenLoop(job, stage, seed)
    engine = BesideSharded(job, zero_stage=stage, seed=seed)
    engine.plain = plain or HandWrittenLoop(job, stage, seed)
    blocks = time_blocks(engine, pairs=asked["pairs"])
    distributed.barrier()
    return {"blocks": blocks, "threads": torch.get_num_threads()}


if __name__ == "__main__":
    be_rank(_timed)
