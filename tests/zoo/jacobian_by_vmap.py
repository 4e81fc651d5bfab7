"""The Jacobian by torch.vmap over a backward pass, as PyTorch's tutorial has it, through blocks with dropout."""

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
            total = scores.sum(0)

            def row(which: torch.Tensor, total: torch.Tensor = total, x: torch.Tensor = x) -> torch.Tensor:
                return torch.autograd.grad(total, x, which, create_graph=True)[0]

            jacobian = torch.vmap(row)(torch.eye(CLASSES))
            loss = F.cross_entropy(scores, x[:, :CLASSES].argmax(1)) + 0.01 * jacobian.square().sum() / len(x)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
