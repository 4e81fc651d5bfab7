"""A second-order regularizer: the gradient's change along a random direction (a Hessian-vector product)."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Residual, Run, points


def train(run: Run) -> None:
    model = nn.Sequential(*[Residual() for _ in range(4)], nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    weights = list(model.parameters())
    for batch in points(run.steps):
        for x in tuner.micro_batches(batch):
            data_loss = F.mse_loss(model(x).squeeze(1), x.mean(1))
            slopes = torch.autograd.grad(data_loss, weights, create_graph=True)
            along = sum((slope * torch.randn_like(slope)).sum() for slope in slopes)
            products = torch.autograd.grad(along, weights, create_graph=True, allow_unused=True, materialize_grads=True)
            loss = data_loss + 1e-3 * sum(product.square().sum() for product in products)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
