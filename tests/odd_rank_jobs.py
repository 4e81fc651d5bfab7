"""Jobs whose models or losses ranks cannot train exactly, or only with care; most are refused by FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from small_models import Block, TinyGPT
from torch import nn

from autotune import Job

BATCH, LENGTH, WORDS = 8, 6, 11
Model = Callable[[], nn.Module]


def batches(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Plain(TinyGPT):
    """The model of all jobs: four blocks without dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width=width, blocks=4, dropout=0.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = self.through(number, block, x, tokens)
        return self.head(x)

    def through(self, number: int, block: nn.Module, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return block(x)


class Routed(Plain):
    """A model whose samples choose one of two blocks of equal size in training."""

    def through(self, number: int, block: nn.Module, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        chosen = 1 + int(tokens[:, 0].sum()) % 2
        return x if self.training and number in (1, 2) and number != chosen else block(x)


class Dropped(Plain):
    """A model that skips a block at random, independently on each rank, after its first steps."""

    calls = 0

    def through(self, number: int, block: nn.Module, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += self.training and torch.is_grad_enabled()
        return x if number == 1 and self.calls > 8 and torch.rand(()) < 0.5 else block(x)


class Late(Plain):
    """A model that routes its samples only after its first steps, so that no inspection sees it."""

    calls = 0

    def through(self, number: int, block: nn.Module, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += self.training and torch.is_grad_enabled()
        routed = number in (1, 2) and self.calls > 8
        return x if routed and number != 1 + int(tokens[:, 0].sum()) % 2 else block(x)


class Experts(Block):
    """A block that sends all its samples to one of two experts."""

    def __init__(self) -> None:
        super().__init__(8, 0.0)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert = self.experts[int(x.detach().sum().abs() * 1e4) % 2 if self.training else 0]
        return super().forward(x) + expert(x)


class Normalised(Block):
    """A block with BatchNorm."""

    def __init__(self) -> None:
        super().__init__(8, 0.0)
        self.over_samples = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.over_samples(super().forward(x).transpose(1, 2)).transpose(1, 2)


class OwnNorm(nn.BatchNorm1d):
    """A BatchNorm with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(super().forward(x))


class OwnNormalised(Normalised):
    """A block with a BatchNorm of its own class."""

    def __init__(self) -> None:
        super().__init__()
        self.over_samples = OwnNorm(8)


class Remembering(Block):
    """A block that keeps the mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__(8, 0.0)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return super().forward(x)


class UsedInTraining(Plain):
    """A model that uses a block's weight outside the block, in training mode alone."""

    def through(self, number: int, block: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if number == 2 and self.training:
            x = x + 0.1 * F.linear(x, block.out.weight)
        return block(x)


class Returned:
    """A result of no type that torch knows."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class ReturnsObject(Block):
    """A block whose result is a plain object."""

    def forward(self, x: Any) -> Any:
        return Returned(super().forward(x.value if isinstance(x, Returned) else x))


class PassesObjects(Plain):
    """A model whose blocks pass plain objects on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsObject(8, 0.0) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.value)


class ReturnsObjects(Plain):
    """A model that returns a plain object."""

    def forward(self, tokens: torch.Tensor) -> Any:
        return Returned(super().forward(tokens))


class Unused(Plain):
    """A model with a trained weight that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)


class WithScalar(Plain):
    """A model with a weight of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(tokens)


class MixedBlock(Block):
    """A block of weights of two dtypes."""

    def __init__(self) -> None:
        super().__init__(8, 0.0)
        self.shift = nn.Parameter(torch.zeros(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shift.float()


class ComplexBlock(Block):
    """A block with a complex weight."""

    def __init__(self) -> None:
        super().__init__(8, 0.0)
        self.turn = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x * self.turn).real)


class TransposedBlock(Block):
    """A block with a weight that is not contiguous."""

    def __init__(self) -> None:
        super().__init__(8, 0.0)
        self.out.weight = nn.Parameter(torch.randn(8, 8).mul(0.1).t())


def of_blocks(block: Callable[[], nn.Module]) -> Model:
    """Return the function that builds the model with other blocks."""

    def build() -> nn.Module:
        model = Plain()
        model.blocks = nn.ModuleList(block() for _ in range(4))
        return model

    return build


def early_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return loss(model, batch) if not batch.numel() else model.embedding(batch).mean() + loss(model, batch)


def late_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    found = loss(model, batch)
    return found + 0.1 * model.embedding(batch).square().mean() + 0.1 * model.blocks[1].out.weight.square().sum()


def object_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return loss(lambda tokens: model(tokens).value, batch)  # type: ignore[arg-type]


plain = Job(
    name="plain",
    model=Plain,
    batches=batches,
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3),
    evaluate=lambda model: float(loss(model, next(batches(99)))),
    target=0.0,
    batch_size=BATCH,
    accumulation_choices=(1, 2),
)


def _like(name: str, model: Model = Plain, **changes: Any) -> Job:
    return dataclasses.replace(plain, name=name, model=model, **changes)


routed = _like("routed", Routed)
dropped = _like("dropped", Dropped)
late = _like("late", Late)
experts = _like("experts", of_blocks(Experts))
normalised = _like("normalised", of_blocks(Normalised))
own_norm = _like("own norm", of_blocks(OwnNormalised))
remembering = _like("remembering", of_blocks(Remembering))
used_in_training = _like("used in training", UsedInTraining)
early = _like("early", loss=early_loss)
afterwards = _like("afterwards", loss=late_loss)
objects = _like("objects", PassesObjects)
object_root = _like("object root", ReturnsObjects, loss=object_loss, evaluate=lambda model: 0.0)
unused = _like("unused", Unused)
scalar = _like("scalar", WithScalar)
mixed = _like("mixed", of_blocks(MixedBlock))
complex_ = _like("complex", of_blocks(ComplexBlock))
transposed = _like("transposed", of_blocks(TransposedBlock))
adafactor = _like("adafactor", optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2))
wide = _like("unused", lambda: Plain(width=16))


class Clamping(Block):
    """A block that clamps its own weights before it uses them."""

    def __init__(self) -> None:
        super().__init__(8, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.out.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Sparse(Plain):
    """A model whose embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8, sparse=True)


class Checkpointed(Plain):
    """A model that recomputes its blocks by itself."""

    def through(self, number: int, block: nn.Module, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=number % 2 == 0)


def twice_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return loss(model, batch) + 0.1 * (model(batch[:, 1:]) - model(batch[:, :-1])).square().mean()


def parts_metric(model: Any) -> float:
    return float(model.head(model.embedding(next(batches(9)))).abs().sum())


class Penalised(nn.Module):
    """A perceptron for floating samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def penalty_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    x = F.one_hot(batch.sum(1) % 8, 8).float().requires_grad_()
    found = model(x)
    (slope,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
    return found.square().mean() + slope.square().mean()


def contrastive_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    found = model(batch[:, :-1]).mean(1)
    return F.cross_entropy(found @ found.t(), torch.arange(len(found)))


contrastive = _like("contrastive", loss=contrastive_loss)
clamping = _like("clamping", of_blocks(Clamping))
sparse = _like("sparse", Sparse, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), clip_norm=None)
checkpointed = _like("checkpointed", Checkpointed)
twice = _like("twice", loss=twice_loss)
penalised = _like("penalised", Penalised, loss=penalty_loss, evaluate=lambda model: 0.0)
evaluates_parts = _like("evaluates parts", evaluate=parts_metric)


def adversarial_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    x = F.one_hot(batch.sum(1) % 8, 8).float().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x)
    return model(x.detach() + 0.1 * slope.sign()).square().mean()


adversarial = _like("adversarial", Penalised, loss=adversarial_loss, evaluate=lambda model: 0.0)
