"""Spectral and weight norms, by parametrizations and hooks, with a penalty that is differentiated through them."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import spectral_norm as hooked_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from zoo import WIDTH, Run, points

NORMS = (spectral_norm, spectral_norm, weight_norm, hooked_spectral_norm)


class Normalised(nn.Module):
    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = norm(nn.Linear(WIDTH, WIDTH)), norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(nn.functional.softplus(self.first(x)))


def train(run: Run) -> None:
    model = nn.Sequential(*map(Normalised, NORMS), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps, rows=64):
        for micro in tuner.micro_batches(batch):
            inputs = micro.clone().requires_grad_()
            scores = model(inputs)
            (slopes,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
            loss = scores.mean() + (slopes.norm(dim=1) - 1).square().mean()
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
