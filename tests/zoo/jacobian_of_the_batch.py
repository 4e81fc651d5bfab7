"""A penalty on the Jacobian, whose rows are one batched backward pass, through blocks with dropout."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Residual, Run, points

CLASSES = 5


def train(run: Run) -> None:
    model = nn.Sequential(*[Residual(dropout=0.1) for _ in range(4)], nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps, rows=32):
        for x in tuner.micro_batches(batch):
            x = x.clone().requires_grad_()
            scores = model(x)
            each = torch.eye(CLASSES)[:, None, :].expand(CLASSES, len(x), CLASSES)
            (jacobian,) = torch.autograd.grad(scores, x, each, is_grads_batched=True, create_graph=True)
            loss = F.cross_entropy(scores, x[:, :CLASSES].argmax(1)) + 0.01 * jacobian.square().sum() / len(x)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
