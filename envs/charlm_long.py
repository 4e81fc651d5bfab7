"""Train a byte-level GPT on passages of very different lengths, four at a time; only recomputation saves memory.

The batch stands for one that cannot be split, as with contrastive losses and BatchNorm, so k stays 1. The text is that
of ``charlm``.
"""

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

from autotune import DataSource, Job

WIDTH, BLOCKS, HEADS, DROPOUT = 96, 8, 4, 0.1
BATCH, SHORTEST, LONGEST = 4, 64, 512
# Batches over which a curriculum's sequences grow.
GROWTH = 120
# Lengths are rounded up to this many bytes, as padding to buckets does.
BUCKET = 32


class Layer(nn.Module):
    """One transformer block with fused attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.attention_in(self.norm_attention(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = (part.squeeze(2).transpose(1, 2) for part in heads.split(1, dim=2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.attention_out(mixed.transpose(1, 2).flatten(2)), DROPOUT, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_network(x)))), DROPOUT, self.training)


class LongGPT(nn.Module):
    """Predict the next byte of a long passage."""

    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(LONGEST, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.bytes(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@functools.cache
def text() -> torch.Tensor:
    content = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def passages(generator: torch.Generator, length: int) -> torch.Tensor:
    """Return (batch, length + 1) bytes from random places of all but the last tenth of the text."""
    training = text()[: len(text()) * 9 // 10]
    starts = torch.randint(0, len(training) - length - 1, (BATCH,), generator=generator).tolist()
    return torch.stack([training[start : start + length + 1] for start in starts])


def bucketed(length: float) -> int:
    return min(math.ceil(length / BUCKET) * BUCKET, LONGEST)


def mixed_batches(seed: int) -> Iterator[torch.Tensor]:
    """Yield batches of lengths drawn log-uniformly: many short, a few long."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        share = float(torch.rand((), generator=generator))
        yield passages(generator, bucketed(SHORTEST * (LONGEST / SHORTEST) ** share))


def growing_batches(seed: int) -> Iterator[torch.Tensor]:
    """Yield batches whose length grows from the shortest to the longest."""
    generator = torch.Generator().manual_seed(seed)
    number = 0
    while True:
        yield passages(generator, bucketed(SHORTEST + (LONGEST - SHORTEST) * min(number / GROWTH, 1.0)))
        number += 1


def even_batches(seed: int) -> Iterator[torch.Tensor]:
    """Yield batches of half the longest length."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield passages(generator, LONGEST // 2)


def short_batches(seed: int) -> Iterator[torch.Tensor]:
    """Yield batches of half the shortest length."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield passages(generator, SHORTEST // 2)


def context_batches(seed: int) -> Iterator[torch.Tensor]:
    """Yield batches of 32 contexts of eight bytes and the byte after each."""
    generator = torch.Generator().manual_seed(seed)
    training = text()[: len(text()) * 9 // 10].unfold(0, 9, 1)
    while True:
        yield training[torch.randint(len(training), (32,), generator=generator)]


def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def validation_loss(model: nn.Module) -> float:
    device = next(model.parameters()).device
    held_out = text()[-8 * 257 :].view(8, 257).to(device)
    return mean_loss(model, held_out).item()


def short_validation_loss(model: nn.Module) -> float:
    device = next(model.parameters()).device
    length = SHORTEST // 2 + 1
    held_out = text()[-64 * length :].view(64, length).to(device)
    return mean_loss(model, held_out).item()


def context_validation_loss(model: nn.Module) -> float:
    device = next(model.parameters()).device
    return mean_loss(model, text()[-256 * 9 :].view(256, 9).to(device)).item()


def fast_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.01)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)


def data_sources() -> list[DataSource]:
    content = text().to(torch.uint8).numpy().tobytes()
    return [DataSource(name="pydoc_data.topics", size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())]


job = Job(
    name="charlm_long",
    model=LongGPT,
    batches=mixed_batches,
    loss=mean_loss,
    optimizer=optimizer,
    evaluate=validation_loss,
    target=2.6,
    batch_size=BATCH,
    accumulation_choices=(1,),
    clip_norm=1.0,
    max_steps=200,
    evaluate_every=10,
    data_sources=data_sources,
)

# The same job with sequences that grow during training, and with sequences of one length.
curriculum = replace(job, name="charlm_long_curriculum", batches=growing_batches)
even = replace(job, name="charlm_long_even", batches=even_batches)

# Batches are so small that the update takes a third of a step; a step consumes k batches.
adaptive = replace(
    job,
    name="charlm_long_adaptive",
    batches=short_batches,
    evaluate=short_validation_loss,
    batching="adaptive",
    lr_rule="sqrt",
    accumulation_choices=(1, 2, 4, 8),
    target=1.9,
    max_steps=4000,
    evaluate_every=25,
)

# A network so small that a core trains hundreds of updates of 2,048 samples in a minute; for ramps of the batch.
contexts = replace(
    adaptive,
    name="charlm_long_contexts",
    model=functools.partial(LongGPT, 32, 1),
    batches=context_batches,
    optimizer=fast_optimizer,
    evaluate=context_validation_loss,
    batch_size=32,
    accumulation_choices=(1, 2, 4, 8, 16, 32, 64),
    target=2.2,
    max_steps=1000,
)
