"""A VQGAN decoder: the weight of its adversarial loss is a ratio of two gradients of its last layer."""

import torch
from torch import nn

from zoo import WIDTH, Residual, Run, points


def train(run: Run) -> None:
    decoder = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), *[Residual(dropout=0.1) for _ in range(4)], nn.Linear(WIDTH, WIDTH)
    )
    critic = nn.Sequential(nn.Linear(WIDTH, 32), nn.LeakyReLU(), nn.Linear(32, 1)).requires_grad_(False)
    optimizer = torch.optim.Adam(decoder.parameters(), 1e-3)
    tuner = run.attach(decoder, optimizer)
    last = decoder[-1].weight
    for batch in points(run.steps):
        for micro in tuner.micro_batches(batch):
            rebuilt = decoder(micro)
            distance, adversarial = (rebuilt - micro).abs().mean(), -critic(rebuilt).mean()
            (one,) = torch.autograd.grad(distance, last, retain_graph=True)
            (two,) = torch.autograd.grad(adversarial, last, retain_graph=True)
            weight = (one.norm() / (two.norm() + 1e-4)).clamp(0, 1e4).detach()
            loss = distance + 0.5 * weight * adversarial
            tuner.backward(loss)
        tuner.step()
        run.log(loss, weight)
    run.keep(decoder, optimizer)
