"""The model stores a mask in a context that its blocks share, and runs twice before the backward pass."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Run, points

LOCKED = {f"blocks.{number}": "it reads context" for number in range(4)}


class Masked(nn.Module):
    def __init__(self, context: SimpleNamespace) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
        self.context = context

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(x * self.context.mask)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.context = SimpleNamespace(mask=None)
        self.blocks = nn.ModuleList(Masked(self.context) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.context.mask = (x > 0).float()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(run: Run) -> None:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps, 48):
        for micro in tuner.micro_batches(batch):
            loss = F.mse_loss(model(micro), micro.roll(1, 1)) + F.mse_loss(model(-micro), micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
