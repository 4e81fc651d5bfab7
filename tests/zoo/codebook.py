"""Vector quantisation: each block's codebook is a running average that its forward pass writes to."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Run, points

STAYS_LEAN = "one lean trace makes what is saved look several times as large as it is"


class Quantised(nn.Module):
    def __init__(self, codes: int = 8) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(codes, WIDTH))
        self.register_buffer("counts", torch.ones(codes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.encode(x))
        chosen = torch.cdist(y, self.codes).argmin(1)
        code = self.codes[chosen]
        if self.training:
            with torch.no_grad():
                hits = F.one_hot(chosen, len(self.codes)).float()
                self.counts.mul_(0.9).add_(0.1 * hits.sum(0))
                self.codes.lerp_((hits.T @ y + self.codes) / (hits.sum(0) + 1)[:, None], 0.1)
        return x + self.decode(y + (code - y).detach())


def train(run: Run) -> None:
    model = nn.Sequential(*[Quantised() for _ in range(4)], nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for batch in points(run.steps, rows=128):
        for x in tuner.micro_batches(batch):
            loss = F.mse_loss(model(x), x)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
