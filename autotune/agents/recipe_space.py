"""The values of a recipe that a search may change, and their ranges; independent of any search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune.agents.recipe import LeverRecipe, Recipe
from autotune.errors import InputError

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The numbers from one to another.

    Attributes:
        low: the smallest.
        high: the largest.
        log: whether they are drawn on a logarithmic scale; needs ``low`` > 0.
        whole: whether only whole numbers are meant.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def holds(self, value: object) -> bool:
        """Tell whether a value lies in the range and is of its kind."""
        kinds = int if self.whole else int | float
        return isinstance(value, kinds) and not isinstance(value, bool) and self.low <= value <= self.high

    def around(self, value: float) -> Range:
        """Return the range, widened to hold a value."""
        return replace(self, low=min(self.low, value), high=max(self.high, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The few whole numbers that there are.

    Attributes:
        options: what can be chosen, in rising order.
    """

    options: tuple[int, ...]

    def holds(self, value: object) -> bool:
        """Tell whether a value is one of the options."""
        return type(value) is int and value in self.options

    def around(self, value: float) -> Choice:
        """Return the choice, with a value among the options."""
        return Choice(options=tuple(sorted({*self.options, int(value)})))


Space = Mapping[str, Range | Choice]

PPO_SPACE: Space = {
    "learning_rate": Range(low=1e-4, high=3e-3, log=True),
    "entropy": Range(low=1e-4, high=2e-2, log=True),
    "discount": Range(low=0.8, high=0.99),
    "trace": Range(low=0.7, high=0.99),
    "epochs": Range(low=2, high=12, whole=True),
    "batch": Choice(options=(1024, 3072, 6144)),
    "width": Choice(options=(32, 64, 96)),
    "clip": Range(low=0.1, high=0.3),
}


def space_around(ppo: LeverRecipe) -> Space:
    """Return what is searched: :data:`PPO_SPACE`, widened where a recipe's own value lies outside of it.

    Raises:
        InputError: if an own value has no place on a logarithmic scale.
    """
    own = own_values(ppo)
    for name, value in own.items():
        place = PPO_SPACE[name]
        if isinstance(place, Range) and place.log and value <= 0:
            raise InputError(f"ppo.{name} is {value!r}", where="--search", allowed="above 0: its logarithm is searched")
    return {name: place.around(own[name]) for name, place in PPO_SPACE.items()}


def own_values(ppo: LeverRecipe) -> dict[str, float]:
    """Return a recipe's own values of what is searched."""
    return {name: getattr(ppo, name) for name in PPO_SPACE}


def with_values(recipe: Recipe, values: Values) -> Recipe:
    """Return a recipe with other values of what is searched; all else stays.

    Raises:
        InputError: if a recipe cannot have such a value.
    """
    changes: dict[str, Any] = dict(values)
    return replace(recipe, ppo=replace(recipe.ppo, **changes))
