"""Deep equilibrium: each block seeks a fixed point without a graph, and a hook solves for its gradient."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Run, points


class Equilibrium(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        nn.init.orthogonal_(self.inner.weight, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.outer(x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(8):
                z = torch.tanh(self.inner(z) + given)
        z = torch.tanh(self.inner(z) + given)
        if z.requires_grad:
            found = z.detach().requires_grad_()
            again = torch.tanh(self.inner(found) + given)

            def solve(slope: torch.Tensor) -> torch.Tensor:
                solved = slope
                for _ in range(6):
                    solved = slope + torch.autograd.grad(again, found, solved, retain_graph=True)[0]
                return solved

            z.register_hook(solve)
        return self.norm(x + z)


def train(run: Run) -> None:
    model = nn.Sequential(*[Equilibrium() for _ in range(3)], nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps, rows=128):
        for x in tuner.micro_batches(batch):
            loss = F.mse_loss(model(x), x.flip(1))
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
