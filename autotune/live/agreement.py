"""Agreement of the ranks of a run: on profiles, on the first rank's decisions, and on each batch's needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.cost_model.profile import Profile
from autotune.live.rank_channel import Ranks
from autotune.plan import Plan, Precision

LOCKED_ELSEWHERE = "another rank's batch speaks against it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision of the first rank, which all ranks follow.

    Attributes:
        plan: The decided plan.
        open: Whether the circuit breaker has opened: no plan is switched any more.
        trusts: Whether the circuit breaker allows switches now.
        profile: The profile to predict with from now on; ``None`` to keep the current one.
        square_share: Share of memory that grows with the square of the batch size beyond the profiled size.
    """

    plan: Plan
    open: bool
    trusts: bool
    profile: Profile | None
    square_share: float

    def to_json(self) -> dict[str, Any]:
        """Return the document that is sent to the other ranks."""
        return {
            "plan": self.plan.to_json(),
            "open": self.open,
            "trusts": self.trusts,
            "profile": None if self.profile is None else self.profile.to_json(),
            "square_share": self.square_share,
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Decision:
        """Build the decision from the first rank's document."""
        return cls(
            plan=Plan.from_json(told["plan"]),
            open=bool(told["open"]),
            trusts=bool(told["trusts"]),
            profile=None if told["profile"] is None else Profile.from_json(told["profile"]),
            square_share=float(told["square_share"]),
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

    def most_demanding(self, length: float, room: float) -> tuple[float, float]:
        """Return the largest batch size and the smallest room over all ranks.

        Raises:
            RanksError: If the others cannot be reached.
        """
        if not self.many:
            return length, room
        length, lacking = self._ranks.largest([length, -room])
        return length, -lacking

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
