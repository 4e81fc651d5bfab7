"""Train a byte-level GPT on paragraphs of different lengths, with tied input and output embeddings.

Batches are dictionaries padded to their longest paragraph; the loss is counted in real bytes, so micro-batches weigh
unequally. The text is that of ``charlm``.
"""

import functools
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pydoc_data.topics import topics
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import nn

from autotune import DataSource, Job, WarmupCosine

WIDTH, BLOCKS, HEADS, DROPOUT = 256, 6, 4, 0.1
BATCH, SHORTEST, LONGEST = 16, 16, 128
# Batches over which a curriculum's sequences grow.
GROWTH = 100
IGNORED = -100


class Batch(TypedDict):
    """Padded inputs and targets, both (batch, length); padding in targets is IGNORED."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Layer(nn.Module):
    """One transformer block with fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_network = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention_in = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.attention_in(self.norm_attention(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = (part.squeeze(2).transpose(1, 2) for part in heads.split(1, dim=2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.attention_out(mixed.transpose(1, 2).flatten(2)), DROPOUT, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_network(x)))), DROPOUT, self.training)


class TiedGPT(nn.Module):
    """Predict the next byte with the transposed input embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.bytes.weight, std=WIDTH**-0.5)
        self.head.weight = self.bytes.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.bytes(inputs) * WIDTH**0.5 + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@functools.cache
def text() -> bytes:
    return "\n".join(topics[name] for name in sorted(topics)).encode()


@functools.cache
def paragraphs() -> tuple[list[bytes], list[bytes]]:
    """Return the paragraphs for training, and every tenth one for validation; long ones are cut."""
    found = [part.strip()[: LONGEST + 1] for part in text().split(b"\n\n") if len(part.strip()) > SHORTEST]
    held_out = found[::10]
    return [part for index, part in enumerate(found) if index % 10], held_out


def collate(chosen: list[bytes]) -> Batch:
    length = max(len(part) for part in chosen) - 1
    inputs = torch.zeros(len(chosen), length, dtype=torch.long)
    targets = torch.full((len(chosen), length), IGNORED)
    for row, part in enumerate(chosen):
        values = torch.tensor(list(part))
        inputs[row, : len(part) - 1], targets[row, : len(part) - 1] = values[:-1], values[1:]
    return {"inputs": inputs, "targets": targets}


def batches(seed: int) -> Iterator[Batch]:
    """Yield one pass over the paragraphs in random order; the last batch may be short."""
    training = paragraphs()[0]
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed)).tolist()
    for start in range(0, len(order), BATCH):
        yield collate([training[index] for index in order[start : start + BATCH]])


def growing_batches(seed: int) -> Iterator[Batch]:
    """Yield the same pass, cut to lengths that grow from a third of the longest to all of it."""
    first = LONGEST // 3
    for number, batch in enumerate(batches(seed)):
        length = min(first + (LONGEST - first) * number // GROWTH, LONGEST)
        inputs, targets = batch["inputs"][:, :length], batch["targets"][:, :length]
        yield {"inputs": inputs.contiguous(), "targets": targets.contiguous()}


def count_bytes(batch: Batch) -> int:
    return int((batch["targets"] != IGNORED).sum())


def mean_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)


def validation_loss(model: nn.Module) -> float:
    device = next(model.parameters()).device
    held_out = collate(paragraphs()[1][:32])
    return mean_loss(model, {"inputs": held_out["inputs"].to(device), "targets": held_out["targets"].to(device)}).item()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)


def data_sources() -> list[DataSource]:
    content = text()
    digest = hashlib.sha256(content).hexdigest()
    return [DataSource(name="pydoc_data.topics", size_bytes=len(content), sha256=digest)]


job = Job(
    name="charlm_ragged",
    model=TiedGPT,
    batches=batches,
    loss=mean_loss,
    count=count_bytes,
    optimizer=optimizer,
    evaluate=validation_loss,
    target=2.6,
    batch_size=BATCH,
    batching="fixed",
    accumulation_choices=(1, 2, 4),
    schedule=WarmupCosine(),
    clip_norm=1.0,
    max_steps=120,
    evaluate_every=5,
    data_sources=data_sources,
)


def attention_cost(batch: Batch) -> torch.Tensor:
    """Return the cost of each paragraph in bytes: the linear layers' and, by its square, attention's."""
    lengths = (batch["targets"] != IGNORED).sum(1)
    return lengths + lengths**2 / (12 * WIDTH)


def without_padding(batch: Batch) -> Batch:
    """Return a batch cut to its longest paragraph."""
    length = int((batch["targets"] != IGNORED).any(0).sum())
    return {"inputs": batch["inputs"][:, :length], "targets": batch["targets"][:, :length]}


# The same job, cut into micro-batches of about equal cost.
tokens = replace(job, name="charlm_ragged_tokens", split="tokens", sample_cost=attention_cost, trim=without_padding)
# The same job with sequences that grow during training.
curriculum = replace(job, name="charlm_ragged_curriculum", batches=growing_batches)
