"""Train a ResNet-50 on CIFAR-10, as the paper does: batches of 128, AdamW at 1e-4.

The data is read from the folder that ``AUTOTUNE_DATA`` (or ``--data``) names: CIFAR-10's "python version"
(``cifar-10-batches-py``) or its "binary version" (``cifar-10-batches-bin``), unpacked. The paper's 25.6M parameters are
those of 1,000 classes; with ten there are 23.5M. Its 8.24 GB at a batch of 128 rule out ImageNet's stem, which would
reduce 32x32 pixels to 8x8; the stem is a 3x3 convolution, as is usual for CIFAR. The paper names no augmentation, so
there is none.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from autotune import DataSource, Job, JobError, WarmupCosine
from autotune.data import Layout, Located, data_folder, locate, read_file
from autotune.io.plain_pickle import load_plain_pickle

BATCH, CLASSES, PIXELS, BLOCKS = 128, 10, 3 * 32 * 32, (3, 4, 6, 3)
EVALUATED_AT_ONCE = 500
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
PICKLED = Layout(name="CIFAR-10 python version", folder="cifar-10-batches-py", files=(*_BATCHES, "test_batch"))
BINARY = Layout(
    name="CIFAR-10 binary version",
    folder="cifar-10-batches-bin",
    files=tuple(f"{name}.bin" for name in (*_BATCHES, "test_batch")),
)
# A published batch has 31 MB.
_LIMIT_BYTES = 2**26
# Mean and standard deviation of the training images' channels, of 0..1.
MEAN, SPREAD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

Examples = tuple[torch.Tensor, torch.Tensor]


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution with BatchNorm on a residual path."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(width_in, width, 1, bias=False)
        self.convolve = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.expand = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm_1, self.norm_2, self.norm_3 = (nn.BatchNorm2d(size) for size in (width, width, 4 * width))
        self.shortcut = nn.Sequential()
        if stride != 1 or width_in != 4 * width:
            projection = nn.Conv2d(width_in, 4 * width, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm_1(self.reduce(x)))
        inner = F.relu(self.norm_2(self.convolve(inner)))
        return F.relu(self.shortcut(x) + self.norm_3(self.expand(inner)))


class ResNet50(nn.Module):
    """Classify images of 32x32 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        blocks, width_in = [], 64
        for stage, count in enumerate(BLOCKS):
            for number in range(count):
                blocks.append(Bottleneck(width_in, 64 * 2**stage, 2 if stage and not number else 1))
                width_in = 4 * 64 * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width_in, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def located() -> Located:
    """Return the folder of CIFAR-10."""
    return locate(data_folder(), (PICKLED, BINARY))


def pickled(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images (n, 3072) and labels (n,) of one batch of the python version."""
    batch = load_plain_pickle(path, limit_bytes=_LIMIT_BYTES)
    pixels, labels = batch.get("data"), batch.get("labels")
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list):
        keys = f"{list(batch)[:8]!r:.200}"
        raise JobError(f"has the keys {keys}", where=str(path), allowed="an array 'data', a list 'labels'")
    if not all(type(label) is int and 0 <= label < CLASSES for label in labels):
        raise JobError("has labels that are none", where=str(path), allowed="0 to 9")
    return pixels, np.array(labels, dtype=np.uint8)


def binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images (n, 3072) and labels (n,) of one file of the binary version: a label byte before each image."""
    content = np.frombuffer(read_file(path, limit_bytes=_LIMIT_BYTES), dtype=np.uint8)
    if not len(content) or len(content) % (1 + PIXELS):
        raise JobError(f"has {len(content)} bytes", where=str(path), allowed=f"a multiple of {1 + PIXELS}")
    records = content.reshape(-1, 1 + PIXELS)
    if records[:, 0].max() >= CLASSES:
        raise JobError("has labels that are none", where=str(path), allowed="0 to 9")
    return records[:, 1:], records[:, 0]


@functools.cache
def examples(found: Located) -> tuple[Examples, Examples]:
    """Return training and test images (n, 3, 32, 32) in bytes, and their labels."""
    read = pickled if found.layout is PICKLED else binary
    parts = []
    for path in found.paths:
        pixels, labels = read(path)
        if pixels.shape != (len(labels), PIXELS) or not len(labels):
            raise JobError(
                f"has pixels {pixels.shape} and {len(labels)} labels", where=str(path), allowed=f"(n, {PIXELS}) and n"
            )
        images = torch.from_numpy(pixels.reshape(-1, 3, 32, 32).copy())
        parts.append((images, torch.from_numpy(labels.astype(np.int64))))
    training = torch.cat([part[0] for part in parts[:-1]]), torch.cat([part[1] for part in parts[:-1]])
    return training, parts[-1]


def scaled(images: torch.Tensor) -> torch.Tensor:
    """Return bytes as numbers of about mean 0 and deviation 1 per channel."""
    mean, spread = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, SPREAD))
    return (images.float() / 255 - mean) / spread


def batches(seed: int) -> Iterator[Examples]:
    """Yield one pass over the training images in random order, whole batches only."""
    images, labels = examples(located())[0]
    if len(labels) < BATCH:
        raise JobError(f"has {len(labels)} training images", where=str(located().folder), allowed=f"at least {BATCH}")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    for chosen in order.split(BATCH)[: len(labels) // BATCH]:
        yield scaled(images[chosen]), labels[chosen]


def mean_loss(model: nn.Module, batch: Examples) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module) -> float:
    """Return the share of test images that are classified correctly."""
    device = next(model.parameters()).device
    images, labels = examples(located())[1]
    parts = zip(images.split(EVALUATED_AT_ONCE), labels.split(EVALUATED_AT_ONCE), strict=True)
    right = sum((model(scaled(part).to(device)).argmax(1).cpu() == answers).sum().item() for part, answers in parts)
    return right / len(labels)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01)


def data_sources() -> list[DataSource]:
    return located().sources()


job = Job(
    name="resnet50_cifar10",
    model=ResNet50,
    batches=batches,
    loss=mean_loss,
    optimizer=optimizer,
    evaluate=accuracy,
    target=0.85,
    goal="max",
    batch_size=BATCH,
    # Under fixed batching BatchNorm would make the gradient depend on k.
    batching="adaptive",
    accumulation_choices=(1, 2, 4, 8),
    lr_rule="linear",
    schedule=WarmupCosine(),
    clip_norm=1.0,
    max_steps=40 * (50_000 // BATCH),
    evaluate_every=50_000 // BATCH // 2,
    data_sources=data_sources,
)


def random() -> Job:
    """Return the same model on random images, to measure steps without data."""

    def batches(seed: int) -> Iterator[Examples]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            images = torch.randn(BATCH, 3, 32, 32, generator=generator)
            yield images, torch.randint(CLASSES, (BATCH,), generator=generator)

    def evaluate(model: nn.Module) -> float:
        device = next(model.parameters()).device
        images, answers = next(batches(0))
        return mean_loss(model, (images.to(device), answers.to(device))).item()

    return dataclasses.replace(
        job,
        name="resnet50_random",
        batches=batches,
        evaluate=evaluate,
        goal="min",
        data_sources=lambda: [DataSource(name="random images", size_bytes=0, sha256="")],
    )
