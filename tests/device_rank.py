"""Entry point that torchrun starts: one rank of a data-parallel run on the fake accelerator, attached or not."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import device_jobs
import fake_accelerator
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

import autotune

LIMITS = autotune.Limits(decide_every=5, pause_steps=5, min_steps_between_switches=5, overhead_frac=10.0)


class Done(dist._Work):
    """A collective that has ended."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Future[Any] = Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        return self._future


class ThroughHost(dist.ProcessGroup):
    """Collectives on device tensors, run on the host with gloo."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: Any) -> None:
        super().__init__(rank, world)
        self._gloo = dist.ProcessGroupGloo(store, rank, world, timeout)

    def _on_host(self, name: str, tensors: Sequence[torch.Tensor], *rest: Any) -> Done:
        host = [tensor.cpu() for tensor in tensors]
        getattr(self._gloo, name)(host, *rest).wait()
        for tensor, value in zip(tensors, host, strict=True):
            tensor.copy_(value)
        return Done(list(tensors))

    def allreduce(self, tensors: Any, options: Any = None) -> Done:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        return self._on_host("allreduce", tensors, *([options] if options is not None else []))

    def broadcast(self, tensors: Any, options: Any) -> Done:
        return self._on_host("broadcast", tensors, options)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Done:
        for output, tensor in zip(outputs, inputs, strict=True):
            host = [value.cpu() for value in output]
            self._gloo.allgather([host], [tensor.cpu()]).wait()
            for value, found in zip(output, host, strict=True):
                value.copy_(found)
        return Done(outputs)

    def barrier(self, opts: Any = None) -> Done:
        self._gloo.barrier().wait()
        return Done([])

    def getBackendName(self) -> str:
        return "through_host"


def main() -> None:
    """Train one rank."""
    folder, way, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    fake = fake_accelerator.load()
    fake.present(True)
    dist.Backend.register_backend("through_host", ThroughHost, devices=["fake", "cpu"])
    dist.init_process_group("through_host")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inner = device_jobs.Transformer().to("fake")
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = device_jobs.optimizer(model.parameters())
    torch.manual_seed(100 + rank)
    tuner = None
    if way != "plain":
        tuner = autotune.attach(
            model, optimizer, "planner", memory_budget_bytes=int(os.environ["BUDGET"]), limits=LIMITS, runs_dir=None
        )
    losses, plans, peaks = [], [], []
    for number, batch in enumerate(device_jobs.batches(0)):
        if number == steps * world:
            break
        if number % world != rank:
            continue
        torch.fake.reset_peak_memory_stats()  # type: ignore[attr-defined]
        moved = batch.to("fake")
        if tuner is None:
            loss = device_jobs.mean_loss(model, moved)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            for micro in tuner.micro_batches(moved):
                loss = device_jobs.mean_loss(model, micro)
                tuner.backward(loss)
            tuner.step()
            plans.append(hashlib.sha256(json.dumps(tuner.plan.to_json()).encode()).hexdigest())
        losses.append(loss.item())
        peaks.append(fake.stats()["allocated_bytes.all.peak"])
    status = {} if tuner is None else tuner.status
    weights = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in inner.parameters())).hexdigest()
    document = {
        "losses": losses,
        "weights": weights,
        "plans": plans,
        "peaks": peaks,
        "least": fake.stats()["allocated_bytes.all.current"],
        "attached": status.get("attached"),
        "why": status.get("detached_because"),
        "trips": status.get("trips"),
        "locks": None if tuner is None else tuner.locks,
        "predicted": status.get("predicted_peak_bytes"),
    }
    (folder / f"{way}-{rank}.json").write_text(json.dumps(document, default=str))
    if tuner is not None:
        tuner.detach()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
