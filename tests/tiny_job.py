"""Small real jobs for tests: a byte-level network on real text, and ways to make a job invalid."""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from autotune import Job, WarmupCosine

TEXT = torch.tensor(list(__doc__.encode() * 40), dtype=torch.long)
BATCH, LENGTH, WIDTH = 8, 16, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(TEXT) - LENGTH - 1, (BATCH,), generator=generator)
        yield torch.stack([TEXT[start : start + LENGTH + 1] for start in starts.tolist()])


def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def evaluate(model: nn.Module) -> float:
    return mean_loss(model, next(batches(999))).item()


def make(**changes: object) -> Job:
    arguments: dict = {
        "name": "tiny",
        "model": Network,
        "batches": batches,
        "loss": mean_loss,
        "optimizer": optimizer,
        "evaluate": evaluate,
        "target": 3.0,
        "batch_size": BATCH,
        "schedule": WarmupCosine(),
        "max_steps": 60,
    }
    return Job(**arguments | changes)


def job() -> Job:
    return make()


def few_k() -> Job:
    """Return the job with fewer k, so that it has fewer plans to estimate."""
    return make(accumulation_choices=(1, 2))


def one_k() -> Job:
    """Return the job without accumulation."""
    return make(accumulation_choices=(1,))


def adaptive_job() -> Job:
    """Return the job with a choice of how many batches a step consumes."""
    return make(batching="adaptive", schedule=None)


def one_adaptive_k() -> Job:
    """Return the job with steps of one batch, which it calls adaptive."""
    return make(batching="adaptive", schedule=None, accumulation_choices=(1,))


def k_larger_than_batch() -> Job:
    return make(accumulation_choices=(1, 2, 64))


def loss_not_scalar() -> Job:
    return make(loss=lambda model, batch: model(batch[:, :-1]))


def loss_raises() -> Job:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such luck")

    return make(loss=loss)


def no_batches() -> Job:
    return make(batches=lambda seed: iter(()))


def batches_raise() -> Job:
    def none(seed: int) -> Iterator[torch.Tensor]:
        raise ValueError("no such luck")
        yield

    return make(batches=none)


def empty_batches() -> Job:
    return make(batches=lambda seed: iter([torch.zeros(0, LENGTH + 1, dtype=torch.long)] * 3))


def wrong_count() -> Job:
    return make(count=lambda batch: -1)


def already_met() -> Job:
    return make(target=100.0)


def never_met() -> Job:
    return make(target=0.0, max_steps=10)
