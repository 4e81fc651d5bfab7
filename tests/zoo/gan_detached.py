"""A GAN whose generator is called for the critic first, in a graph that is dropped, and in early steps more often."""

import torch
from torch import nn

from zoo import WIDTH, Residual, Run, points

STAYS_LEAN = "graphs that the loop drops are taken to be kept until the backward pass, as others are"


def train(run: Run) -> None:
    generator = nn.Sequential(*[Residual() for _ in range(4)], nn.Linear(WIDTH, WIDTH))
    critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), Residual(), nn.Linear(WIDTH, 1))
    optimizer, other = (torch.optim.AdamW(part.parameters(), 1e-3) for part in (generator, critic))
    tuner = run.attach(generator, optimizer)
    for step, batch in enumerate(points(run.steps, rows=64)):
        for real in tuner.micro_batches(batch):
            for _ in range(4 if step < run.steps // 2 else 1):
                fake = generator(torch.randn_like(real)).detach()
                other.zero_grad()
                ((1 - critic(real)).relu().mean() + (1 + critic(fake)).relu().mean()).backward()
                other.step()
            loss = -critic(generator(torch.randn_like(real))).mean()
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(generator, critic, optimizer)
