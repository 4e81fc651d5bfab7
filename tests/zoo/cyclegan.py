"""CycleGAN: two generators in one optimizer, chained into cycles, with identity losses; the critics have their own."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Residual, Run, points


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Residual() for _ in range(3)], nn.Linear(WIDTH, WIDTH))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def train(run: Run) -> None:
    model, critics = (
        nn.ModuleDict({"ab": generator(), "ba": generator()}),
        nn.ModuleDict({"a": critic(), "b": critic()}),
    )
    optimizer = torch.optim.Adam(model.parameters(), 2e-4, betas=(0.5, 0.999))
    other = torch.optim.Adam(critics.parameters(), 2e-4, betas=(0.5, 0.999))
    tuner = run.attach(model, optimizer)
    for points_a, noise in zip(points(run.steps), points(run.steps), strict=True):
        for a, b in tuner.micro_batches((points_a, noise.cumsum(1) / 4)):
            critics.requires_grad_(False)
            fake_b, fake_a = model["ab"](a), model["ba"](b)
            fooled = sum(
                F.mse_loss(score, torch.ones_like(score)) for score in (critics["b"](fake_b), critics["a"](fake_a))
            )
            cycle = F.l1_loss(model["ba"](fake_b), a) + F.l1_loss(model["ab"](fake_a), b)
            identity = F.l1_loss(model["ab"](b), b) + F.l1_loss(model["ba"](a), a)
            loss = fooled + 10 * cycle + 5 * identity
            tuner.backward(loss)
        tuner.step()
        critics.requires_grad_(True)
        scores = critics["a"](a), critics["b"](b), critics["a"](fake_a.detach()), critics["b"](fake_b.detach())
        judged = sum(F.mse_loss(score, torch.full_like(score, float(n < 2))) for n, score in enumerate(scores))
        other.zero_grad()
        judged.backward()
        other.step()
        run.log(loss, judged)
    run.keep(model, critics, optimizer, other)
