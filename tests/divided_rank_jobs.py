"""Jobs whose layers ranks share: some that they cannot train exactly, and some that need care."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from sharded_rank import batches, loss, make
from small_models import SharedBlock, SharedGPT, TinyGPT
from torch import nn

from autotune import Job

UP_AND_DOWN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def job(name: str, model: type[nn.Module], plan: Mapping[str, str] | None = None, **changes: Any) -> Job:
    return make(name=name, model=lambda: model(dropout=0.0), tensor_parallel=plan, **changes)  # type: ignore[call-arg]


class Fused(TinyGPT):
    """A model whose queries, keys and values are one layer, which cannot be divided without changing its code."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__(width=16, blocks=2, dropout=dropout)


class Dropping(SharedGPT):
    """A model with dropout within divided layers, where ranks would draw the same mask for different features."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        for block in self.blocks:
            block.up = nn.Sequential(block.up, nn.Dropout(0.2))

    tp_plan = {name.replace("up", "up.0"): style for name, style in SharedGPT.tp_plan.items()}  # noqa: RUF012


class NormedBlock(SharedBlock):
    """A block that scales each head's queries by the same weights, of whose gradient each rank has a part."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(width, dropout)
        self.scale = nn.Parameter(torch.full((4,), 1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(query * self.scale, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Normed(SharedGPT):
    """A model of such blocks."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__(blocks=0)
        self.blocks.extend(NormedBlock(16, dropout) for _ in range(2))


class Gated(SharedGPT):
    """A model of such blocks whose output begins at 0, which hides the gradient of the scales in the first step."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__(blocks=0)
        self.blocks.extend(NormedBlock(16, dropout) for _ in range(2))
        for block in self.blocks:
            nn.init.zeros_(block.out.weight)


class RememberingBlock(SharedBlock):
    """A block that remembers a divided layer's features."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(width, dropout)
        self.register_buffer("seen", torch.zeros(()))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        found = super().features(x)
        self.seen.lerp_(found.detach().abs().amax(), 0.5)
        return found


class JudgedBlock(SharedBlock):
    """A block that normalizes a divided layer's features while it is evaluated."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        found = super().features(x)
        return found if self.training else F.layer_norm(found, found.shape[-1:])


class PenalisedBlock(SharedBlock):
    """A block whose divided features add little to the loss."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        found = super().features(x)
        self.penalty = 1e-2 * found.square().mean()
        return found


def odd(block: type[SharedBlock]) -> type[SharedGPT]:
    """Return a class of models of which one block is odd."""

    class Odd(SharedGPT):
        def __init__(self, *, dropout: float = 0.0) -> None:
            super().__init__(dropout=dropout)
            self.blocks[1] = block(16, dropout)

    return Odd


def penalised_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    found = loss(model, batch)
    return found + model.blocks[1].penalty  # type: ignore[index,union-attr,operator]


def cast_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss(model, batch)


class Rooted(SharedGPT):
    """A model whose plan is no mapping."""

    tp_plan = "colwise"  # type: ignore[assignment]


class Weighed(SharedGPT):
    """A model of which torch cannot divide a layer, since it computes its weight."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        nn.utils.parametrizations.weight_norm(self.blocks[0].up)


class RaisingPlan(SharedGPT):
    """A model whose plan cannot be read."""

    @property
    def tp_plan(self) -> None:  # type: ignore[override]
        raise ValueError("no plan here")


class Tempered(SharedGPT):
    """A model with small positive temperatures, of whose logarithms its output is made, and buffers of odd values."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.temperatures = nn.Parameter(torch.full((8,), 0.05))
        for number, block in enumerate(self.blocks):
            nn.init.constant_(block.up.weight, -0.0)
            block.register_buffer("mask", torch.full((6, 6), -math.inf).triu(1))
            block.register_buffer("unseen", torch.tensor(math.nan) if number else torch.eye(3).to_sparse())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.temperatures.log().mean()


class Late(SharedGPT):
    """A model whose divided features are part of the loss from the third step on."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.blocks[1] = PenalisedBlock(16, dropout)


def late_batches(seed: int) -> Iterator[dict[str, torch.Tensor]]:
    for number, batch in enumerate(batches(seed)):
        yield {**batch, "weight": torch.full((len(batch["tokens"]),), float(number >= 2))}


def late_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return loss(model, batch) + batch["weight"].mean() * model.blocks[1].penalty  # type: ignore[index,union-attr,operator]


def infinite_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return loss(model, batch) / 0


class Tied(SharedGPT):
    """A model whose head has the embedding's weight."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.embedding.weight


class Frozen(SharedGPT):
    """A model of which some layers are not trained."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        for part in (self.embedding, self.blocks[1].up, self.blocks[2]):
            part.requires_grad_(requires_grad=False)


class WithStatistics(SharedGPT):
    """A model with BatchNorm."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.over_batch = nn.BatchNorm1d(16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + 0 * self.over_batch(self.embedding(tokens).flatten(0, 1)).sum()


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


unplanned = job("unplanned", Fused)
unknown = job("unknown", SharedGPT, {"blocks.*.up": "columns"})
nameless = job("nameless", SharedGPT, {"layers.*.up": "colwise"})
uneven = dataclasses.replace(job("uneven", SharedGPT), model=lambda: SharedGPT(tokens=13))
fused = job("fused", Fused, {"blocks.*.mix": "colwise", "blocks.*.out": "rowwise"})
dropping = job("dropping", Dropping)
normed = job("normed", Normed)
apart = job("apart", Tied, {**UP_AND_DOWN, "head": "colwise_gather_output"})
statistics = job("statistics", WithStatistics)
gated = job("gated", Gated)
remembering = job("remembering", odd(RememberingBlock))
judged = job("judged", odd(JudgedBlock))
penalised = job("penalised", odd(PenalisedBlock), loss=penalised_loss)
rooted = job("rooted", Rooted)
weighed = job("weighed", Weighed)
undividing = job("undividing", SharedGPT, {"blocks.*.norm": "replicated_with_grad_allreduce"})
raising_plan = job("raising_plan", RaisingPlan)
infinite = job("infinite", SharedGPT, loss=infinite_loss)
late = job("late", Late, batches=late_batches, loss=late_loss, evaluate=lambda model: 0.0)
several = job("several", SharedGPT, optimizer=foreach)

tied = job("tied", Tied)
tempered = job("tempered", Tempered)
frozen = job("frozen", Frozen)
cast = job("cast", SharedGPT, loss=cast_loss)
partly = job("partly", SharedGPT, UP_AND_DOWN)
descending = job("descending", SharedGPT, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9))
narrow = dataclasses.replace(partly, name="narrow", batch_size=8, accumulation_choices=(1, 8))


def llama() -> Job:
    """Return a job of a model of transformers, with fewer key heads than query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return of_transformers("llama", LlamaForCausalLM, LlamaConfig)


def qwen() -> Job:
    """Return a job of a model that normalizes the features of each head by the same weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return of_transformers("qwen", Qwen3ForCausalLM, functools.partial(Qwen3Config, head_dim=4))


def of_transformers(name: str, kind: Callable[[Any], nn.Module], settings: Callable[..., Any]) -> Job:
    def build() -> nn.Module:
        config = settings(
            vocab_size=12,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
        return kind(config)

    def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found = model(input_ids=batch["tokens"][:, :-1], use_cache=False).logits
        return F.cross_entropy(found.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    return make(name=name, model=build, loss=loss_of, evaluate=lambda model: 0.0)
