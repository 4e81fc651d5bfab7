"""A small transformer that trains on any device and can be named by other processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autotune import Job

TOKENS, WIDTH, HEADS, LENGTH, BATCH = 64, 64, 4, 32, 16


class Block(nn.Module):
    """A transformer block with explicit attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = self.mix(self.first(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-1, -2) * 0.25).softmax(-1)
        x = x + self.dropout(self.out((scores @ value).transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))


class Transformer(nn.Module):
    """A next-token model; its units are embedding, blocks.0 and so on, norm and head."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(TOKENS, (BATCH, 1), generator=generator)
        # A pattern to learn: each row counts up from a random start.
        yield (starts + torch.arange(LENGTH + 1)) % TOKENS


def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def evaluate(model: nn.Module) -> float:
    return mean_loss(model, next(batches(99)).to(next(model.parameters()).device)).item()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def make(**changes: Any) -> Job:
    settings: dict[str, Any] = {
        "name": "transformer",
        "model": Transformer,
        "batches": batches,
        "loss": mean_loss,
        "optimizer": optimizer,
        "evaluate": evaluate,
        "target": 2.0,
        "batch_size": BATCH,
        "accumulation_choices": (1, 2, 4),
        "clip_norm": 1.0,
        "max_steps": 60,
    }
    return Job(**{**settings, **changes})


def job() -> Job:
    return make()
