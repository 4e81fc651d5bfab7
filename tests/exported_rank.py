"""Script that launches an exported DeepSpeed configuration as a user would and records what the engine does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from tiny_job import job as tiny
from torch import nn

import autotune
from autotune.engines.deepspeed_library import imported

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def main() -> None:
    """Train a few steps."""
    deepspeed = imported("cpu")
    folder = Path(sys.argv[1])
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    job = tiny()
    model = job.model()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=job.optimizer(model.parameters()), config=str(folder / "ds_config.json")
    )
    dtypes, sizes = set(), set()

    def see(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        dtypes.add(
            str(module.weight.dtype if not torch.is_autocast_enabled("cpu") else torch.get_autocast_dtype("cpu"))
        )
        sizes.add(inputs[0].shape[0])

    model.head.register_forward_hook(see)
    # Steps take microseconds, so their time carries no information.
    limits = autotune.Limits(gain_frac=-1.0, overhead_frac=1e6, slowdown_frac=1e6)
    tuner = autotune.attach(engine=engine, policy=str(folder / "plan.json"), limits=limits, runs_dir=None)
    k, micro = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
    updates = 0
    for number, batch in enumerate(job.batches(0), 1):
        for start in range(0, len(batch), micro):
            for piece in tuner.micro_batches(batch[start : start + micro]):
                tuner.backward(job.loss(engine, piece))
        updates += tuner.step()
        if number == 80:
            break
    found = {
        "updates": updates,
        "global_steps": engine.global_steps,
        "k": k,
        "dtypes": sorted(dtypes),
        "sizes": sorted(sizes),
        "stage": engine.zero_optimization_stage(),
        "clip": engine.gradient_clipping(),
        "recomputed": sorted(name for name, kind in tuner.plan.storage.items() if kind == "recompute"),
        "status": str(tuner.status),
    }
    if torch.distributed.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
