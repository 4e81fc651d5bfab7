"""Tests of what a unit's code is seen to reach: generators and files, by any route, and nothing that it never calls."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from autotune.profiling.reachable_code import deed_of, source_of


def draw(x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def save(x: torch.Tensor) -> torch.Tensor:
    with open(Path("/dev/null"), "a") as file:  # noqa: PTH123
        file.write("1")
    return x


class Holder(NamedTuple):
    draw: Callable[[torch.Tensor], torch.Tensor]


class Static:
    random = random


SPACE = types.SimpleNamespace(draw=draw, save=save, random=random)


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Calls(Unit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return draw(self.linear(x))


class Wraps(Unit):
    def __init__(self, wrapped: Any) -> None:
        super().__init__()
        self.draw = wrapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(self.linear(x))


class WrapsInAClass(Unit):
    draw = functools.partial(draw)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(self.linear(x))


class Asks(Unit):
    def __init__(self, asked: Any) -> None:
        super().__init__()
        self.asked = asked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.asked.draw(self.linear(x))


class AsksANamespace(Unit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SPACE.random.random() * self.linear(x)


class AsksAClass(Unit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Static.random.random() * self.linear(x)


class HasADefault(Unit):
    def forward(self, x: torch.Tensor, random: types.ModuleType = random) -> torch.Tensor:
        return random.random() * self.linear(x)


class LooksItselfUp(Unit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sys.modules[__name__].draw(self.linear(x))


class DrawsBesideAPartOfThatName(Unit):
    """Has a part of the name of a global, and reaches the global through another object."""

    def __init__(self) -> None:
        super().__init__()
        self.draw, self.asked = nn.Linear(4, 4), SPACE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.asked.draw(self.draw(x))


class DrawsInAnInnerFunction(Unit):
    def __init__(self) -> None:
        super().__init__()
        self.draw = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (lambda y: draw(y))(self.draw(x))


DRAWING = {
    "calls a global": Calls,
    "an attribute is the global": lambda: Wraps(draw),
    "an attribute wraps the global": lambda: Wraps(functools.partial(draw)),
    "an attribute caches the global": lambda: Wraps(functools.lru_cache(draw)),
    "a class attribute wraps the global": WrapsInAClass,
    "asks a namespace of its own": lambda: Asks(types.SimpleNamespace(draw=draw)),
    "asks a tuple of its own": lambda: Asks(Holder(draw)),
    "asks a global namespace": AsksANamespace,
    "asks a class": AsksAClass,
    "has the generator as a default": HasADefault,
    "looks its own module up": LooksItselfUp,
    "has a part of that name, too": DrawsBesideAPartOfThatName,
    "has a part of that name, and draws in a lambda": DrawsInAnInnerFunction,
}


@pytest.mark.parametrize("name", DRAWING)
def test_generator_is_found_by_any_route(name: str) -> None:
    assert source_of(DRAWING[name]()) is not None


def test_file_that_a_namespace_opens_is_found() -> None:
    class Saves(Unit):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return SPACE.save(self.linear(x))

    assert deed_of(Saves()) == "open a file"


class HasAPartOfThatName(Unit):
    def __init__(self) -> None:
        super().__init__()
        self.draw, self.save = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(x) * self.save


def test_function_that_shares_a_name_with_a_part_and_is_never_called_is_not_reached() -> None:
    assert source_of(HasAPartOfThatName()) is None
    assert deed_of(HasAPartOfThatName()) is None
