"""A variational autoencoder: the encoder's samples are drawn by reparameterisation."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import WIDTH, Residual, Run, points


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*[Residual() for _ in range(3)], nn.Linear(WIDTH, 2 * 4))
        self.decoder = nn.Sequential(nn.Linear(4, WIDTH), *[Residual() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        sample = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(sample), mean, log_variance


def train(run: Run) -> None:
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, batch in enumerate(points(run.steps)):
        for x in tuner.micro_batches(batch):
            rebuilt, mean, log_variance = model(x)
            divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
            loss = F.mse_loss(rebuilt, x, reduction="sum") / len(x) + min(1.0, number / 10) * divergence
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
