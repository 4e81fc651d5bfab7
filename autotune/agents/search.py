"""The protocol of a search (ask for a plan, tell its measurement), the context of a search, and random search."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from autotune.agents.study_store import StudyStore
from autotune.cost_model.profile import Profile
from autotune.gym.observation import Observation
from autotune.plan import Plan, PlanSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """The inputs from which a search is made.

    Attributes:
        space: the plans that can be proposed.
        seed: random seed; the same seed and the same costs give the same proposals.
        memory_budget_bytes: the memory budget; ``None`` for none.
        profile: the profile of the job; ``None`` if the method does not need one.
        first: plans of hand-made rules that are worth measuring first; empty for a cold start.
        ahead: largest number of proposals that may await measurement at once.
        place: where a study can be stored: the run's folder, or a shared database.
    """

    space: PlanSpace
    seed: int
    memory_budget_bytes: int | None = None
    profile: Profile | None = None
    first: tuple[Plan, ...] = ()
    ahead: int = 1
    place: Path | StudyStore


@runtime_checkable
class Search(Protocol):
    """Proposes plans and learns from their measurements; the result of a search is one static plan."""

    def ask(self) -> Plan:
        """Return a plan to measure."""
        ...

    def tell(self, plan: Plan, observation: Observation, cost: float) -> None:
        """Learn from the measurement of a plan.

        Args:
            plan: the oldest plan from :meth:`ask` whose measurement was not reported yet.
            observation: the observation of the plan's window, which may have failed.
            cost: cost of the window; lower is better.
        """
        ...

    def close(self) -> None:
        """Release files and connections."""
        ...


class RandomSearch:
    """Draws plans uniformly.

    Args:
        space: the plans that can be drawn.
        seed: random seed for the draws.
    """

    def __init__(self, space: PlanSpace, seed: int) -> None:
        self._space = space
        self._generator = np.random.default_rng(seed)

    def ask(self) -> Plan:
        """Return a plan drawn uniformly."""
        return self._space.sample(self._generator)

    def tell(self, plan: Plan, observation: Observation, cost: float) -> None:
        """Ignore the measurement: random search does not learn."""

    def close(self) -> None:
        """Do nothing; nothing is open."""
