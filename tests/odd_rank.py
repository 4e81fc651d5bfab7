"""Entry point that torchrun starts: one rank that meets jobs and folders that FSDP2 must refuse, or train exactly."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import odd_rank_jobs as jobs
import torch
import torch.distributed as dist
from ranks import end_rank
from sharded_rank import at_random, farthest, on_one_rank, whole
from torch import nn

from autotune import EngineOptions, Job, TorchEngine
from autotune.engines.fsdp2_engine import Fsdp2Engine
from autotune.errors import AutotuneError
from autotune.mechanics.shared_norm import share_statistics

OPTIONS = EngineOptions(meter_memory=False, statistics_every=None)
REFUSED = (
    *("routed", "own_norm", "remembering", "early", "scalar", "mixed", "complex_", "transposed", "adafactor"),
    *("clamping", "sparse", "penalised", "contrastive"),
)
EXACT = (
    *("used_in_training", "afterwards", "objects", "object_root", "unused", "checkpointed", "twice", "adversarial"),
    *("evaluates_parts", "normalised"),
)


def engine_of(mesh: str, job: Job, seed: int = 0) -> Fsdp2Engine:
    return Fsdp2Engine(job, mesh=mesh, seed=seed, options=OPTIONS)


def refusal(act: Callable[[], object]) -> str:
    """Return the error's class and message; an error of another kind ends this process."""
    try:
        act()
    except AutotuneError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def apart(engine: Fsdp2Engine, steps: int) -> float:
    """Return the largest distance of a run's weights from those of plain torch after all its steps."""
    plain = TorchEngine(engine.job, options=OPTIONS)
    plain.run(steps)
    return farthest(whole(engine), [one.detach() for one in plain.model.parameters()])


def refusals(mesh: str, _folder: Path) -> dict[str, str]:
    """Open engines that must refuse their jobs."""
    found = {name: refusal(lambda name=name: engine_of(mesh, getattr(jobs, name)).run(1)) for name in REFUSED}  # type: ignore[misc]
    # Ranks without shared memory notice different calls at the end of the step.
    engine = engine_of(mesh, jobs.late)
    assert engine._calls is not None
    engine._calls._table = None
    before: list[torch.Tensor] = []
    for _ in range(6):
        before = whole(engine)
        found["late"] = refusal(lambda: engine.run(1))
        if found["late"]:
            break
    found["kept"] = str(farthest(before, whole(engine)) == 0)
    return found


def exactness(mesh: str, _folder: Path) -> dict[str, float]:
    """Train jobs that need care under a random plan at every step, and compare weights and metrics."""
    found, draw = {}, random.Random(4)
    for name in EXACT:
        engine, plain = engine_of(mesh, getattr(jobs, name)), TorchEngine(getattr(jobs, name), options=OPTIONS)
        off = [abs(engine.evaluate() - plain.evaluate())]
        for _ in range(5):
            plan = at_random(engine.space, draw)
            engine.apply(plan)
            plain.apply(on_one_rank(plan))
            engine.run(1)
            plain.run(1)
        off.append(abs(engine.evaluate() - plain.evaluate()))
        found[name] = farthest(whole(engine), [one.detach() for one in plain.model.parameters()])
        found[f"metric of {name}"] = max(off) / max(plain.evaluate(), 1.0)
        engine.close()
    return found


def norms(_mesh: str, _folder: Path) -> dict[str, float]:
    """Normalize a share of a batch on each rank, and the whole batch, forward and backward in float64."""
    found, rank, draw = {}, dist.get_rank(), torch.Generator().manual_seed(1)
    ways: list[dict[str, Any]] = [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]
    for number, way in enumerate(ways):
        whole_norm, own_norm = (nn.Sequential(nn.BatchNorm2d(3, **way)).double() for _ in range(2))
        assert share_statistics(own_norm) == ["0"]
        off = []
        for rows in ((3, 8), (5, 8)):
            x, weight = torch.randn(2, 8, 3, 4, 4, generator=draw, dtype=torch.float64)
            own = slice(0, rows[0]) if rank == 0 else slice(*rows)
            one, other = x.clone().requires_grad_(), x[own].clone().requires_grad_()
            expected, made = whole_norm(one), own_norm(other)
            (expected * weight).sum().backward()
            (made * weight[own]).sum().backward()
            off += [expected[own] - made, one.grad[own] - other.grad]  # type: ignore[index,operator]
            for theirs, ours in zip(whole_norm.parameters(), own_norm.parameters(), strict=True):
                assert ours.grad is not None
                dist.all_reduce(ours.grad)
                off.append(theirs.grad - ours.grad)
                theirs.grad = ours.grad = None
            off += [a.double() - b for a, b in zip(whole_norm.buffers(), own_norm.buffers(), strict=True)]
        found[f"norm {number}"] = max(float(one.detach().abs().max()) for one in off)
    return found


def states(mesh: str, folder: Path) -> dict[str, Any]:
    """Save and load states, and refuse those that cannot be used."""
    engine = engine_of(mesh, jobs.unused)
    engine.save(folder / "first")
    engine.run(3)
    engine.save(folder / "third")
    engine.run(2)
    saving_apart = apart(engine, 5)
    engine.load(folder / "third")
    engine.run(3)
    loading_apart = apart(engine, 6)
    engine.load(folder / "first")
    engine.run(3)
    beginning_apart = apart(engine, 3)
    before, steps = whole(engine), engine.progress.steps
    if dist.get_rank() == 0:
        (folder / "file").write_text("a file")
        for part in (folder / "third").glob("__1_*"):
            part.write_bytes(part.read_bytes()[:-200])
    dist.barrier()
    refused = {
        "torn": refusal(lambda: engine.load(folder / "third")),
        "missing": refusal(lambda: engine.load(folder / "nothing")),
        "model": refusal(lambda: engine_of(mesh, jobs.wide).load(folder / "first")),
        "job": refusal(lambda: engine_of(mesh, jobs.plain).load(folder / "first")),
        "seed": refusal(lambda: engine_of(mesh, jobs.unused, 1).load(folder / "first")),
        "unwritable": refusal(lambda: engine.save(folder / "file" / "state")),
    }
    kept = farthest(before, whole(engine)) == 0 and engine.progress.steps == steps
    engine.run(2)
    return {
        "saving_apart": saving_apart,
        "loading_apart": loading_apart,
        "beginning_apart": beginning_apart,
        "kept": kept,
        "after_apart": apart(engine, 5),
        "refused": refused,
    }


def main() -> None:
    """Run the parts that the arguments name, and write the results of each rank."""
    folder, mesh = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    found = {name: globals()[name](mesh, folder) for name in sys.argv[3].split(",")}
    end_rank(folder, found)


if __name__ == "__main__":
    main()
