"""A dense network is pruned at step 10 and trained further; pruning adds hooks to its layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import prune

from zoo import WIDTH, Residual, Run, points

LOCKED = {str(number): "its parts got other hooks after it was probed" for number in range(4)}
STAYS_LEAN = "what was seen before the pruning holds no more"


def train(run: Run) -> None:
    model = nn.Sequential(*[Residual() for _ in range(4)], nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(points(run.steps, rows=256)):
        if number == 10:
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    prune.l1_unstructured(module, "weight", 0.3)
        for micro in tuner.micro_batches(batch):
            loss = (model(micro) - micro[:, :1]).square().mean()
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
