"""Train a small residual convolution network with BatchNorm on scikit-learn's 8x8 digits, with adaptive batching.

A step consumes k batches of 64 images and the learning rate follows the square root of k: under fixed batching
BatchNorm would make the gradient depend on k.
"""

import functools
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from autotune import DataSource, Job, WarmupCosine

WIDTH, BLOCKS, BATCH, TRAINING_IMAGES = 48, 6, 64, 1437


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm on a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution_1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.convolution_2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm_1(self.convolution_1(x)))
        return F.relu(x + self.norm_2(self.convolution_2(inner)))


class ResidualNetwork(nn.Module):
    """Classify 8x8 images of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, WIDTH, 3, padding=1), nn.ReLU())
        self.blocks = nn.Sequential(*(ResidualBlock() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


class DenseBlock(nn.Module):
    """A hidden layer on a residual path; LayerNorm, since BatchNorm would make gradients depend on k."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Perceptron(nn.Module):
    """Classify 8x8 images of digits without convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(DenseBlock() for _ in range(3)))
        self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(images.flatten(1)))


@functools.cache
def images_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    """Return all 1,797 images, scaled to 0..1, and labels, in a fixed random order."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = torch.tensor(data.images[order] / 16.0, dtype=torch.float32).unsqueeze(1)
    return images, torch.tensor(data.target[order], dtype=torch.long)


def batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = (part[:TRAINING_IMAGES] for part in images_and_labels())
    order = torch.randperm(TRAINING_IMAGES, generator=torch.Generator().manual_seed(seed))
    for chosen in order.split(BATCH)[: TRAINING_IMAGES // BATCH]:
        yield images[chosen], labels[chosen]


def moved(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return images, each moved by up to a pixel, with noise."""
    places = F.pad(images[:, 0], (1, 1, 1, 1)).unfold(1, 8, 1).unfold(2, 8, 1)
    down, right = torch.randint(3, (2, len(images)), generator=generator)
    return places[range(len(images)), down, right].unsqueeze(1) + 0.3 * torch.randn(images.shape, generator=generator)


def moved_batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of 32 images drawn at random and moved."""
    images, labels = (part[:TRAINING_IMAGES] for part in images_and_labels())
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(TRAINING_IMAGES, (32,), generator=generator)
        yield moved(images[chosen], generator), labels[chosen]


def mean_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(model: nn.Module) -> float:
    device = next(model.parameters()).device
    images, labels = (part[TRAINING_IMAGES:].to(device) for part in images_and_labels())
    return (model(images).argmax(1) == labels).float().mean().item()


@functools.cache
def moved_held_out() -> tuple[torch.Tensor, torch.Tensor]:
    """Return each held-out image, moved four times."""
    images, labels = (part[TRAINING_IMAGES:].repeat(4, *[1] * (part.dim() - 1)) for part in images_and_labels())
    return moved(images, torch.Generator().manual_seed(0)), labels


def validation_loss(model: nn.Module) -> float:
    device = next(model.parameters()).device
    images, labels = moved_held_out()
    return F.cross_entropy(model(images.to(device)), labels.to(device)).item()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=5e-4)


def adamw_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.01)


def data_sources() -> list[DataSource]:
    content = load_digits().data.tobytes()
    digest = hashlib.sha256(content).hexdigest()
    return [DataSource(name="sklearn.datasets.load_digits", size_bytes=len(content), sha256=digest)]


job = Job(
    name="digits",
    model=ResidualNetwork,
    batches=batches,
    loss=mean_loss,
    optimizer=optimizer,
    evaluate=accuracy,
    target=0.97,
    goal="max",
    batch_size=BATCH,
    batching="adaptive",
    accumulation_choices=(1, 2, 4),
    lr_rule="sqrt",
    schedule=WarmupCosine(),
    clip_norm=1.0,
    max_steps=200,
    evaluate_every=5,
    data_sources=data_sources,
)

# The same network with AdamW, as the paper trains its ResNet.
adamw = replace(job, name="digits_adamw", optimizer=adamw_optimizer)

# The same run with shorter windows, for events between evaluations, such as memory dips.
watched = replace(job, name="digits_watched", evaluate_every=2)

# A perceptron whose step takes a few milliseconds at most, on images that never repeat; for ramps of the batch.
perceptron = replace(
    job,
    name="digits_perceptron",
    model=Perceptron,
    batches=moved_batches,
    evaluate=validation_loss,
    target=0.7,
    goal="min",
    batch_size=32,
    accumulation_choices=(1, 2, 4, 8, 16, 32, 64),
    schedule=None,
    max_steps=1000,
)
