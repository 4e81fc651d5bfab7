"""Blocks that take and return trees: a named tuple of a tensor, a tuple of tensors and a dictionary of them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Residual, Run, points


class State(NamedTuple):
    x: torch.Tensor
    moments: tuple[torch.Tensor, torch.Tensor]
    more: dict[str, torch.Tensor]
    depth: int = 0


class TreeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Residual(dropout=0.1), Residual()

    def forward(self, state: State, *, scale: float = 1.0) -> State:
        x = self.first(state.x) * scale
        mean, spread = state.moments
        moments = mean + x.mean(1), spread + x.std(1)
        more = {"skip": self.second(state.more["skip"] + x), "gate": state.more["gate"] * x.sigmoid()}
        return State(x, moments, more, state.depth + 1)


class TreeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([TreeBlock() for _ in range(4)]), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        zero = torch.zeros(len(x))
        state = State(x, (zero, zero), {"skip": x, "gate": torch.ones_like(x)})
        for block in self.blocks:
            state = block(state, scale=1 / (1 + state.depth))
        return self.head(state.x + state.more["skip"] * state.more["gate"]), state.moments[0] + state.moments[1]


def train(run: Run) -> None:
    model = TreeModel()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps):
        for x in tuner.micro_batches(batch):
            y, moments = model(x)
            loss = F.mse_loss(y, x.flip(1)) + 0.1 * moments.square().mean()
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
