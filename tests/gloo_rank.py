"""One of several ranks that add numbers or fail in a requested way; started by this package."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import leftovers
import torch
from torch import distributed

from autotune.engines.rank_processes import Report, be_rank
from autotune.engines.rendezvous import store_of_ranks
from autotune.errors import JobError


def work(asked: dict[str, Any], report: Report) -> dict[str, Any]:
    """Sum the ranks' numbers, and report which process listens where."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Longer than any test may take, so that no process ends because a collective timed out.
    patience = timedelta(hours=1)
    store = store_of_ranks(patience)
    assert store is not None
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    report.done(0.25)
    report.tries("to add")
    if rank == asked.get("rank"):
        fail(asked["how"])
    numbers = torch.tensor([rank + 1.0])
    distributed.all_reduce(numbers)
    others: list[Any] = [None] * world
    distributed.all_gather_object(others, os.getpid())
    found = {
        "sum": float(numbers),
        "listening": sorted(leftovers.listening(set(others))),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "master": os.environ["MASTER_ADDR"],
    }
    distributed.barrier()
    return found


def fail(how: str) -> None:
    """End this rank, or make it hang."""
    # The other ranks are waiting by now.
    time.sleep(0.5)
    if how == "raise":
        raise KeyError("the rank's own")
    if how == "refuse":
        raise JobError("a batch has 1 sample", where="job 'x'", allowed="2 or more")
    if how.startswith("exit"):
        os._exit(int(how.removeprefix("exit ")))
    if how == "hang":
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    be_rank(work)
