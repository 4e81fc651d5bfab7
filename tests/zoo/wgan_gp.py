"""A Wasserstein GAN with a gradient penalty: the critic is tuned, and its loss contains its own gradient."""

import torch
from torch import nn

from zoo import WIDTH, Residual, Run, points


def train(run: Run) -> None:
    critic = nn.Sequential(*[Residual() for _ in range(4)], nn.Linear(WIDTH, 1))
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    optimizer = torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.0, 0.9))
    other = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.0, 0.9))
    tuner = run.attach(critic, optimizer)
    for number, real in enumerate(points(run.steps)):
        for batch in tuner.micro_batches(real):
            fake = generator(torch.randn(len(batch), 8)).detach()
            share = torch.rand(len(batch), 1)
            mixed = (share * batch + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            loss = critic(fake).mean() - critic(batch).mean() + 10 * penalty
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
        if number % 5 == 4:
            critic.requires_grad_(False)
            judged = -critic(generator(torch.randn(len(real), 8))).mean()
            other.zero_grad()
            judged.backward()
            other.step()
            critic.requires_grad_(True)
            run.log(judged)
    run.keep(critic, generator, optimizer, other)
