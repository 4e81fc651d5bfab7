"""A GAN: the generator is tuned, and its loss passes through a critic with an optimizer of its own."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Residual, Run, points


def train(run: Run) -> None:
    generator = nn.Sequential(*[Residual(dropout=0.1) for _ in range(4)])
    critic = nn.Sequential(nn.Linear(WIDTH, 32), nn.LeakyReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.99))
    other = torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.5, 0.99))
    tuner = run.attach(generator, optimizer)
    for real in points(run.steps):
        noise = torch.randn_like(real)
        with torch.no_grad():
            fake = generator(noise)
        judged = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
        other.zero_grad()
        judged.backward()
        other.step()
        for micro in tuner.micro_batches(noise):
            loss = F.softplus(-critic(generator(micro))).mean()
            tuner.backward(loss)
        tuner.step()
        run.log(judged, loss)
    run.keep(generator, critic, optimizer, other)
