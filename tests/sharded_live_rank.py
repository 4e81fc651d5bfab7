"""Entry point that torchrun starts: one rank of a DeepSpeed engine, trained both attached and unattached."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from test_live import RESTLESS, Wanders, deep_gpt, gpt_loss, seeded, token_batches

import autotune
from autotune.choices import DEFAULT_STORAGES
from autotune.engines.deepspeed_library import imported
from autotune.errors import AttachError
from autotune.plan import Plan

os.environ.setdefault("DS_ACCELERATOR", "cpu")


class Insists:
    """A policy that proposes impossible plans, is late or does not answer, differently on each rank."""

    name = "insists"

    def __init__(self, rank: int) -> None:
        self.rank, self.asked = rank, 0

    def decide(self, observation: Any, plan: Plan) -> Any:
        self.asked += 1
        if self.asked % 7 == self.rank:
            raise RuntimeError("crashed")
        return plan.changed(
            storage=dict.fromkeys(plan.storage, DEFAULT_STORAGES[(self.asked + self.rank) % len(DEFAULT_STORAGES)])
        )

    def reset(self) -> None:
        """Do nothing."""


def engine_of(stage: int, accumulated: int, **sections: Any) -> Any:
    import deepspeed

    torch.manual_seed(0)
    model = deep_gpt()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulated,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000},
        **sections,
    }
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(stage: int, steps: int, accumulated: int, policy: Any, **sections: Any) -> dict[str, Any]:
    """Train manually, or attached if there is a policy."""
    rank, world = dist.get_rank(), dist.get_world_size()
    engine = engine_of(stage, accumulated, **sections)
    names = list(engine.module.state_dict())
    seeded(100 + rank)
    limits = {name: getattr(RESTLESS, name) for name in RESTLESS.__slots__}
    limits = {**limits, "pause_steps": 1, "decide_every": 1}
    tuner = None
    if policy is not None:
        tuner = autotune.attach(
            engine=engine,
            policy=policy,
            memory_budget_bytes=10**9,
            limits=autotune.Limits(**limits),
            runs_dir=None,
        )
    losses, plans = [], []
    batches = list(token_batches(steps * world * accumulated))[rank::world]
    for number, batch in enumerate(batches, 1):
        if tuner is None:
            loss = gpt_loss(engine, batch)
            engine.backward(loss)
            engine.step()
        else:
            for micro in tuner.micro_batches(batch):
                loss = gpt_loss(engine, micro)
                tuner.backward(loss)
            if number % accumulated == 0:
                tuner.step()
                plans.append(str(tuner.plan.to_json()["storage"]))
        losses.append(float(loss.detach()))
    status = {} if tuner is None else tuner.status
    if tuner is not None:
        tuner.detach()
    assert names == list(engine.module.state_dict())
    found = {
        "losses": losses,
        "weights": hashlib.sha256(
            b"".join(p.detach().float().numpy().tobytes() for p in engine.module.parameters())
        ).hexdigest(),
        "random": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "plans": plans,
        "switches": status.get("switches"),
        "attached": status.get("attached"),
        "why": status.get("detached_because"),
        "stage": status.get("stage"),
    }
    engine.destroy()
    return found


def refusals(stage: int) -> dict[str, str]:
    """Attach to unsupported objects, and return the error messages."""
    engine = engine_of(stage, 1)
    compiled = engine_of(stage, 1, managed_gradient_accumulation=False)
    found = {}
    for name, arguments in {
        "mode": {"engine": engine, "mode": "rounding"},
        "beside": {"engine": engine, "model": engine.module},
        "clip": {"engine": engine, "clip_norm": 0.5},
        "model": {"engine": engine.module},
        "managed": {"engine": compiled},
        "as a model": {"model": engine, "optimizer": engine.optimizer},
        "none": {},
    }.items():
        try:
            autotune.attach(**arguments)  # type: ignore[arg-type]
        except AttachError as error:
            found[name] = str(error)
    return found


def main() -> None:
    """Run the parts that the arguments name, and write the results of each rank."""
    folder, stage, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    deepspeed = imported("cpu")
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    rank = dist.get_rank()
    runs = {
        "plain": train(stage, steps, 1, None),
        "wandering": train(stage, steps, 1, Wanders()),
        "insisting": train(stage, steps, 1, Insists(rank)),
        "plain of two": train(stage, steps // 2, 2, None),
        "wandering of two": train(stage, steps // 2, 2, Wanders()),
    }
    if 0 < stage < 3:
        bf16 = {"bf16": {"enabled": True}}
        runs["plain in bf16"] = train(stage, steps // 2, 1, None, **bf16)
        runs["wandering in bf16"] = train(stage, steps // 2, 1, Wanders(), **bf16)
    document = {"runs": runs, "refusals": refusals(stage)}
    (folder / f"rank{rank}.json").write_text(json.dumps(document))
    dist.barrier()


if __name__ == "__main__":
    main()
