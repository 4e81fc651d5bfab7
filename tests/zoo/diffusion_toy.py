"""Diffusion: noise is predicted at random timesteps, and an average of the weights is kept."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Residual, Run, points


class Timed(Residual):
    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.shift = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        scale, shift = self.shift(F.silu(time)).chunk(2, -1)
        return super().forward(x * (1 + scale) + shift)


class Denoiser(nn.Module):
    def __init__(self, timesteps: int) -> None:
        super().__init__()
        self.times, self.head = nn.Embedding(timesteps, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Timed() for _ in range(4)])

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        time = self.times(timesteps)
        for block in self.blocks:
            x = block(x, time)
        return self.head(x)


def train(run: Run) -> None:
    kept = torch.linspace(0.99, 0.9, 50).cumprod(0)
    model = Denoiser(len(kept))
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer, clip_norm=1.0)
    for batch in points(run.steps):
        for x in tuner.micro_batches(batch):
            timesteps, noise = torch.randint(0, len(kept), (len(x),)), torch.randn_like(x)
            share = kept[timesteps, None]
            loss = F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, timesteps), noise)
            tuner.backward(loss)
        tuner.step()
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight.detach(), 0.05)
        run.log(loss)
    run.keep(model, average, optimizer)
