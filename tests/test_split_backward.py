"""Tests of backward passes in two parts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autotune.mechanics.pipeline_update import end_of_stage
from autotune.mechanics.split_backward import GivenBytes, SplitBackward

WIDTH = 6


class Twice(nn.Module):
    """Uses one weight at two depths, and another one in a term of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.one(self.two(self.one(x)).tanh())
        return found + self.two.weight.square().sum()


class Terms(nn.Module):
    """Adds a term of each weight to the result, so that all lead to one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) + sum(one.square().sum() for one in self.parameters())


class Looked(nn.Module):
    """Adds rows of a table, and passes its input on beside."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table, self.scale = nn.Embedding(5, WIDTH, sparse=sparse), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.table(torch.arange(len(x)) % 5) * (x + 1).relu_()


def rows(seed: int) -> torch.Tensor:
    return torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("early", [0, 1, 99])
@pytest.mark.parametrize(
    "build", [Twice, Terms, lambda: Looked(sparse=True), lambda: Looked(sparse=False), lambda: nn.LSTM(WIDTH, WIDTH)]
)
def test_both_parts_give_the_gradients_of_the_whole_pass(build: Callable[[], nn.Module], early: int) -> None:
    torch.manual_seed(1)
    split = build()
    whole = copy.deepcopy(split)
    parameters = list(split.parameters())
    for seed in range(3):
        received = [rows(seed).requires_grad_() for _ in range(2)]
        results = [model(handed * 1.0) for model, handed in zip((split, whole), received, strict=True)]
        ends = [
            end_of_stage(one[0] if isinstance(one, tuple) else one, [rows(9)])  # of an LSTM, what it returns first
            for one in results
        ]
        first = SplitBackward(ends[0], received[0], late=parameters[early:], early=parameters[:early])
        ends[1].backward()
        assert torch.equal(received[0].grad, received[1].grad)
        first.finish()
    for (name, one), two in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None) == (name == "never")
        if one.grad is not None:
            torch.testing.assert_close(one.grad.to_dense(), two.grad.to_dense(), rtol=1e-5, atol=1e-6)


def test_late_weights_have_no_gradient_before_the_second_part() -> None:
    model, received = nn.Linear(WIDTH, WIDTH), rows(0).requires_grad_()
    first = SplitBackward(model(received).sum(), received, late=[model.weight], early=[model.bias])
    assert model.weight.grad is None
    assert model.bias.grad is not None
    first.finish()
    assert model.weight.grad is not None


def test_bytes_are_those_of_what_operations_with_weights_return() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Tanh()))
    with GivenBytes(model, ["0", "1"]) as given:
        model(torch.zeros(5, 4)).sum().backward()
        model(torch.zeros(50, 4)).sum().backward()
    # The first unit is handed nothing that has a gradient; the first call counts.
    assert given.found == {"1": 4 * 5 * (8 + 3)}
    assert not any(module._forward_hooks for module in model.modules())
