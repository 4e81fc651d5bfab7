"""From step 5 on, blocks read the first block's input: more memory, with unchanged shapes."""

from __future__ import annotations

import torch
from torch import nn

from zoo import WIDTH, Residual, Run, points

SURPRISES = range(5, 13)


class Looking(Residual):
    """A residual block that later also adds the first block's input."""

    def forward(self, x: torch.Tensor, first: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if first is None else x + first.tanh())


class Model(nn.Module):
    """A model that tells its blocks the step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Looking() for _ in range(4)), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        first = x if step >= 5 else None
        for block in self.blocks:
            x = block(x, first)
        return self.head(x)


def train(run: Run) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(points(run.steps, rows=64)):
        for micro in tuner.micro_batches(batch):
            loss = (model(micro, number) - micro[:, :1]).square().mean()
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
