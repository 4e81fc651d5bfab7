"""The model passes each block a function that reads the loop variable."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Run, points

LOCKED = {f"blocks.{number}": "it reads number" for number in range(3)}


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, gate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return x + self.mix(gate(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Gated() for _ in range(4)), nn.Linear(WIDTH, WIDTH)
        self.scales = nn.Parameter(torch.rand(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, lambda h: torch.tanh(h * self.scales[number]))  # noqa: B023
        return self.head(x)


def train(run: Run) -> None:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps, 48):
        for micro in tuner.micro_batches(batch):
            loss = F.mse_loss(model(micro), micro.roll(1, 1))
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
