"""Entry point that torchrun starts: one rank of attached runs in which a loader, a rank or a link is slow."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_jobs import next_token_loss, token_batches
from small_models import TinyGPT
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autotune

NAP_S, STEPS = 0.06, 90


def slow(batches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    for batch in batches:
        time.sleep(NAP_S)
        yield batch


class Late(nn.Module):
    """A model that takes long for its forward pass on one rank."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            time.sleep(NAP_S)
        return self.model(tokens)


def slow_link(_state: Any, bucket: Any) -> Any:
    """Reduce a bucket of gradients, late: no rank computes meanwhile, not even one that finds the sum there."""
    sent = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True).get_future()
    late: Any = torch.futures.Future()
    sent.then(lambda future: threading.Timer(NAP_S, late.set_result, future.value()).start())
    return late


# Torch reads the annotations as classes.
slow_link.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def measured(*, loader: bool = False, late: bool = False, hook: Callable[..., Any] | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    model: nn.Module = TinyGPT()
    parallel = DistributedDataParallel(Late(model) if late else model)
    if hook is not None:
        parallel.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    limits = autotune.Limits(decide_every=30, overhead_frac=1e9, slowdown_frac=1e9)
    tuner = autotune.attach(parallel, optimizer, "planner", runs_dir=None, limits=limits)
    batches = token_batches(dist.get_rank())
    for batch, _ in zip(slow(batches) if loader else batches, range(STEPS), strict=False):
        for micro in tuner.micro_batches(batch):
            tuner.backward(next_token_loss(parallel, micro))
        tuner.step()
    status, before = tuner.status, dist.all_reduce
    tuner.detach()
    return {
        **{name: status[name] for name in ("attached", "parts", "advice")},
        "restored": before is not dist.all_reduce
        and dist.all_reduce.__module__ == "torch.distributed.distributed_c10d",
    }


def main() -> None:
    """Train one run after another."""
    dist.init_process_group("gloo")
    found = {"loader": measured(loader=True), "rank": measured(late=True), "link": measured(hook=slow_link)}
    Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
