"""Tests of units with their own state: recomputed if that is exact, otherwise locked with the reason."""

from __future__ import annotations

import functools
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import TinyGPT
from test_live import RESTLESS, Wanders, gpt_loss, token_batches
from torch import nn

import autotune

SEEN: list[float] = []
SOURCE = random.Random(7)
ENTROPY = random.SystemRandom()


class Part(nn.Module):
    """A plain block; subclasses add special behaviour."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.linear(x)))


class Counts(Part):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) / (1 + 0.01 * self.calls)


class Remembers(Part):
    """A block that adds its last output to the next one: a hidden state."""

    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        if self.last is not None:
            found = found + 0.1 * self.last.mean()
        self.last = found.detach()
        return found


class Anneals(Part):
    temperature = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.temperature *= 0.99
        return super().forward(x) / self.temperature


class Lists(Part):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found.append(float(x.detach().mean()))
        return super().forward(x) + 0.001 * len(self.found)


class LongList(Part):
    def __init__(self) -> None:
        super().__init__()
        self.found = [0.0] * 5000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found.append(float(x.detach().mean()))
        return super().forward(x) + 0.001 * len(self.found)


class ListsElsewhere(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(float(x.detach().mean()))
        return super().forward(x) + 0.001 * len(SEEN)


class DrawsElsewhere(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 0.01 * SOURCE.random())


class NamesEntropy(Part):
    """A block that refers to the system's entropy without drawing from it yet."""

    noisy = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (ENTROPY.random() if self.noisy else 1.0)


class OwnGenerator(Part):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (torch.rand(8, generator=self.generator) < 0.9)


class Codebook(Part):
    """A block that writes to frozen parameters in forward, like running averages of codes."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codes.data.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return super().forward(x) + self.codes.clone()


class InPlace(Part):
    """A block whose result is added in place to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.front(x)))


def with_blocks(kind: type[Part]) -> nn.Module:
    model = TinyGPT()
    model.blocks = nn.ModuleList(kind() for _ in range(3))
    return model


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(InPlace() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + 0.0
        for block in self.blocks:
            x += block(x)
        return self.head(x)


def hooked() -> nn.Module:
    """Return a model with counting hooks inside its units."""
    model = TinyGPT()
    calls: list[int] = []

    def count(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return output * (1 + 0.0001 * len(calls))

    for block in model.blocks:
        next(iter(block.children())).register_forward_hook(count)
    return model


def states(model: nn.Module) -> list[Any]:
    """Return the attributes of modules other than parameters."""
    found: list[Any] = []
    for part in model.modules():
        for name, value in vars(part).items():
            if isinstance(value, list):
                found.append([item.tolist() if isinstance(item, torch.Tensor) else item for item in value])
            elif isinstance(value, int | float) and not name.startswith("_"):
                found.append(value)
            elif isinstance(value, torch.Tensor):
                found.append(value.tolist())
            elif isinstance(value, torch.Generator):
                found.append(value.get_state().tolist())
    return found


def train(make: Callable[[], nn.Module], budget: int | None, policy: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    random.seed(0)
    SEEN.clear()
    SOURCE.seed(7)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tuner = None
    if policy is not None:
        tuner = autotune.attach(model, optimizer, policy, memory_budget_bytes=budget, limits=RESTLESS, runs_dir=None)
    losses, recomputed = [], 0
    for batch in token_batches(24):
        if tuner is None:
            loss = gpt_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            for micro in tuner.micro_batches(batch):
                recomputed += any(storage == "recompute" for storage in tuner.plan.storage.values())
                loss = gpt_loss(model, micro)
                tuner.backward(loss)
            tuner.step()
        losses.append(float(loss.detach()))
    locks: dict[str, str] = {}
    if tuner is not None:
        assert tuner.attached, tuner.detached_because
        locks = {name: reason for name, reason in tuner.locks.items() if name.startswith("blocks")}
        tuner.detach()
    weights = [parameter.tolist() for parameter in model.parameters()]
    outside = [list(SEEN), SOURCE.getstate(), random.getstate(), torch.get_rng_state().tolist()]
    return (losses, weights, states(model), outside), locks, recomputed


@functools.cache
def plain_run(make: Callable[[], nn.Module]) -> Any:
    """Return the result of the unattached training."""
    return train(make, None, None)[0]


class HoldsOddThings(Part):
    """A block that holds objects without the usual constructors or attributes."""

    def __init__(self) -> None:
        super().__init__()
        soon_gone = _Gone()
        self.began, self.gone = time.gmtime(0), (weakref.proxy(soon_gone),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        self.last = torch.max(found.detach(), -1)
        return found + self.last.values.mean()


class _Gone:
    pass


EXACT: list[Callable[[], nn.Module]] = [
    lambda: with_blocks(Part),
    lambda: with_blocks(Counts),
    lambda: with_blocks(Remembers),
    lambda: with_blocks(Anneals),
    lambda: with_blocks(Lists),
    lambda: with_blocks(HoldsOddThings),
]
LOCKED: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: with_blocks(LongList), "list of over 4096 items"),
    (lambda: with_blocks(ListsElsewhere), "changes SEEN"),
    (lambda: with_blocks(DrawsElsewhere), "changes SOURCE"),
    (lambda: with_blocks(OwnGenerator), "differ"),
    (lambda: with_blocks(Codebook), "differ"),
    (AddsInPlace, "written to in place"),
    (hooked, "changes calls"),
    (lambda: with_blocks(NamesEntropy), "generator"),
]


@pytest.mark.parametrize("lean", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", EXACT, ids=["plain", "counts", "remembers", "anneals", "list", "odd things"])
def test_state_in_attributes_is_preserved_and_recomputed(make: Callable[[], nn.Module], *, lean: bool) -> None:
    plain = plain_run(make)
    tuned, locks, recomputed = train(make, 1 if lean else 10**12, "exact" if lean else Wanders())
    assert tuned == plain
    assert not locks
    assert recomputed


@pytest.mark.some(4)
@pytest.mark.parametrize("lean", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("make", "reason"),
    LOCKED,
    ids=["long list", "list elsewhere", "draws elsewhere", "own generator", "codebook", "in place", "hooks", "entropy"],
)
def test_unit_with_effects_that_recomputation_would_repeat_is_locked(
    make: Callable[[], nn.Module], reason: str, *, lean: bool
) -> None:
    plain = plain_run(make)
    tuned, locks, _ = train(make, 1 if lean else 10**12, "exact" if lean else Wanders())
    assert locks
    assert all(reason in why for why in locks.values()), locks
    assert tuned == plain


def test_hooks_added_later_are_called_once_per_step() -> None:
    def run(*, attached: bool) -> tuple[list[int], dict[str, str]]:
        torch.manual_seed(0)
        model = TinyGPT()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        tuner = None
        if attached:
            tuner = autotune.attach(model, optimizer, "exact", memory_budget_bytes=1, limits=RESTLESS, runs_dir=None)
        calls: list[int] = []
        for number, batch in enumerate(token_batches(16)):
            if number == 8:
                part = next(iter(model.blocks[1].children()))
                part.register_forward_hook(lambda *_: calls.append(1))
            if tuner is None:
                gpt_loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                for micro in tuner.micro_batches(batch):
                    tuner.backward(gpt_loss(model, micro))
                tuner.step()
        locks = {} if tuner is None else dict(tuner.locks)
        if tuner is not None:
            tuner.detach()
        return calls, locks

    plain, (tuned, locks) = run(attached=False)[0], run(attached=True)
    assert tuned == plain
    assert "other hooks" in locks["blocks.1"]


@pytest.mark.parametrize("step", [0, 7])
def test_a_unit_whose_bias_is_written_to_before_backward_is_not_recomputed_again(
    caplog: pytest.LogCaptureFixture, step: int
) -> None:
    torch.manual_seed(0)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with autotune.attach(model, optimizer, "exact", memory_budget_bytes=1, limits=RESTLESS, runs_dir=None) as tuner:
        for number, batch in enumerate(token_batches(10)):
            for micro in tuner.micro_batches(batch):
                loss = gpt_loss(model, micro)
                if number == step:
                    with torch.no_grad():
                        model.blocks[1].out.bias.add_(0.1)
                tuner.backward(loss)
            tuner.step()
        assert [name for name in tuner.locks if name.startswith("blocks")] == ["blocks.1"]
        assert "by the time of" in tuner.locks["blocks.1"] or "were written to between" in tuner.locks["blocks.1"]
    assert step == 0 or "gradients of this step" in caplog.text
