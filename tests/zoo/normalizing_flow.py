"""A normalizing flow: affine couplings that return their log-determinants beside their outputs."""

import math

import torch
from torch import nn

from zoo import WIDTH, Run, points


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.net = nn.Sequential(nn.Linear(half, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept, changed = x.chunk(2, 1)
        scale, shift = self.net(kept).chunk(2, 1)
        scale = scale.tanh()
        return torch.cat([changed * scale.exp() + shift, kept], 1), scale.sum(1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList([Coupling() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x))
        for coupling in self.couplings:
            x, determinant = coupling(x)
            total = total + determinant
        return total - 0.5 * (x.square() + math.log(2 * math.pi)).sum(1)


def train(run: Run) -> None:
    model = Flow()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=5.0)
    for batch in points(run.steps):
        for x in tuner.micro_batches(batch):
            loss = -model(x.cumsum(1)).mean()
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
