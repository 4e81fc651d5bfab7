"""Be one of two ranks that train a model after ``fully_shard()``, alone and attached, and compare to the last bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_models import TinyGPT
from test_live import RESTLESS, Wanders, gpt_loss, token_batches
from torch import nn
from torch.distributed.fsdp import fully_shard

import autotune
from autotune.errors import AttachError


def sharded(*, reshards: bool) -> nn.Module:
    torch.manual_seed(0)
    model = TinyGPT(width=16, blocks=4)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshards)
    return fully_shard(model, reshard_after_forward=reshards)


def train(way: str, folder: Path, *, reshards: bool) -> tuple[list[Any], list[str]]:
    """Return losses and weights, and what was recomputed at each step."""
    rank = dist.get_rank()
    model = sharded(reshards=reshards)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(rank)
    tuner = None
    if way != "plain":
        policy, budget = ("exact", 1) if way == "lean" else (Wanders(), 10**9)
        tuner = autotune.attach(
            model, optimizer, policy, memory_budget_bytes=budget, limits=RESTLESS, runs_dir=folder, name=way
        )
    found: list[Any] = []
    plans = []
    for batch in token_batches(40):
        own = batch.tensor_split(2)[rank]
        if tuner is None:
            loss = gpt_loss(model, own)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            for micro in tuner.micro_batches(own):
                plans.append("".join(storage[0] for storage in tuner.plan.storage.values()))
                loss = gpt_loss(model, micro)
                tuner.backward(loss)
            tuner.step()
        found.append(float(loss.detach()))
    if tuner is not None:
        assert tuner.attached, tuner.detached_because
        assert not [name for name in tuner.locks if name.startswith("blocks")], tuner.locks
        tuner.detach()
    found += [parameter.full_tensor().tolist() for parameter in model.parameters()]  # type: ignore[attr-defined]
    return [*found, torch.get_rng_state().tolist()], plans


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    raw = TinyGPT()
    try:
        autotune.attach(raw, torch.optim.SGD(raw.parameters(), 0.1), runs_dir=None)
    except AttachError as error:
        assert "not spread over them" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a model that the ranks do not share was accepted")
    for reshards in (True, False):
        plain, _ = train("plain", folder, reshards=reshards)
        for way in ("lean", "wander"):
            tuned, plans = train(way, folder / str(reshards), reshards=reshards)
            assert tuned == plain, (way, reshards)
            assert any("r" in plan for plan in plans)
            assert way == "lean" or len(set(plans)) > 4
            told: list[Any] = [None, None]
            dist.all_gather_object(told, plans)
            assert told[0] == told[1]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
