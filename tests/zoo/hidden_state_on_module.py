"""Recurrent blocks keep their hidden state as an attribute and continue from it in the next step."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Run, points


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.mix = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros_like(x) if self.hidden is None else self.hidden
        new = self.cell(x, hidden)
        self.hidden = new.detach()
        return x + F.gelu(self.mix(new))


def train(run: Run) -> None:
    model = nn.Sequential(*[Recurrent() for _ in range(4)], nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps):
        for x in tuner.micro_batches(batch):
            loss = F.mse_loss(model(x), x.roll(1, 1))
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer, [block.hidden for block in model[:-1]])
