"""State what a search is: ask for a plan, tell what it measured. Random search lives here too."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from autotune.gym.observation import Observation
from autotune.plan import Plan, PlanSpace


@runtime_checkable
class Search(Protocol):
    """Propose plans and learn from what they measured; the result is a static plan.

    Attributes:
        name: what the search is called in reports.
    """

    name: str

    def ask(self) -> Plan:
        """Return a plan to measure."""
        ...

    def tell(self, plan: Plan, observation: Observation, cost: float) -> None:
        """Take in what a plan measured.

        Args:
            plan: of those that :meth:`ask` returned and nothing was told of yet, the first.
            observation: its window.
            cost: its cost; lower is better.
        """
        ...

    def close(self) -> None:
        """Release files and connections."""
        ...


class RandomSearch:
    """Draw plans uniformly.

    Args:
        space: the plans that can be drawn.
        seed: of the draws.
    """

    name = "random"

    def __init__(self, space: PlanSpace, seed: int) -> None:
        self._space = space
        self._generator = np.random.default_rng(seed)

    def ask(self) -> Plan:
        """Return a uniform draw."""
        return self._space.sample(self._generator)

    def tell(self, plan: Plan, observation: Observation, cost: float) -> None:
        """Do nothing: random draws do not learn."""

    def close(self) -> None:
        """Do nothing: nothing is open."""
