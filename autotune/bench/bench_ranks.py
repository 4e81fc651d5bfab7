"""Overhead on several ranks: the engine's step against a loop of the same library written by hand, interleaved.

Run as a module, this file is one of the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any

import torch
from torch import distributed

from autotune.bench.bench_overhead import InterleavedEngine, overhead, time_blocks
from autotune.bench.harness import SILENT
from autotune.catalog import load_job
from autotune.engines.deepspeed_config import engine_config
from autotune.engines.deepspeed_engine import sized
from autotune.engines.deepspeed_library import imported
from autotune.engines.rank_processes import Report, be_rank, run_on_ranks
from autotune.engines.registry import ENGINES, RankOptions
from autotune.engines.rendezvous import join_ranks
from autotune.errors import InputError
from autotune.io.progress import Reporter
from autotune.job import Job
from autotune.mechanics import cutting
from autotune.mechanics.fully_sharded import spread
from autotune.mechanics.randomness import seed_all
from autotune.mesh import Mesh
from autotune.units import units_of

# Number of starts of the ranks. Engine and loop alternate in being built first, so memory placement favours neither.
_STARTS = 4


class RankLoop(ABC):
    """A training loop of a library, written by hand, on this rank.

    Args:
        job: the job; a step consumes one batch, of which each rank takes its share.
        ranks: the ranks and their layout.
        seed: random seed for weights and batches.
    """

    def __init__(self, job: Job, ranks: RankOptions, seed: int) -> None:
        seed_all(seed)
        self._job = job
        self._groups = self.prepare(job, ranks).param_groups
        self._batches = job.batches(seed)
        self._base_rates = [group["lr"] for group in self._groups]
        self._steps = 0

    @abstractmethod
    def prepare(self, job: Job, ranks: RankOptions) -> torch.optim.Optimizer:
        """Build the job's model as the library trains it, and return its optimizer."""

    @abstractmethod
    def step(self, job: Job, batch: Any) -> torch.Tensor:
        """Train one step on this rank's share of a batch, and return the loss."""

    def run(self, steps: int) -> None:
        """Train some steps."""
        job, rank, world = self._job, distributed.get_rank(), distributed.get_world_size()
        for _ in range(steps):
            self._steps += 1
            factor = 1.0 if job.schedule is None else job.schedule.factor(self._steps / job.max_steps)
            for group, base in zip(self._groups, self._base_rates, strict=True):
                group["lr"] = base * factor
            self.step(job, cutting.split(next(self._batches), world)[rank]).item()


class DeepSpeedLoop(RankLoop):
    """A loop with DeepSpeed's engine, which clips, too."""

    def prepare(self, job: Job, ranks: RankOptions) -> torch.optim.Optimizer:
        """Wrap the model in DeepSpeed's engine."""
        model = job.model()
        optimizer = job.optimizer(model.parameters())
        config = sized(engine_config(job, ranks.zero_stage), model.parameters())
        self._engine, *_ = imported("cpu").initialize(model=model, optimizer=optimizer, config=config)
        return optimizer

    def step(self, job: Job, batch: Any) -> torch.Tensor:
        """Train one step."""
        loss = job.loss(self._engine, batch)
        self._engine.backward(loss)
        self._engine.step()
        return loss


class Fsdp2Loop(RankLoop):
    """A loop with ``fully_shard`` on every unit and on the model."""

    def prepare(self, job: Job, ranks: RankOptions) -> torch.optim.Optimizer:
        """Spread the model over the ranks."""
        self._model, mesh = job.model(), ranks.whole_mesh
        assert isinstance(mesh, Mesh)
        spread(self._model, [unit.name for unit in units_of(self._model, job.units)], mesh, "cpu")
        self._optimizer = job.optimizer(self._model.parameters())
        return self._optimizer

    def step(self, job: Job, batch: Any) -> torch.Tensor:
        """Train one step."""
        loss = job.loss(self._model, batch)
        loss.backward()
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), job.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss


LOOPS: dict[str, type[RankLoop]] = {"deepspeed": DeepSpeedLoop, "fsdp2": Fsdp2Loop}


def bench_ranks(job: str, ranks: RankOptions, *, pairs: int, seed: int, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Return the ratio of the engine's time to that of a loop written by hand, as rank 0 measures it.

    Args:
        job: the job's reference.
        ranks: the engine, its ranks and their layout.
        pairs: smallest number of pairs of ten-step blocks; every start of the ranks runs the same number.
        seed: random seed for both runs.
        reporter: shows progress.

    Raises:
        InputError: if the engine has no such loop, or ranks share layers.
        EngineError: if a rank fails; the message quotes its exception.
    """
    if ranks.engine not in LOOPS:
        raise InputError(f"engine is {ranks.engine!r}", where="bench overhead", allowed=list(LOOPS))
    mesh = ranks.whole_mesh
    if isinstance(mesh, Mesh) and mesh.tp > 1:
        raise InputError(f"mesh is {mesh}", where="bench overhead", allowed="a mesh without tp")
    loaded = load_job(job)
    reporter.stage(f"{loaded.name}: engine against a plain loop", pairs)
    asked = {"job": job, "ranks": asdict(ranks), "pairs": -(-pairs // _STARTS), "seed": seed}
    blocks: list[tuple[float, float]] = []
    for start in range(_STARTS):
        first = {"engine_first": start % 2 == 0}
        found = run_on_ranks("autotune.bench.bench_ranks", {**asked, **first}, ranks=ranks.count)
        blocks += [(own, plain) for own, plain in found["blocks"]]
        reporter.advance(len(blocks))
    return {
        **overhead(loaded, blocks, starts=_STARTS),
        "threads": found["threads"],
        "ranks": ranks.count,
        "engine": ranks.engine,
        "layout": ranks.layout,
        "starts": _STARTS,
    }


def _timed(asked: dict[str, Any], _: Report) -> dict[str, Any]:
    job, ranks, seed = load_job(asked["job"]), RankOptions(**asked["ranks"]), asked["seed"]
    interleaved = type("InterleavedRanks", (InterleavedEngine, ENGINES[ranks.engine].load()), {})
    join_ranks("cpu")
    plain = None if asked["engine_first"] else LOOPS[ranks.engine](job, ranks, seed)
    engine = interleaved(job, seed=seed, **ranks.arguments())
    engine.plain = plain or LOOPS[ranks.engine](job, ranks, seed)
    blocks = time_blocks(engine, pairs=asked["pairs"])
    distributed.barrier()
    return {"blocks": blocks, "threads": torch.get_num_threads()}


if __name__ == "__main__":
    be_rank(_timed)
