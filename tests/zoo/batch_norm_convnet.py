"""A residual convolutional network with BatchNorm."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import Run, images


class Bottleneck(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.layers(x))


def train(run: Run) -> None:
    stem, head = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    model = nn.Sequential(stem, *[Bottleneck() for _ in range(4)], head)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 8)
    tuner = run.attach(model, optimizer)
    for batch in images(run.steps):
        for pictures, labels in tuner.micro_batches(batch):
            loss = F.cross_entropy(model(pictures), labels)
            tuner.backward(loss)
        tuner.step()
        schedule.step()
        run.log(loss)
    run.keep(model, optimizer)
