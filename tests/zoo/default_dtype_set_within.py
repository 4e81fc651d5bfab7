"""Each block computes a part under another default dtype, and restores the previous one at its end."""

import torch
from torch import nn

from zoo import WIDTH, Run, points

# Recomputing a block of this size needs more memory than keeping its activations.
# The tuner stays at recomputing all, so that it sees no other plan's peak; only every seventh budget is large enough.
SURPRISES = [step for step in range(24) if step % 7]
STAYS_LEAN = "recomputing needs more than keeping"


class Precise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        former = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        y = torch.sinh(torch.tanh(y.double()) * torch.tensor(0.7)).float()
        torch.set_default_dtype(former)
        return x + y


def train(run: Run) -> None:
    blocks = [Precise() for _ in range(4)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps):
        for micro in tuner.micro_batches(batch):
            loss = (model(micro) - micro[:, :1]).square().mean()
            tuner.backward(loss)
        tuner.step()
        assert torch.get_default_dtype() is torch.float32
        run.log(loss)
    run.keep(model, optimizer)
