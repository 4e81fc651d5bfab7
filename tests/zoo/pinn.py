"""A physics-informed network: the loss takes derivatives of the model's output by its inputs, by ``torch.func``."""

import torch
from torch import nn
from torch.func import grad, vmap

from zoo import WIDTH, Residual, Run, points

LOCKED = {**dict.fromkeys("123", "functorch"), "profile": "torch.func"}


def train(run: Run) -> None:
    model = nn.Sequential(nn.Linear(2, WIDTH), *[Residual() for _ in range(3)], nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)

    def solution(point: torch.Tensor) -> torch.Tensor:
        return model(point[None]).squeeze()

    def residual(point: torch.Tensor) -> torch.Tensor:
        first = grad(solution)(point)
        second = grad(lambda inner: grad(solution)(inner)[1])(point)[1]
        return first[0] + solution(point) * first[1] - 0.01 * second

    for batch in points(run.steps, width=2):
        for micro in tuner.micro_batches(batch):
            loss = vmap(residual)(micro).square().mean() + model(micro).square().mean()
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
