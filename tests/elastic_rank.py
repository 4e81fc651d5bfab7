"""Entry point that torchrun starts: one rank that continues a run on its own number of ranks, and saves it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sharded_rank import make, whole

from autotune import EngineOptions, TorchEngine
from autotune.engines.fsdp2_engine import Fsdp2Engine
from autotune.plan import Precision


def main() -> None:
    """Load the former part of the run, train some steps, and save; compare with one process that has run them all."""
    folder, part, mesh, steps = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    options = EngineOptions(meter_memory=False, statistics_every=None)
    job = make(batch_size=8)
    engine = Fsdp2Engine(job, mesh=mesh, options=options)
    if part:
        engine.load(folder / f"part{part - 1}")
    space = engine.space
    storage = dict(zip(space.recomputable, space.storages * len(space.recomputable), strict=False))
    plan = space.plan(accumulation_steps=1 + part % 2, precision=Precision.FP32).changed(storage=storage)
    engine.apply(plan)
    losses = [engine.run(1).loss for _ in range(steps)]
    engine.save(folder / f"part{part}")
    plain = TorchEngine(job, options=options)
    told = [plain.run(1).loss for _ in range(engine.progress.steps)][-steps:]
    pairs = zip(whole(engine), plain.model.parameters(), strict=True)
    apart = max(float((one - other.detach()).abs().max()) for one, other in pairs)
    loss_apart = max(abs(one - other) for one, other in zip(losses, told, strict=True) if one is not None and other)
    if dist.get_rank() == 0:
        found = {"apart": apart, "loss_apart": loss_apart, "steps": engine.progress.steps}
        (folder / f"part{part}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
