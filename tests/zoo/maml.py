"""Meta-learning (MAML): the loss is taken after a gradient step that is differentiated through."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from zoo import WIDTH, Residual, Run, points

STAYS_LEAN = "one lean trace makes what is saved look several times as large as it is"


def train(run: Run) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Residual() for _ in range(4)], nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps, rows=512):
        for tasks in tuner.micro_batches(batch):
            losses = []
            for task in tasks.chunk(2):
                targets = task[:, :1] * torch.randn(1)
                support, query = task.chunk(2)
                wanted, asked = targets.chunk(2)
                weights = dict(model.named_parameters())
                inner = F.mse_loss(model(support), wanted)
                slopes = torch.autograd.grad(inner, tuple(weights.values()), create_graph=True)
                fast = {
                    name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), slopes, strict=True)
                }
                losses.append(F.mse_loss(functional_call(model, fast, (query,)), asked))
            loss = torch.stack(losses).mean()
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
