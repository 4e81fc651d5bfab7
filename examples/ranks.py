"""Train on several ranks with the tuner attached: all ranks run under one plan.

torchrun --nproc-per-node 2 examples/ranks.py ddp     # or fsdp
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autotune


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(6)]
    model = nn.Sequential(*blocks, nn.Linear(64, 64))
    if sys.argv[1:] == ["fsdp"]:
        for block in model:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())

    with autotune.attach(model, optimizer, "exact", memory_budget_bytes="40MiB") as tuner:
        for _ in range(30):
            batch = torch.randn(16, 16, 64, generator=generator)
            for x in tuner.micro_batches(batch):
                loss = nn.functional.mse_loss(model(x), x.cumsum(1).tanh())
                tuner.backward(loss)
            tuner.step()
        recomputed = sum(storage == "recompute" for storage in tuner.plan.storage.values())
        print(f"rank {dist.get_rank()}: loss {loss.item():.3f}, {recomputed} units recomputed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
