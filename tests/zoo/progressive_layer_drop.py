"""Python's generator scales blocks at random, at a rate that is 0 at first."""

import random

import torch
from torch import nn

from zoo import WIDTH, Run, Stack, next_token_loss, texts

LOCKED = {f"blocks.{number}": "Python's or NumPy's generator" for number in range(4)}


class Damped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.0
        self.mix = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.GELU())
        self.narrow = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.narrow(self.mix(x))
        if self.rate > 0 and random.random() < self.rate:
            y = y * 0.5
        return x + y * y.tanh()


def train(run: Run) -> None:
    model = Stack([Damped() for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(texts(run.steps)):
        for block in model.blocks:
            block.rate = min(number / 20, 0.5)
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
