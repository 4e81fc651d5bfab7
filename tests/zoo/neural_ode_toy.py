"""A neural ODE with two vector fields, each called eight times by Euler's method."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Run, points

STAYS_LEAN = "one lean trace makes what is saved look several times as large as it is"


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH + 1, 32), nn.Tanh(), nn.Linear(32, WIDTH))

    def forward(self, time: float, x: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([x, x.new_full((len(x), 1), time)], 1))


class NeuralODE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fields, self.head = nn.ModuleList([Field(), Field()]), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, steps: int = 8) -> torch.Tensor:
        for field in self.fields:
            for step in range(steps):
                x = x + field(step / steps, x) / steps
        return self.head(x)


def train(run: Run) -> None:
    model = NeuralODE()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps, rows=128):
        for x in tuner.micro_batches(batch):
            loss = F.mse_loss(model(x), x.sin())
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
