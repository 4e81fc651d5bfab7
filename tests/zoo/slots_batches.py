"""Batches and what blocks hand on are objects with slots, whose class answers to every name with a KeyError."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo import Residual, Run, Stack, texts


class Bag:
    __slots__ = ("meta", "x", "y")

    def __init__(self, x: torch.Tensor, y: torch.Tensor, meta: object) -> None:
        self.x, self.y, self.meta = x, y, meta

    def __getattr__(self, name: str) -> object:
        raise KeyError(name)


class OfBags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual(dropout=0.1)

    def forward(self, bag: Bag) -> Bag:
        return Bag(self.inner(bag.x), bag.y, bag.meta)


class Model(Stack):
    def forward(self, bag: Bag) -> torch.Tensor:
        bag = Bag(self.embedding(bag.x), bag.y, bag.meta)
        for block in self.blocks:
            bag = block(bag)
        return torch.as_tensor(self.head(bag.x))


def train(run: Run) -> None:
    model = Model([OfBags() for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for text in texts(run.steps):
        bag = Bag(text[:, :-1], text[:, 1:], {"id": object()})
        tuner.begin_step(bag)
        tuner.tell_phase("forward")
        loss = F.cross_entropy(model(bag).flatten(0, 1), bag.y.flatten())
        tuner.tell_phase("backward")
        loss.backward()
        tuner.tell_phase("update")
        optimizer.step()
        optimizer.zero_grad()
        tuner.end_step()
        run.log(loss)
    run.keep(model, optimizer)
