"""A small real job that fails in the way and at the step that environment variables name."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from autotune import Job

KINDS = ("hang", "segfault", "kill", "exit", "garbage", "out_of_memory", "nan", "exception")
FAILURE, AT = "FAILING_JOB_KIND", "FAILING_JOB_AT"
# File with a call counter: if it is given, every n-th call fails, in each of the listed ways in turn.
TURNS, TIMES = "FAILING_JOB_TURNS", "FAILING_JOB_TIMES"
# The rank that fails, if several ranks train the job.
FAILING_RANK = "1"


class Net(nn.Module):
    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.relu(block(x))
        return self.head(x)


def batches(seed: int, size: int = 8, width: int = 16) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(size, width, generator=generator)
        yield x, (x.sum(1) > 0).long()


calls = 0


def fail(kind: str) -> None:
    if kind == "hang":
        time.sleep(3600)
    elif kind == "segfault":
        ctypes.string_at(0)
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exit":
        os.write(1, b"goodbye from the job\n")
        os._exit(7)
    elif kind == "garbage":
        for number in range(3, 4096):
            try:
                os.write(number, b"\x00garbage\xff" * 50)
            except OSError:
                continue
    elif kind == "out_of_memory":
        torch.empty(2**50, dtype=torch.uint8)
    elif kind == "exception":
        raise KeyError("the job's own")


def next_turn(path: str) -> str | None:
    """Return the index of the failure that is due now; a negative number if none is due."""
    with open(path, "r+") as file:  # noqa: PTH123 - read and written in one go
        number = int(file.read())
        file.seek(0)
        file.write(f"{number + 1:<9}")
    return KINDS[number % len(KINDS)] if 0 <= number < int(os.environ[TIMES]) else None


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    global calls
    calls += model.training
    found = F.cross_entropy(model(batch[0]), batch[1])
    kind = os.environ.get(FAILURE)
    if kind and calls == int(os.environ[AT]) and os.environ.get("RANK", FAILING_RANK) == FAILING_RANK:
        fail(kind)
        if kind == "nan":
            return found * float("nan")
    if TURNS in os.environ and model.training and calls % int(os.environ[AT]) == 0:
        kind = next_turn(os.environ[TURNS])
        if kind == "nan":
            return found * float("nan")
        fail(kind or "")
    return found


job = Job(
    name="failing",
    model=Net,
    batches=batches,
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2),
    evaluate=lambda model: float(sum(p.abs().sum() for p in model.parameters())),
    target=0.0,
    batch_size=8,
)

# Batches are large enough for plans to save memory, and there are more plans than a campaign with many failures can
# try.
wide = dataclasses.replace(
    job,
    name="failing_wide",
    model=lambda: Net(64, blocks=7),
    batches=lambda seed: batches(seed, 512, 64),
    batch_size=512,
    accumulation_choices=(1, 2, 4),
)
