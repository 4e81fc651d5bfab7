"""Models that train in milliseconds, in plain torch, so that a process without this project can import them."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A transformer block whose dropout draws from the global generator."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = dropout
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        scores = (query @ key.transpose(-2, -1)).softmax(-1).to(value.dtype)
        return x + F.dropout(self.out(F.gelu(scores @ value)), self.dropout, self.training)


class TinyGPT(nn.Module):
    """A next-token model; the units are embedding, blocks.0 ... and head."""

    def __init__(self, *, tokens: int = 11, width: int = 8, blocks: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SharedBlock(nn.Module):
    """A transformer block whose heads and features can be divided between ranks; each head has four features."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        heads = (layer(normed).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        found = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(found))
        return x + self.dropout(self.down(self.features(self.norm_2(x))))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features that a rank has a part of."""
        return F.gelu(self.up(x))


class SharedGPT(TinyGPT):
    """A next-token model whose layers can be divided between ranks, which its ``tp_plan`` says."""

    tp_plan: ClassVar = {
        "embedding": "embedding_rowwise",
        **dict.fromkeys(["blocks.*.query", "blocks.*.key", "blocks.*.value", "blocks.*.up"], "colwise"),
        **dict.fromkeys(["blocks.*.out", "blocks.*.down"], "rowwise"),
        "head": "colwise_gather_output",
    }

    def __init__(self, *, tokens: int = 12, width: int = 16, blocks: int = 4, dropout: float = 0.1) -> None:
        super().__init__(tokens=tokens, width=width, blocks=0)
        self.blocks.extend(SharedBlock(width, dropout) for _ in range(blocks))


class ConvolutionBlock(nn.Module):
    """A convolution with BatchNorm on a residual path."""

    def __init__(self, width: int, *, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width, momentum=momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm(self.convolution(x)))


class TinyConvolution(nn.Module):
    """A classifier of 4x4 images; the units are stem, blocks.0 ... and head."""

    def __init__(self, *, width: int = 4, blocks: int = 3, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(*(ConvolutionBlock(width, momentum=momentum) for _ in range(blocks)))
        self.head = nn.Linear(width, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


class Perceptron(nn.Module):
    """Two equal linear layers: the smallest model with recomputable units."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class ReplacedBuffer(nn.Module):
    """A running sum kept by replacing the buffer instead of writing to it; replaced twice if it is clamped."""

    def __init__(self, width: int, *, clamped: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.clamped = clamped
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.shift = self.shift + 0.1 * x.detach().float().mean(0)
            if self.clamped:
                self.shift = self.shift.clamp(-1, 1)
        return torch.tanh(self.linear(x - self.shift))


class ReplacedBuffers(nn.Module):
    """A stack of two modules that replace a buffer."""

    def __init__(self, width: int = 3, *, clamped: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReplacedBuffer(width, clamped=clamped) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def has_bf16_lstm() -> bool:
    """Return whether this CPU has a kernel of an LSTM in bf16; those without AVX-512 have none."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(2, 2)(torch.ones(3, 1, 2))
    except RuntimeError:
        return False
    return True
