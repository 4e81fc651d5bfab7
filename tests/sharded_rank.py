"""Entry point that torchrun starts: one rank of a job under random plans, which records its results.

The ranks train through DeepSpeed if the layout is a ZeRO stage, and through FSDP2 or a pipeline if it is a mesh.
"""

from __future__ import annotations

import hashlib
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ranks import end_rank
from small_models import SharedGPT, TinyGPT
from torch import nn

from autotune import EngineOptions, Job, TorchEngine
from autotune.engines.deepspeed_engine import DeepSpeedEngine
from autotune.engines.fsdp2_engine import Fsdp2Engine
from autotune.engines.pipeline_engine import PipelineEngine
from autotune.engines.rank_engine import RankEngine
from autotune.launching import launched, split
from autotune.mechanics.collectives import of_all_ranks, of_first_rank
from autotune.mesh import Mesh
from autotune.plan import Plan, PlanSpace, Precision, Storage

BATCH, LENGTH = 8, 6
IGNORED = -100


def batches(seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield tokens of which a varying number is ignored in the loss, in some samples all."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(11, (BATCH, LENGTH), generator=generator)
        kept = torch.randint(0, LENGTH, (BATCH, 1), generator=generator)
        labels = torch.where(torch.arange(1, LENGTH) <= kept, tokens[:, 1:], IGNORED)
        yield {"tokens": tokens, "labels": labels}


def count(batch: dict[str, torch.Tensor]) -> int:
    return int((batch["labels"] != IGNORED).sum())


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    found = model(batch["tokens"][:, :-1]).flatten(0, 1)
    return F.cross_entropy(found, batch["labels"].flatten(), ignore_index=IGNORED)


def make(dropout: float = 0.0, **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "name": "tiny-sharded",
        "model": lambda: TinyGPT(width=16, blocks=4, dropout=dropout),
        "batches": batches,
        "loss": loss,
        "count": count,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3),
        "evaluate": lambda model: float(loss(model, next(batches(99)))),
        "target": 0.0,
        "batch_size": BATCH,
        "accumulation_choices": (1, 2, 4),
        "clip_norm": 1.0,
    }
    return Job(**{**settings, **changes})


def job_of(layout: str, dropout: float = 0.0, **changes: Any) -> Job:
    """Return the job of a layout: one whose layers can be divided if ranks share them."""
    divided = {"name": "tiny-divided", "model": lambda: SharedGPT(dropout=dropout)} if "tp=" in layout else {}
    return make(dropout, **{**divided, **changes})


def engine_of(layout: str, job: Job, **settings: Any) -> RankEngine:
    """Return the engine of a layout: a ZeRO stage, stages of a pipeline, or a mesh."""
    if layout.isdigit():
        return DeepSpeedEngine(job, zero_stage=int(layout), **settings)
    if layout.startswith("pipe"):
        return PipelineEngine(job, mesh=layout, **settings)
    return Fsdp2Engine(job, mesh=layout, **settings)


def one_sample() -> Job:
    return make(batch_size=1, accumulation_choices=(1,))


def at_random(space: PlanSpace, draw: random.Random, precision: Precision = Precision.FP32) -> Plan:
    k = draw.choice(space.accumulation_choices)
    storage = {name: draw.choice(space.storages) for name in space.recomputable}
    return space.plan(accumulation_steps=k, precision=precision).changed(storage=storage)


def on_one_rank(plan: Plan) -> Plan:
    """Return the plan for a single rank, on which no weights are gathered."""
    same = {Storage.GATHERED: Storage.SAVE, Storage.GATHERED_RECOMPUTE: Storage.RECOMPUTE}
    return plan.changed(storage={name: same.get(storage, storage) for name, storage in plan.storage.items()})


def mixed_precision(layout: str, steps: int) -> dict[str, Any]:
    """Train with random units in bf16 and fp32, and train the same with plain torch."""
    options = EngineOptions(meter_memory=False, statistics_every=None)
    ours, plain = engine_of(layout, job_of(layout), options=options), TorchEngine(job_of(layout), options=options)
    if Precision.BF16 not in ours.space.precisions:
        return {"skipped": ours.locks}
    draw, apart, kinds = random.Random(3), [], set()
    for _ in range(steps):
        precision = {name: draw.choice((Precision.FP32, Precision.BF16)) for name in ours.plan.precision}
        plan = at_random(ours.space, draw).changed(precision=precision)
        kinds |= set(precision.values())
        ours.apply(plan)
        plain.apply(on_one_rank(plan))
        apart.append(abs(ours.run(1).loss - plain.run(1).loss))
    return {"loss_apart": max(apart), "kinds": len(kinds)}


def sent_otherwise(layout: str, steps: int) -> dict[str, Any]:
    """Train with gradients or weights that ranks send in another form, and train the same with their own.

    Args:
        layout: the layout, and the launch choice after ``+``.
        steps: number of steps.
    """
    layout, _, choice = layout.partition("+")
    options = EngineOptions(statistics_every=5)
    jobs = [launched(job_of(layout, clip_norm=None), split(f"job{one}", where="test")[1]) for one in ("", f"+{choice}")]
    engines = [engine_of(layout, job, options=options) for job in jobs]
    draw, losses = random.Random(5), []
    for _ in range(steps):
        plan = at_random(engines[0].space, draw)
        for engine in engines:
            engine.apply(plan)
        losses.append([engine.run(1).loss for engine in engines])
    weights = [[one.clone() for one in whole(engine)] for engine in engines]
    begun = [one.detach() for one in TorchEngine(job_of(layout)).model.parameters()]
    metrics_apart = abs(engines[1].evaluate() - float(loss_of(job_of(layout), weights[1])))
    saved, again = engines[1].snapshot(), []
    for _ in range(2):
        engines[1].restore(saved)
        again.append(f"{engines[1].run(4).loss} {digest(whole(engines[1]))}")
    return {
        "apart": farthest(*weights) / farthest(weights[0], begun),
        "losses_apart": max(abs(one - other) for one, other in losses),
        "metrics_apart": metrics_apart,
        "again": again,
        "digest": digest(weights[1]),
    }


@torch.no_grad()
def loss_of(job: Job, weights: list[torch.Tensor]) -> float:
    """Return the metric of a model with given weights, in this process alone."""
    model = TorchEngine(job).model.eval()
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.copy_(weight)
    return job.evaluate(model)


def whole(engine: RankEngine) -> list[torch.Tensor]:
    """Return the model's parameters, gathered from all ranks."""
    if isinstance(engine, Fsdp2Engine):
        engine.ranked.settle()
        return [parameter.detach().full_tensor() for parameter in engine.model.parameters()]  # type: ignore[attr-defined]
    if isinstance(engine, PipelineEngine):
        absent = set(map(id, engine.absent))
        own = {name: one.detach() for name, one in engine.model.named_parameters() if id(one) not in absent}
        known = {name: one for ranks in of_all_ranks(own) for name, one in ranks.items()}
        return [known[name] for name, _ in engine.model.named_parameters()]
    assert isinstance(engine, DeepSpeedEngine)
    import deepspeed

    parameters = list(engine.model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=engine.zero_stage == 3):
        return [parameter.detach().clone() for parameter in parameters]


def digest(values: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for value in values:
        found.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def farthest(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def moved(engine: RankEngine, mesh: Mesh, options: EngineOptions) -> RankEngine:
    """Continue a run on another mesh of the same ranks, from the state in a folder."""
    assert isinstance(engine, Fsdp2Engine)
    with tempfile.TemporaryDirectory() as own:
        folder = of_first_rank(own)
        engine.save(folder)
        engine.close()
        found = Fsdp2Engine(engine.job, mesh=str(mesh), options=options)
        found.load(folder)
        # No rank removes the folder before all have read it.
        of_all_ranks(folder)
    return found


def equals_torch_on_all_meshes(layout: str, steps: int) -> dict[str, Any]:
    """Do as :func:`equals_torch`, with the mesh drawn anew at every eighth step."""
    return equals_torch(layout, steps, moving=True)


def equals_torch(layout: str, steps: int, *, moving: bool = False, **changes: Any) -> dict[str, Any]:
    """Train under a random plan at every step, and train the same with plain torch in this process."""
    options = EngineOptions(meter_memory=False, statistics_every=7)
    ours = engine_of(layout, job_of(layout, **changes), options=options)
    plain = TorchEngine(job_of(layout, **changes), options=options)
    draw, windows, switches, meshes = random.Random(5), [], 0, set()
    for step in range(steps):
        if moving and step % 8 == 7:
            mesh = draw.choice(Mesh.all_of(ours.world, tp="tp=" in layout))
            ours = moved(ours, mesh, options)
            meshes.add(str(mesh))
        plan = at_random(ours.space, draw)
        switches += plan != ours.plan
        ours.apply(plan)
        plain.apply(on_one_rank(plan))
        windows.append((ours.run(1), plain.run(1)))
    apart = [abs(one.loss - other.loss) for one, other in windows]
    norms = [
        abs(one.gradient.norm / other.gradient.norm - 1)
        for one, other in windows
        if one.gradient is not None and other.gradient is not None
    ]
    last = ours.monitor.state.latest
    assert last is not None
    return {
        "apart": farthest(whole(ours), list(plain.model.parameters())),
        "loss_apart": max(apart),
        "norm_apart": max(norms),
        "sampled": len(norms),
        "switches": switches,
        "meshes": len(meshes),
        "failures": sum(one.failure is not None for one, _ in windows),
        "samples": ours.progress.samples,
        "micro_batches": sum(plan_window.steps for plan_window, _ in windows),
        "noise_scale": last.noise_scale,
        "noise_scale_torch": plain.monitor.state.latest.noise_scale,  # type: ignore[union-attr]
        "per_unit": {name: unit.rms for name, unit in last.per_unit.items()},
        "per_unit_torch": {name: unit.rms for name, unit in plain.monitor.state.latest.per_unit.items()},  # type: ignore[union-attr]
        "metric_apart": abs(ours.evaluate() - plain.evaluate()),
        "digest": digest(whole(ours)),
        "k": list(ours.space.accumulation_choices),
    }


def adaptive_equals_torch(layout: str, steps: int) -> dict[str, Any]:
    """Do the same under adaptive batching, where the learning rate follows k."""
    found = equals_torch(layout, steps, batching="adaptive", lr_rule="sqrt")
    return {name: found[name] for name in ("apart", "loss_apart", "norm_apart", "samples", "failures")}


def storage_is_exact(layout: str, steps: int) -> dict[str, Any]:
    """Train twice with dropout: unchanged, and with random units recomputed."""
    digests, recomputed = [], 0
    for switching in (False, True):
        engine = engine_of(layout, job_of(layout, dropout=0.1), options=EngineOptions(meter_memory=False))
        draw = random.Random(2)
        for _ in range(steps):
            if switching:
                k = engine.space.accumulation_choices[0]
                engine.apply(at_random(engine.space, draw).changed(accumulation_steps=k))
            engine.run(1)
        digests.append(digest(whole(engine)))
        recomputed += sum(engine.recomputations().values())
        engine.close()
    return {"digests": digests, "recomputed": recomputed}


def troubles(layout: str, steps: int) -> dict[str, Any]:
    """Train with nonfinite losses on one rank, and restore a snapshot."""
    import torch.distributed as dist

    bad = {"rank": -1}

    def troubled(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found = loss(model, batch)
        return found * float("nan") if bad["rank"] == dist.get_rank() else found

    engine = engine_of(layout, job_of(layout, loss=troubled))
    engine.apply(engine.space.plan(accumulation_steps=2, precision=engine.space.precisions[0]))
    engine.run(steps)
    before = digest(whole(engine))
    saved = engine.snapshot()
    failures = []
    # Only the last stage of a pipeline computes losses.
    for rank in range(engine.world - 1 if isinstance(engine, PipelineEngine) else 0, engine.world):
        bad["rank"] = rank
        failures.append(str(engine.run(2).failure))
    bad["rank"] = -1
    kept = digest(whole(engine)) == before
    engine.restore(saved)
    restored = digest(whole(engine)) == before
    first = engine.run(steps)
    after = digest(whole(engine))
    engine.evaluate()
    engine.restore(saved)
    again = engine.run(steps)
    return {
        "failures": failures,
        "kept": kept,
        "restored": restored,
        "same_after": after == digest(whole(engine)) and first.loss == again.loss,
        "after": after,
        "peak": first.peak_bytes,
        "failure": str(first.failure),
    }


def other_arguments(layout: str, _steps: int) -> dict[str, Any]:
    """Start ranks with different seeds."""
    import torch.distributed as dist

    from autotune.errors import InputError

    dist.init_process_group("gloo")
    try:
        engine_of(layout, make(), seed=dist.get_rank())
    except InputError as error:
        return {"refused": str(error)}
    return {}


def main() -> None:
    """Run the parts that the arguments name, and write the results of each rank."""
    folder, what, layout, steps = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    found = {name: globals()[name](layout, steps) for name in what.split(",")}

    end_rank(folder, found)


if __name__ == "__main__":
    main()
