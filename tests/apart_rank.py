"""Run one of several ranks that differ in times, batches or groups, alone and attached, and compare to the bit."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from spread_rank import Mixed, split
from test_live import RESTLESS, gpt_loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from zoo import WIDTH, Stack, small_gpt, texts

import autotune
from autotune.errors import AttachError

# Far more than a test takes: a rank that waits for others hangs.
LIMITS = dataclasses.replace(RESTLESS, rank_timeout_s=10_000.0)


class Skewed(Mixed):
    """A block that is slow on some ranks."""

    slow_on = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == self.slow_on:
            time.sleep(0.004)
        return super().forward(x)


def skewed() -> nn.Module:
    """Return a model whose layers are split over ranks, each of which finds other blocks slow."""
    model = Stack([Skewed() for _ in range(8)], WIDTH)
    for number, block in enumerate(model.blocks):
        block.slow_on = number % 2
    return split(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def nested() -> nn.Module:
    """Return a model of which parts of blocks are sharded by themselves."""
    model = small_gpt()
    for block in model.blocks:
        for part in (block.attention, block.mix, block):
            fully_shard(part)
    return fully_shard(model)


def halves() -> nn.Module:
    """Return a model that each half of the ranks trains for itself."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return nn.parallel.DistributedDataParallel(small_gpt(), process_group=groups[dist.get_rank() // 2])


def parallel() -> nn.Module:
    return nn.parallel.DistributedDataParallel(small_gpt())


def train(make: Callable[[], nn.Module], batches: list[torch.Tensor], attaching: dict[str, Any] | None) -> Any:
    """Return all that a training comes to, the plans of its steps, and its locks."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    torch.manual_seed(dist.get_rank() if make is not skewed else 0)
    tuner = attaching and autotune.attach(model, optimizer, "exact", limits=LIMITS, runs_dir=None, **attaching)
    found: list[Any] = []
    plans: list[str] = []
    for number, batch in enumerate(batches):
        for attempt in range(2):
            # One rank meets a sample that it cannot read, before it calls the model.
            fails = make is parallel and number in (4, 9) and not attempt and not dist.get_rank()
            for micro in (batch,) if not tuner else tuner.micro_batches(batch):
                if fails:
                    break
                loss = gpt_loss(model, micro)
                loss.backward() if not tuner else tuner.backward(loss)
            if not fails:
                break
        if tuner:
            plans.append("".join(storage[0] for storage in tuner.plan.storage.values()))
            tuner.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
        found.append(float(loss.detach()))
    locks = {}
    if tuner:
        assert tuner.attached, tuner.detached_because
        locks = {name: why for name, why in tuner.locks.items() if name.startswith("blocks")}
        tuner.detach()
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [*found, *(one.tolist() for one in whole), torch.get_rng_state().tolist()], plans, locks


def run(make: Callable[[], nn.Module]) -> None:
    """Train alone and attached, within budgets between the least and the most that is needed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    batches = list(texts(24 * world, rows=8))[rank::world]
    budgets: list[int] = [1, 10**12]
    if make is skewed:
        batches, budgets = list(texts(24, rows=64, length=33)), [2_600_000]
    elif make is nested:
        lengths = torch.randint(8, 40, (24,), generator=generator).tolist()
        batches = [torch.randint(0, 13, (4, length), generator=generator) for length in lengths]
    plain, _, _ = train(make, batches, None)
    for budget in budgets:
        tuned, plans, locks = train(make, batches, {"memory_budget_bytes": budget})
        assert tuned == plain, (make.__name__, budget)
        assert bool(locks) == (make is nested), locks
        assert all("part of it" in why for why in locks.values()), locks
        told: list[Any] = [None] * world
        dist.all_gather_object(told, plans)
        assert all(one == plans for one in told), told
        assert make is not skewed or any("r" in plan and "s" in plan for plan in plans), plans


def attach_alone() -> None:
    """Attach on one rank only."""
    model = parallel()
    if dist.get_rank() == 0:
        limits = dataclasses.replace(RESTLESS, rank_timeout_s=1.0)
        try:
            autotune.attach(model, torch.optim.SGD(model.parameters(), 0.1), limits=limits, runs_dir=None)
        except AttachError as error:
            assert "not all of the 2 ranks" in str(error), error  # noqa: PT017
        else:
            raise AssertionError("not refused")
        assert not any("forward" in vars(part) for part in model.modules())


def cut_unevenly_sharded() -> None:
    """Cut batches of a model of which the ranks hold unequal parts of a weight; its gradients cannot be flattened."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(13, WIDTH), *(fully_shard(nn.Linear(WIDTH, WIDTH)) for _ in range(3)))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    with autotune.attach(model, optimizer, mode="rounding", limits=LIMITS, runs_dir=None) as tuner:
        for _ in range(8):
            for micro in tuner.micro_batches(torch.randint(0, 13, (4, 6))):
                tuner.backward(model(micro).square().mean())
            tuner.step()
        assert tuner.attached, tuner.detached_because
        assert "accumulation_steps" not in tuner.locks, tuner.locks


def main() -> None:
    dist.init_process_group("gloo")
    run_all(sys.argv[1].split(","))
    dist.destroy_process_group()


def run_all(ways: list[str]) -> None:
    """Train in every way, alone and attached."""
    for way in ways:
        if way in _APART:
            _APART[way]()
        else:
            run({"skewed": skewed, "nested": nested, "halves": halves, "parallel": parallel}[way])


_APART = {"attach_alone": attach_alone, "uneven": cut_unevenly_sharded}


if __name__ == "__main__":
    main()
