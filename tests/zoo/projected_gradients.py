"""Gradients of two tasks by ``autograd.grad``, projected where they conflict, and combined for one backward pass."""

import torch
from torch import nn

from zoo import WIDTH, Run, points


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def train(run: Run) -> None:
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 2))
    weights = list(model.parameters())
    optimizer = torch.optim.Adam(weights, 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps, rows=64):
        for micro in tuner.micro_batches(batch):
            outputs = model(micro)
            losses = [outputs[:, 0].square().mean(), (outputs[:, 1] - 1).square().mean()]
            one = torch.autograd.grad(losses[0], weights, retain_graph=True)
            two = torch.autograd.grad(losses[1], weights)
            dot = sum((a * b).sum() for a, b in zip(one, two, strict=True))
            conflict = torch.where(dot < 0, dot / sum(b.square().sum() for b in two), 0.0)
            both = [a - conflict * b + b for a, b in zip(one, two, strict=True)]
            tuner.backward(sum((weight * gradient).sum() for weight, gradient in zip(weights, both, strict=True)))
        tuner.step()
        run.log(sum(losses))
    run.keep(model, optimizer)
