"""Routers with Gumbel noise, whose temperature falls a little in each forward pass."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Run, Stack, next_token_loss, texts


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(3)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.temperature = max(0.5, self.temperature * 0.97)
        shares = F.gumbel_softmax(self.router(x), self.temperature)
        return x + sum(shares[..., n, None] * expert(x) for n, expert in enumerate(self.experts))


def train(run: Run) -> None:
    model = Stack([Router() for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in texts(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = next_token_loss(model, micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss, *(block.temperature for block in model.blocks))
    run.keep(model, optimizer)
