"""A network that solves Burgers' equation: its loss contains the network's derivatives, by ``torch.func``."""

import torch
from torch import nn
from torch.func import grad, vmap

from zoo import Run, points

LOCKED = {str(number): "torch.func" for number in range(1, 5)} | {"profile": "torch.func"}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def train(run: Run) -> None:
    model = nn.Sequential(nn.Linear(2, 32), *[Layer(32) for _ in range(4)], nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)

    def u(point: torch.Tensor) -> torch.Tensor:
        return model(point[None]).squeeze()

    def residual(point: torch.Tensor) -> torch.Tensor:
        first = grad(u)(point)
        second = grad(lambda at: grad(u)(at)[1])(point)[1]
        return first[0] + u(point) * first[1] - 0.01 * second

    for batch in points(run.steps, rows=64, width=2):
        for x in tuner.micro_batches(batch):
            loss = vmap(residual)(x).square().mean()
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
