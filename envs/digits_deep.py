"""Classify scikit-learn's 8x8 digits with a residual network of 200 layers: as many units as large models have."""

import functools
import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from autotune import DataSource, Job

WIDTH, BLOCKS, BATCH, TRAINING_IMAGES = 128, 200, 512, 1437


class Layer(nn.Module):
    """A layer on a residual path that begins as the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.linear.weight, std=0.1 * WIDTH**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class DeepNetwork(nn.Module):
    """Classify 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(BLOCKS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixels)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@functools.cache
def pixels_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    """Return all 1,797 images as (1797, 64) pixels, scaled to -1..1, and labels, in a fixed random order."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    pixels = torch.tensor(data.data[order] / 8.0 - 1.0, dtype=torch.float32)
    return pixels, torch.tensor(data.target[order], dtype=torch.long)


def batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield one pass over the training images in random order; the last batch is short."""
    pixels, labels = (part[:TRAINING_IMAGES] for part in pixels_and_labels())
    order = torch.randperm(TRAINING_IMAGES, generator=torch.Generator().manual_seed(seed))
    yield from ((pixels[part], labels[part]) for part in order.split(BATCH))


def mean_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module) -> float:
    device = next(model.parameters()).device
    pixels, labels = (part[TRAINING_IMAGES:].to(device) for part in pixels_and_labels())
    return (model(pixels).argmax(dim=1) == labels).float().mean().item()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-4)


def data_sources() -> list[DataSource]:
    content = load_digits().data.tobytes()
    return [DataSource(name="sklearn.load_digits", size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())]


job = Job(
    name="digits_deep",
    model=DeepNetwork,
    batches=batches,
    loss=mean_loss,
    optimizer=optimizer,
    evaluate=accuracy,
    target=0.93,
    goal="max",
    batch_size=BATCH,
    accumulation_choices=(1, 2, 4),
    clip_norm=1.0,
    max_steps=120,
    evaluate_every=10,
    data_sources=data_sources,
)
