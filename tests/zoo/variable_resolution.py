"""Images of three sizes in turn, for a convolutional network with global pooling."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo import Run, images


class ConvBlock(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.norm, self.depthwise = (
            nn.GroupNorm(2, channels),
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
        )
        self.mix = nn.Sequential(nn.Conv2d(channels, 2 * channels, 1), nn.GELU(), nn.Conv2d(2 * channels, channels, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(self.depthwise(self.norm(x)))


def train(run: Run) -> None:
    stem, head = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    model = nn.Sequential(stem, *[ConvBlock() for _ in range(4)], head)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tuner = run.attach(model, optimizer)
    for number, (pictures, labels) in enumerate(images(run.steps, side=24)):
        side = (16, 24, 12)[number % 3]
        batch = F.interpolate(pictures, (side, side), mode="bilinear"), labels
        for x, wanted in tuner.micro_batches(batch):
            loss = F.cross_entropy(model(x), wanted)
            tuner.backward(loss)
        tuner.step()
        run.log(loss)
    run.keep(model, optimizer)
