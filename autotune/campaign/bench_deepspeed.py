"""Measure what control costs over DeepSpeed: the engine's step against a DeepSpeed loop of one's own, interleaved.

``python -m autotune.campaign.bench_deepspeed FOLDER``, started by ``torchrun``, is one rank of it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import distributed

from autotune.campaign.bench_overhead import compare_loops
from autotune.campaign.rank_processes import answer, asked_of_ranks, run_on_ranks
from autotune.catalog import load_job
from autotune.engines.deepspeed_config import engine_config
from autotune.engines.deepspeed_engine import DeepSpeedEngine, imported, sized
from autotune.job import Job
from autotune.mechanics import stepping
from autotune.mechanics.randomness import seed_all


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


def bench_deepspeed(job: str, folder: Path, *, ranks: int, zero_stage: int, pairs: int, seed: int) -> dict[str, Any]:
    """Return the ratio of the engine's time to a hand-written DeepSpeed loop's, as rank 0 sees it.

    Args:
        job: the job's reference.
        folder: where ranks are told what to do, and answer.
        ranks: how many.
        zero_stage: 0 to 3.
        pairs: pairs of blocks of ten steps.
        seed: of both runs.

    Raises:
        EngineError: if a rank fails; its last line is quoted.
    """
    asked = {"job": job, "zero_stage": zero_stage, "pairs": pairs, "seed": seed}
    found = run_on_ranks("autotune.campaign.bench_deepspeed", folder, asked, ranks=ranks)
    return {**found, "ranks": ranks, "zero_stage": zero_stage}


def main(folder: Path) -> None:
    """Be one rank."""
    asked = asked_of_ranks(folder)
    job = load_job(asked["job"])
    engine = DeepSpeedEngine(job, zero_stage=asked["zero_stage"], seed=asked["seed"])
    plain = HandWrittenLoop(job, asked["zero_stage"], asked["seed"])
    document = compare_loops(job, engine, plain, pairs=asked["pairs"])
    if engine.rank == 0:
        answer(folder, document)
    distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
