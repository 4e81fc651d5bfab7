"""Train a byte-level GPT on the English text of Python's own manual (``pydoc_data.topics``).

The text is on every machine that has Python 3.11 or later and differs by version, so its hash goes into every run.
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

from autotune import DataSource, Job, WarmupCosine

WIDTH, BLOCKS, HEADS, DROPOUT = 256, 6, 4, 0.1
BATCH, LENGTH = 32, 128
VALIDATION_SEQUENCES = 16


def attention_in_steps(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Compute causal attention by operations that each keep a matrix of all pairs of positions."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1).to(value.dtype) @ value


class Attention(nn.Module):
    """Let every position look at itself and at earlier ones."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.mix = functools.partial(F.scaled_dot_product_attention, is_causal=True) if fused else attention_in_steps
        self.project_in = nn.Linear(WIDTH, 3 * WIDTH)
        self.project_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.project_in(x).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        return self.project_out(self.mix(query, key, value).transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    """One transformer block: attention and a two-layer network, each on a residual path."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(fused=fused)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.network(self.norm_2(x)))


class Embedding(nn.Module):
    """Embed bytes and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class GPT(nn.Module):
    """Predict the next byte."""

    def __init__(self, *, fused: bool = True) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block(fused=fused) for _ in range(BLOCKS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@functools.cache
def text() -> bytes:
    return "\n".join(topics[name] for name in sorted(topics)).encode()


@functools.cache
def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first 90 % for training and the rest for validation."""
    everything = torch.frombuffer(bytearray(text()), dtype=torch.uint8).long()
    border = int(0.9 * len(everything))
    return everything[:border], everything[border:]


def sequences(source: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw sequences of LENGTH + 1 bytes."""
    starts = torch.randint(len(source) - LENGTH, (count,), generator=generator)
    return torch.stack([source[start : start + LENGTH + 1] for start in starts.tolist()])


def batches(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield sequences(tokens()[0], BATCH, generator)


def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def validation_loss(model: nn.Module) -> float:
    device = next(model.parameters()).device
    drawn = sequences(tokens()[1], VALIDATION_SEQUENCES, torch.Generator().manual_seed(0))
    return mean_loss(model, drawn.to(device)).item()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01)


def data_sources() -> list[DataSource]:
    content = text()
    digest = hashlib.sha256(content).hexdigest()
    return [DataSource(name="pydoc_data.topics", size_bytes=len(content), sha256=digest)]


job = Job(
    name="charlm",
    model=GPT,
    batches=batches,
    loss=mean_loss,
    optimizer=optimizer,
    evaluate=validation_loss,
    target=2.55,
    batch_size=BATCH,
    batching="fixed",
    accumulation_choices=(1, 2, 4),
    schedule=WarmupCosine(),
    clip_norm=1.0,
    max_steps=46,
    evaluate_every=2,
    data_sources=data_sources,
)

# The same model with attention in steps, which keep far more: for recomputation to save.
eager = replace(job, name="charlm_eager", model=functools.partial(GPT, fused=False))

# A shorter run of the same job, for a first look.
short = replace(job, name="charlm_short", target=2.7, max_steps=36)
# On a slow machine.
brief = replace(job, name="charlm_brief", target=3.2, max_steps=24)

# The same job with steps that consume k batches.
adaptive = replace(job, name="charlm_adaptive", batching="adaptive", lr_rule="sqrt")
