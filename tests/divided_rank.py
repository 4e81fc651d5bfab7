"""Entry point that torchrun starts: one rank that shares layers with others, and meets jobs to refuse or train."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import divided_rank_jobs as jobs
import torch
from odd_rank import engine_of, refusal
from ranks import end_rank
from sharded_rank import at_random, farthest, on_one_rank, whole

from autotune import EngineOptions, TorchEngine
from autotune.engines.fsdp2_engine import Fsdp2Engine
from autotune.mechanics.collectives import of_all_ranks
from autotune.mechanics.fully_sharded import _is_divided, local

REFUSED = (
    *("unplanned", "unknown", "nameless", "uneven", "fused", "dropping", "normed", "apart", "statistics", "several"),
    *("gated", "remembering", "judged", "penalised", "rooted", "weighed", "undividing", "raising_plan", "infinite"),
)
OPTIONS = EngineOptions(meter_memory=False, statistics_every=None)


def exactness(mesh: str, names: str) -> dict[str, float]:
    """Train under a random plan at every step, and return how far all is from what one process has."""
    found, draw = {}, random.Random(4)
    for name in names.split(","):
        made: Any = getattr(jobs, name)
        job = made() if callable(made) else made
        engine, plain = engine_of(mesh, job), TorchEngine(job, options=OPTIONS)
        found[f"{name} begins"] = farthest(whole(engine), [one.detach() for one in plain.model.parameters()])
        for _ in range(5):
            plan = at_random(engine.space, draw)
            engine.apply(plan)
            plain.apply(on_one_rank(plan))
            engine.run(1)
            plain.run(1)
        found[name] = farthest(whole(engine), [one.detach() for one in plain.model.parameters()])
        # Ranks that share layers have the same bits of all that is not divided.
        alike = [float(local(one).double().sum()) for one in engine.model.parameters() if not _is_divided(one)]
        share = [
            values for rank, values in enumerate(of_all_ranks(alike)) if rank * engine.divides_by // engine.world == 0
        ]
        found[f"{name} apart"] = float(any(values != share[0] for values in share))
        found[f"{name} divided"] = float(sum(map(_is_divided, engine.model.parameters())))
        engine.close()
    return found


def variances(mesh: str, names: str) -> dict[str, tuple[float, float]]:
    """Return the variance of the gradients of a step of several micro-batches, with that of one process."""
    found = {}
    for name in names.split(","):
        made: Any = getattr(jobs, name)
        job, options = made() if callable(made) else made, EngineOptions(meter_memory=False, statistics_every=1)
        engine, plain = Fsdp2Engine(job, mesh=mesh, options=options), TorchEngine(job, options=options)
        for one in (engine, plain):
            one.apply(one.plan.changed(accumulation_steps=job.accumulation_choices[-1]))
            one.run(1)
        latest = [one.monitor.state.latest for one in (engine, plain)]
        found[name] = tuple(float(one.variance) for one in latest)  # type: ignore[arg-type,union-attr]
        engine.close()
    return found


def main() -> None:
    """Meet all jobs, and write the results of this rank."""
    folder, mesh = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    found = {
        "refusals": {name: refusal(lambda name=name: engine_of(mesh, getattr(jobs, name))) for name in REFUSED},  # type: ignore[misc]
        "late": refusal(lambda: engine_of(mesh, jobs.late).run(4)),
        "exactness": exactness(mesh, sys.argv[3]),
        "variances": variances(mesh, sys.argv[3]),
    }
    end_rank(folder, found)


if __name__ == "__main__":
    main()
