"""Agreement of the ranks of a run: on profiles, on the first rank's decisions, and on each batch's needs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from autotune.choices import STORAGES
from autotune.cost_model.profile import Profile
from autotune.live.rank_channel import Ranks
from autotune.plan import Plan, Precision, Storage
from autotune.profiling.memory_scaling import Scaling

LOCKED_ELSEWHERE = "another rank's batch speaks against it"
# Above the position of every storage, from the fastest to the leanest: the unit is locked.
_LOCKED = float(len(STORAGES))
# Sixteen messages between ranks.
_MOST_GATHERED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a step needs on the rank that needs most.

    Attributes:
        length: The largest batch, relative to the profiled one.
        room: The fewest bytes that a plan may be predicted to need.
        apart: Whether the ranks' plans may differ, because one of them learns or has locked a unit.
    """

    length: float
    room: float
    apart: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision of the first rank, which all ranks follow.

    Attributes:
        plan: The decided plan.
        open: Whether the circuit breaker has opened: no plan is switched any more.
        trusts: Whether the circuit breaker allows switches now.
        profile: The profile to predict with from now on; ``None`` to keep the current one.
        scaling: Bounds of memory at other batch sizes than the profiled one.
    """

    plan: Plan
    open: bool
    trusts: bool
    profile: Profile | None
    scaling: Scaling

    def to_json(self) -> dict[str, Any]:
        """Return the document that is sent to the other ranks."""
        return {
            "plan": self.plan.to_json(),
            "open": self.open,
            "trusts": self.trusts,
            "profile": None if self.profile is None else self.profile.to_json(),
            "scaling": astuple(self.scaling),
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Decision:
        """Build the decision from the first rank's document."""
        return cls(
            plan=Plan.from_json(told["plan"]),
            open=bool(told["open"]),
            trusts=bool(told["trusts"]),
            profile=None if told["profile"] is None else Profile.from_json(told["profile"]),
            scaling=Scaling(*map(float, told["scaling"])),
        )


def common_precisions(ranks: Ranks, precisions: Sequence[Precision]) -> tuple[Precision, ...]:
    """Return the precisions that every rank has found useful, in the order of this rank's.

    Args:
        ranks: The ranks.
        precisions: The precisions that this rank has found useful.

    Raises:
        RanksError: If the others cannot be reached.
    """
    lacking = ranks.largest([float(precision not in precisions) for precision in Precision])
    common = {precision for precision, lacks in zip(Precision, lacking, strict=True) if not lacks}
    return tuple(precision for precision in precisions if precision in common)


class Agreement:
    """Coordination of several ranks; a single rank agrees with itself.

    Attributes:
        many: Whether there are other ranks.
        is_first: Whether this rank decides.

    Args:
        ranks: The ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._profiled = False
        self._first_trusts = True

    @property
    def many(self) -> bool:
        """Whether there are other ranks."""
        return self._ranks.many

    @property
    def is_first(self) -> bool:
        """Whether this rank decides for all."""
        return self._ranks.rank == 0

    def all_profiled(self, complete: bool) -> bool:
        """Return whether every rank has a profile.

        Args:
            complete: Whether this rank has a profile.

        Raises:
            RanksError: If the others cannot be reached.
        """
        self._profiled = self._profiled or self._ranks.largest([float(not complete)])[0] == 0.0
        return self._profiled

    def tell(self, decision: Decision) -> None:
        """Send the first rank's decision to the others.

        Raises:
            RanksError: If the others cannot be reached.
        """
        self._first_trusts = decision.trusts
        self._ranks.from_first(decision.to_json())

    def hear(self) -> Decision:
        """Return the first rank's decision.

        Raises:
            RanksError: If it does not arrive.
        """
        decision = Decision.from_json(self._ranks.from_first(None))
        self._first_trusts = decision.trusts
        return decision

    def trusted(self, own: bool) -> bool:
        """Return whether switches are allowed now; the first rank decides for all.

        Args:
            own: Whether this rank's circuit breaker allows them.
        """
        return self._first_trusts if self.many else own

    def most_demanding(self, needs: Needs) -> Needs:
        """Return what the step needs on the rank that needs most.

        Args:
            needs: What it needs on this rank.

        Raises:
            RanksError: If the others cannot be reached.
        """
        length, lacking, apart = self._ranks.largest([needs.length, -needs.room, float(needs.apart)])
        return Needs(length=length, room=-lacking, apart=bool(apart))

    def leanest(
        self, plan: Plan, names: Sequence[str], locked: Collection[str], precisions: Sequence[Precision]
    ) -> tuple[Plan, list[str]]:
        """Return the plan that needs no more memory than any rank's own, and the units that another rank has locked.

        Units may exchange data with other ranks, also where they are recomputed, so all ranks must recompute the same.

        Args:
            plan: This rank's plan; if the ranks' plans differ in precision, each has one for all of its units.
            names: The units that may be recomputed, the same ones on all ranks.
            locked: Those that may not on this rank.
            precisions: The precisions of plans.

        Raises:
            RanksError: If the others cannot be reached.
        """
        own = precisions.index(next(iter(plan.precision.values()), precisions[0]))
        wishes = [_LOCKED if name in locked else float(STORAGES.index(plan.storage_of(name))) for name in names]
        k, precision, *found = self._ranks.largest([plan.accumulation_steps, own, *wishes])
        storage = dict(plan.storage)
        for name, wish in zip(names, found, strict=True):
            chosen = Storage.SAVE if wish == _LOCKED else STORAGES[int(wish)]
            if chosen is not plan.storage_of(name):
                storage[name] = chosen
        changes: dict[str, Any] = {"accumulation_steps": int(k), "storage": storage}
        if precision != own:
            changes["precision"] = dict.fromkeys(plan.precision, precisions[int(precision)])
        elsewhere = [name for name, wish in zip(names, found, strict=True) if wish == _LOCKED and name not in locked]
        return plan.changed(**changes), elsewhere

    def gathers(self, count: int) -> bool:
        """Return whether there are other ranks, and few enough to tell each other so many values now and then."""
        return self.many and self._ranks.world * count <= _MOST_GATHERED

    def gathered(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of all ranks, in their order; all have as many.

        Args:
            values: This rank's values.

        Raises:
            RanksError: If the others cannot be reached.
        """
        world, own, count = self._ranks.world, self._ranks.rank, len(values)
        # The largest of each: only one rank has another value than this in its place.
        table = [-math.inf] * (world * count)
        table[own * count : (own + 1) * count] = values
        found = self._ranks.largest(table)
        return [found[rank * count : (rank + 1) * count] for rank in range(world)]

    def locked_elsewhere(self, names: list[str], locked: Mapping[str, str]) -> list[str]:
        """Return the choices that another rank has locked and this one has not.

        Args:
            names: The choices to compare.
            locked: The choices that this rank has locked, with the reasons.

        Raises:
            RanksError: If the others cannot be reached.
        """
        found = self._ranks.largest([float(name in locked) for name in names])
        return [name for name, by_any in zip(names, found, strict=True) if by_any and name not in locked]
