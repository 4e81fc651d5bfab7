"""Jobs that ranks load by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from small_models import Block, SharedGPT, TinyGPT
from torch import distributed

from autotune import Job

BATCH, LENGTH, WORDS = 16, 64, 11


def batches(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Skipping(TinyGPT):
    """A model that skips a block at random, independently on each rank."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number != 1 or torch.rand(()) < 0.5:
                x = block(x)
        return self.head(x)


class Crammed(Block):
    """A model that runs out of memory on the last rank for more than four fp32 samples, as a GPU would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if distributed.get_rank() and len(x) > 4 and not torch.is_autocast_enabled("cpu"):
            raise torch.OutOfMemoryError("somebody else is on this device")
        return super().forward(x)


def crammed_transformer() -> TinyGPT:
    model = TinyGPT(width=128, blocks=0)
    model.blocks.extend(Crammed(128, 0.1) for _ in range(4))
    return model


# Weights and activations have about the same size, so that the savings of ZeRO are visible.
transformer = Job(
    name="ranked",
    model=lambda: TinyGPT(width=128, blocks=4, dropout=0.1),
    batches=batches,
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    evaluate=lambda model: float(loss(model, next(batches(99)))),
    target=0.0,
    batch_size=BATCH,
    accumulation_choices=(1, 2, 4, 8),
)
skipping = dataclasses.replace(transformer, name="skipping", model=Skipping)
crammed = dataclasses.replace(transformer, name="crammed", model=crammed_transformer)
shared = dataclasses.replace(transformer, name="shared", model=lambda: SharedGPT(width=128))
