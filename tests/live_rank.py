"""Entry point that torchrun starts: one rank of a data-parallel run, attached or not, that records its results."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_models import TinyGPT
from test_live import RESTLESS, Moves, Wanders, deep_gpt, gpt_loss, profiled_peaks, seeded, token_batches
from test_live_modes import Roams
from torch import nn

import autotune
from autotune.mechanics import known_precisions
from autotune.plan import Plan, Precision


class Troubled(Wanders):
    """A policy that proposes random plans and is sometimes late, invalid or raises, differently on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.asked = 0

    def decide(self, observation: Any, plan: Plan) -> Any:
        """Return a plan in most cases."""
        self.asked += 1
        if self.asked % (11 + self.rank) == 3:
            time.sleep(0.01)
        # Each trip pauses acting for twice as long as the previous one.
        if self.asked in (5, 60, 200):
            raise RuntimeError("crashed")
        if self.asked in (30, 120, 300):
            return plan.changed(storage={"nothing": "recompute"})
        return super().decide(observation, plan)


def main() -> None:
    """Train one run after another; each is given as a way and its steps."""
    folder, runs = Path(sys.argv[1]), [run.split(":") for run in sys.argv[2].split(",")]
    # Each rank profiles alone before the process group exists.
    peaks = profiled_peaks() if ["following"] in [run[:1] for run in runs] else (0, 0)
    dist.init_process_group("gloo")
    run_all(folder, {way: int(steps) for way, steps in runs}, peaks)
    dist.destroy_process_group()


def run_all(folder: Path, ways: dict[str, int], peaks: tuple[int, int] = (0, 0)) -> None:
    """Train one run after another, given the steps of each way."""
    for way, steps in ways.items():
        train(folder, way, steps, *peaks)
        known_precisions.forget()


def train(folder: Path, way: str, steps: int, lowest: int, highest: int) -> None:
    """Train one run.

    Args:
        folder: where each rank writes what came of it.
        way: whether and how the run is attached to.
        steps: of each rank.
        lowest: bytes of the leanest plan, from a profile, for the way that needs it.
        highest: bytes of the baseline.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    seeded(rank)
    torch.manual_seed(0)
    # If a batch is split, dropout draws different masks.
    inner = TinyGPT(width=16, blocks=4, dropout=0.0).double() if way.endswith("rounding") else deep_gpt()
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tuner, joins = None, way.endswith("joining")
    if not way.startswith("plain"):
        policies = {"troubled": Troubled(rank), "wandering": Wanders(), "following": "exact", "rounding": Roams()}
        policy: Any = policies.get(way, Wanders())
        budget: Any = 10**9
        if way == "following":
            # Each rank has its own budget and batch length.
            buckets = sum(parameter.nbytes for parameter in inner.parameters())
            budget = Moves(int(lowest * (1.02 + rank / 20)) + buckets, int(highest * (1.1 + rank / 20)) + buckets)
        torch.manual_seed(100 + rank)
        limits = autotune.Limits(**{**{name: getattr(RESTLESS, name) for name in RESTLESS.__slots__}, "pause_steps": 1})
        if way.startswith("leaving") or joins:
            # A rank that waited for another would exceed the test's time limit.
            limits = dataclasses.replace(limits, rank_timeout_s=10_000.0)
        mode, settings = "rounding" if way == "rounding" else "exact", autotune.Settings()
        if way.startswith("leaving"):
            # The ranks disagree about what is fast.
            mode, settings = "tolerant", autotune.Settings(accumulation_choices=(1,))
            known_precisions.keep("cpu", {(Precision.BF16, Precision.FP16)[rank]: "slow here"})
        tuner = autotune.attach(
            model,
            optimizer,
            policy,
            mode=mode,
            clip_norm=1.0,
            memory_budget_bytes=budget,
            limits=limits,
            runs_dir=None,
            settings=settings,
        )
    else:
        torch.manual_seed(100 + rank)
    losses, plans, ks = [], [], []
    left_at = None
    with model.join() if joins else nullcontext():
        for number, batch in enumerate(token_batches(steps * world)):
            # In join(), one rank has fewer batches.
            if number % world != rank or (joins and rank == 0 and number >= (steps - 6) * world):
                continue
            if tuner is None:
                loss = gpt_loss(model, batch)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            else:
                for micro in tuner.micro_batches(batch):
                    loss = gpt_loss(model, micro)
                    tuner.backward(loss)
                tuner.step()
                if way == f"leaving-{len(losses)}" and rank == 0:
                    tuner.detach("its loop wants to")
                if left_at is None and not tuner.attached:
                    left_at = len(losses)
                ks.append(tuner.plan.accumulation_steps)
                plans.append(hashlib.sha256(json.dumps(tuner.plan.to_json()).encode()).hexdigest())
            losses.append(float(loss.detach()))
    locks = {} if tuner is None else dict(tuner.locks)
    status = {} if tuner is None else tuner.status
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in inner.parameters())).hexdigest()
    document = {
        "losses": losses,
        "weights": weights,
        "parameters": [value for p in inner.parameters() for value in p.detach().flatten().tolist()],
        "ks": ks,
        "random": torch.get_rng_state().tolist(),
        "plans": plans,
        "locks": locks,
        "switches": status.get("switches"),
        "placed": status.get("placed"),
        "attached": status.get("attached"),
        "left_at": left_at,
        "why": status.get("detached_because"),
        "trips": [reason for _, reason in status.get("trips", [])],
    }
    (folder / f"{way}-{rank}.json").write_text(json.dumps(document))
    if tuner is not None:
        tuner.detach()
    dist.barrier()


if __name__ == "__main__":
    main()
