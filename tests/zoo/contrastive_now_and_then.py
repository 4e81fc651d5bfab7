"""Every third step adds a loss between the samples of its batch, but not the step that is first tried in halves."""

import torch
from torch import nn

from zoo import WIDTH, Residual, Run, points

MODES = ("rounding",)
# The memory of the added loss shows in no shape.
SURPRISES = range(2, 24, 3)


def train(run: Run) -> None:
    model = nn.Sequential(*[Residual() for _ in range(4)], nn.Linear(WIDTH, 8))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(points(run.steps, rows=32)):
        for micro in tuner.micro_batches(batch):
            out, target = model(micro), micro[:, :8]
            loss = (out - target).square().mean()
            if number % 3 == 2:
                similar = nn.functional.normalize(out) @ nn.functional.normalize(target).T
                loss = loss + nn.functional.cross_entropy(10 * similar, torch.arange(len(out)))
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
