"""Entry point of one rank of a sharded model, trained attached and unattached and compared bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_models import TinyGPT
from test_live import RESTLESS, Wanders, gpt_loss, token_batches
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autotune
from autotune.errors import AttachError


class Mixed(nn.Module):
    """A block whose two layers can be sharded over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def fully_sharded(model: nn.Module, mesh: DeviceMesh | None = None, *, reshards: bool = True) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshards)


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard each block's layers over ranks, as tensor parallelism does."""
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def spread(way: str) -> nn.Module:
    torch.manual_seed(0)
    model, world = TinyGPT(width=16, blocks=4), dist.get_world_size()
    if way in ("tensor", "both"):
        model.blocks = nn.ModuleList(Mixed() for _ in range(4))
    if way == "tensor":
        return split(model, init_device_mesh("cpu", (world,)))
    if way == "flattened":
        wrapped = ModuleWrapPolicy({type(model.blocks[0])})
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, auto_wrap_policy=wrapped, use_orig_params=True, device_id=cpu)
    if way in ("both", "hybrid"):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "other"))
        if way == "hybrid":
            return fully_sharded(model, mesh)
        return fully_sharded(split(model, mesh["other"]), mesh["data"])
    return fully_sharded(model, reshards=way == "resharded")


def train(way: str, attaching: dict[str, Any] | None, clip_norm: float | None) -> tuple[list[Any], list[str]]:
    """Return losses, weights and the recomputed units of each step."""
    model = spread(way)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    # Ranks that share a layer have the same batches.
    own = {"tensor": 0, "both": dist.get_rank() // 2}.get(way, dist.get_rank())
    torch.manual_seed(own)
    tuner = None
    if attaching is not None:
        tuner = autotune.attach(model, optimizer, clip_norm=clip_norm, limits=RESTLESS, **attaching)
    found: list[Any] = []
    plans = []
    for batches in token_batches(24):
        batch = batches.tensor_split(4)[own]
        if tuner is None:
            loss = gpt_loss(model, batch)
            loss.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        else:
            for micro in tuner.micro_batches(batch):
                plans.append("".join(storage[0] for storage in tuner.plan.storage.values()))
                loss = gpt_loss(model, micro)
                tuner.backward(loss)
            tuner.step()
        found.append(float(loss.detach()))
    if tuner is not None:
        assert tuner.attached, tuner.detached_because
        assert not [name for name in tuner.locks if "blocks" in name], tuner.locks
        tuner.detach()
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [*found, *(one.tolist() for one in whole), torch.get_rng_state().tolist()], plans


def refuses(model: nn.Module, message: str, **attaching: Any) -> None:
    try:
        autotune.attach(model, torch.optim.SGD(model.parameters(), 0.1), runs_dir=None, **attaching)
    except AttachError as error:
        assert message in str(error), error  # noqa: PT017
    else:
        raise AssertionError(f"not refused: {message}")


def main() -> None:
    dist.init_process_group("gloo")
    run_all(Path(sys.argv[1]), sys.argv[2].split(","))
    dist.destroy_process_group()


def run_all(folder: Path, ways: list[str]) -> None:
    """Train in every way, alone and attached."""
    refuses(TinyGPT(), "not spread over them")
    for way in ways:
        # torch cannot compute one norm of tensors on several meshes.
        clip_norm = None if way in ("tensor", "both", "flattened") else 0.5
        plain, _ = train(way, None, clip_norm)
        for name, policy, budget in (("lean", "exact", 1), ("wander", Wanders(), 10**9)):
            attaching = {"policy": policy, "memory_budget_bytes": budget, "runs_dir": folder / way}
            attaching["settings"] = autotune.Settings(name=name)
            tuned, plans = train(way, attaching, clip_norm)
            assert tuned == plain, (way, name)
            if way == "flattened":
                assert set("".join(plans)) == {"s"}
                continue
            assert any("r" in plan for plan in plans)
            assert name == "lean" or len(set(plans)) > 4
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, plans)
            assert all(one == plans for one in told)
    if "flattened" in ways:
        refuses(spread("flattened"), "clips by a method of its own", clip_norm=1.0)


if __name__ == "__main__":
    main()
