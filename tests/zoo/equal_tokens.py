"""Batches with equal numbers of tokens, in rows of 8 to 64; attention memory grows with the squared length."""

import random

import torch
from torch import nn

from zoo import WIDTH, Residual, Run, Stack, next_token_loss, texts


class SquareBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = Residual()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(self.norm(x)).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / WIDTH**0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.mix(x + self.out(weights @ value))


def train(run: Run) -> None:
    model = Stack([SquareBlock() for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    order = random.Random(5)
    for number in range(run.steps):
        length = order.choice([8, 16, 32, 64])
        (batch,) = texts(1, rows=256 // length, length=length + 1)
        batch = (batch + number) % 13
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
