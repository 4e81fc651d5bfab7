"""The search space of recipes: the values that a search may change, and their ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune.agents.recipe import LeverRecipe, Recipe
from autotune.errors import InputError

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A range of numbers.

    Attributes:
        low: the smallest number.
        high: the largest number.
        log: whether the scale is logarithmic, which needs ``low`` > 0.
        whole: whether only whole numbers are allowed.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def holds(self, value: object) -> bool:
        """Return whether a value is a number in the range, and whole if required."""
        kinds = int if self.whole else int | float
        return isinstance(value, kinds) and not isinstance(value, bool) and self.low <= value <= self.high

    def around(self, value: float) -> Range:
        """Return the range, widened to include a value."""
        return replace(self, low=min(self.low, value), high=max(self.high, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice among a few whole numbers.

    Attributes:
        options: the allowed numbers, in ascending order.
    """

    options: tuple[int, ...]

    def holds(self, value: object) -> bool:
        """Return whether a value is one of the options."""
        return type(value) is int and value in self.options

    def around(self, value: float) -> Choice:
        """Return the choice with a value added to the options."""
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
    """Return the search space around a recipe: :data:`PPO_SPACE`, widened to contain the recipe's own values.

    Raises:
        InputError: if a value of the recipe is not above 0 but its range is logarithmic.
    """
    own = own_values(ppo)
    for name, value in own.items():
        place = PPO_SPACE[name]
        if isinstance(place, Range) and place.log and value <= 0:
            allowed = "above 0, because the search scale is logarithmic"
            raise InputError(f"ppo.{name} is {value!r}", where="--search", allowed=allowed)
    return {name: place.around(own[name]) for name, place in PPO_SPACE.items()}


def own_values(ppo: LeverRecipe) -> dict[str, float]:
    """Return a recipe's own values of the searched settings."""
    return {name: getattr(ppo, name) for name in PPO_SPACE}


def with_values(recipe: Recipe, values: Values) -> Recipe:
    """Return a recipe with other values of the searched settings.

    Raises:
        InputError: if a value is not allowed in a recipe.
    """
    changes: dict[str, Any] = dict(values)
    return replace(recipe, ppo=replace(recipe.ppo, **changes))
