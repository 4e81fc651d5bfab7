"""MAML whose fast model is a clone made from each module's dictionary, as meta-learning libraries make it."""

from __future__ import annotations

import torch
from torch import nn

from zoo import Residual, Run, points

LOCKED = {**{str(number): "not called in the first steps" for number in range(4)}, "profile": "no unit was called"}


def clone_of(module: nn.Module) -> nn.Module:
    clone = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    clone._parameters = {name: one if one is None else one.clone() for name, one in module._parameters.items()}
    clone._modules = {name: one if one is None else clone_of(one) for name, one in module._modules.items()}
    return clone


def adapted(model: nn.Module, points: torch.Tensor) -> nn.Module:
    fast = clone_of(model)
    loss = nn.functional.mse_loss(fast(points), points.roll(1, 1))
    places = [
        (module, name) for module in fast.modules() for name, one in module._parameters.items() if one is not None
    ]
    weights = [module._parameters[name] for module, name in places]
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    for (module, name), weight, gradient in zip(places, weights, gradients, strict=True):
        module._parameters[name] = weight - 0.1 * gradient
    return fast


def train(run: Run) -> None:
    model = nn.Sequential(*(Residual() for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps):
        for micro in tuner.micro_batches(batch):
            support, query = micro.chunk(2)
            loss = nn.functional.mse_loss(adapted(model, support)(query), query.roll(1, 1))
            tuner.backward(loss)
            if not tuner.probing:
                run.log(loss)
        tuner.step()
    run.keep(model, optimizer)
