"""The protocol of a search (ask for a plan, tell what it measured), what a search is given, and random search."""

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
    """What a search is made from.

    Attributes:
        space: the plans that can be proposed.
        seed: random seed; the same seed and the same costs give the same proposals.
        memory_budget_bytes: the memory budget; ``None`` for none.
        profile: what the job costs; ``None`` unless the method needs a profile.
        first: plans of hand-made rules that are worth measuring first; empty if the user asked for a cold start.
        ahead: how many proposals may be asked for before the first of them is told.
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
            plan: the oldest plan returned by :meth:`ask` that has not been told yet.
            observation: its window, which may have failed.
            cost: its cost; lower is better.
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
        """Do nothing: nothing is open."""
