"""Contrastive learning: two noisy views of each sample, and InfoNCE over the whole batch."""

import torch
import torch.nn.functional as F
from torch import nn

from autotune import Settings
from zoo import WIDTH, Residual, Run, points

MODES = ("rounding",)


def train(run: Run) -> None:
    encoder = nn.Sequential(*[Residual() for _ in range(4)], nn.Linear(WIDTH, 8))
    optimizer = torch.optim.AdamW(encoder.parameters(), 1e-3)
    tuner = run.attach(encoder, optimizer, settings=Settings(accumulation_choices=(1,)))
    noise = torch.Generator().manual_seed(7)
    for batch in points(run.steps):
        for x in tuner.micro_batches(batch):
            one, two = (x + 0.1 * torch.randn(x.shape, generator=noise) for _ in range(2))
            similar = F.normalize(encoder(one), dim=1) @ F.normalize(encoder(two), dim=1).T / 0.1
            own = torch.arange(len(x))
            loss = (F.cross_entropy(similar, own) + F.cross_entropy(similar.T, own)) / 2
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(encoder, optimizer)
