"""Each block has two branches; the loop chooses the active one, and sums the losses of both choices."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Run, points


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)]
        self.branches = nn.ModuleList(layers)
        self.active = self.branches[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.active(x)


def chosen(model: nn.Sequential, which: int) -> nn.Sequential:
    for number, block in enumerate(model[:-1]):
        block.active = block.branches[(which + number) % 2]
    return model


def train(run: Run) -> None:
    model = nn.Sequential(*(Branches() for _ in range(4)), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(points(run.steps, 48)):
        for micro in tuner.micro_batches(batch):
            loss = F.mse_loss(chosen(model, number)(micro), micro.roll(1, 1))
            loss = loss + F.mse_loss(chosen(model, number + 1)(micro), micro)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
