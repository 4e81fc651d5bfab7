"""The phases of a live run: unprofiled, when nothing can be predicted, and profiled, when each batch gets a plan.

Both have nearly the same methods, so the controller rarely has to check the phase.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.cost_model.profile import Profile
from autotune.live.guard import fallback
from autotune.live.placement import Placements, usable
from autotune.plan import Plan, PlanSpace
from autotune.profiling.memory_scaling import Scaling


@dataclass(frozen=True, slots=True)
class Placed:
    """The plan of a step.

    Attributes:
        plan: The plan.
        least_bytes: Predicted peak of the leanest plan if no plan is known to fit; ``None`` if one does.
    """

    plan: Plan
    least_bytes: float | None = None


class Unprofiled:
    """A run that has no profile yet.

    Attributes:
        space: The plans that the mode allows.
        baseline: The user's own plan.
        decided: The plan that was last decided on: the baseline.

    Args:
        space: As the attribute.
    """

    placements = None

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self.baseline = self.decided = space.baseline()

    def decide_on(self, plan: Plan) -> None:
        """Stay with the baseline: no plan can be predicted to fit."""

    def fallback(self, room: float, length: float) -> Plan:
        """Return the plan to run when no policy is trusted."""
        return self.baseline

    def share(self, size: float) -> float:
        """Return 1: there is no profiled batch to compare sizes with."""
        return 1.0

    def peak_bytes(self, plan: Plan, size: float) -> float | None:
        """Return ``None``: no peak can be predicted."""
        return None

    def seconds_of(self, plan: Plan) -> float | None:
        """Return ``None``: no time can be predicted."""
        return None

    def fits(self, plan: Plan, size: float, room: float) -> bool:
        """Return ``False``: no plan is known to fit."""
        return False


class Profiled:
    """A run with a profile.

    Attributes:
        space: The plans that the profile can predict.
        baseline: The user's own plan.
        placements: The plans with predicted peaks, which give the fastest plan for a batch.
        decided: The plan that was last decided on.

    Args:
        profile: The profile.
        former: The former phase, whose decided plan is kept if it fits.
        budget_bytes: The current budget; ``None`` for none.
        scaling: As for :class:`Placements`.
        largest_bytes: Bytes of the largest recent batch; 0 if there was none.
    """

    decided: Plan

    def __init__(
        self,
        profile: Profile,
        former: Unprofiled | Profiled,
        *,
        budget_bytes: int | None,
        scaling: Scaling,
        largest_bytes: int,
    ) -> None:
        self.space = profile.space
        self.baseline = self.space.baseline()
        self.placements = Placements(profile, budget_bytes, scaling)
        self._batch_bytes = profile.tables[0].batch_bytes
        # The profile does not know units that were never called.
        precision = {name: former.decided.precision_of(name) for name in self.baseline.precision}
        storage = {name: former.decided.storage_of(name) for name in self.baseline.storage}
        self.decided = former.decided.changed(precision=precision, storage=storage)
        length = self.share(largest_bytes) if largest_bytes else 1.0
        self.decide_on(fallback(self.decided, self.placements, usable(budget_bytes), length))

    def decide_on(self, plan: Plan) -> None:
        """Set the decided plan."""
        self.decided = plan
        self._rows = self.placements.group(plan)

    def fallback(self, room: float, length: float) -> Plan:
        """Return the plan to run when no policy is trusted: the baseline, or if it does not fit, one that does."""
        return fallback(self.baseline, self.placements, room, length)

    def share(self, size: float) -> float:
        """Return a batch's size relative to the profiled batch."""
        return size / self._batch_bytes

    def peak_bytes(self, plan: Plan, size: float) -> float | None:
        """Return a plan's predicted peak with a batch of ``size`` bytes."""
        return self.placements.peak_bytes(plan, self.share(size))

    def seconds_of(self, plan: Plan) -> float | None:
        """Return a plan's predicted seconds per step at the profiled size."""
        return self.placements.seconds_of(plan)

    def fits(self, plan: Plan, size: float, room: float) -> bool:
        """Return whether a plan is predicted to need at most ``room`` bytes with a batch of ``size`` bytes."""
        return self.placements.peak_bytes(plan, self.share(size)) <= room

    def place(self, length: float, room: float, *, follows: bool, samples: int = 0) -> Placed:
        """Return the plan for a batch: the decided one, or the fastest plan that may replace it.

        Args:
            length: The batch's size relative to the profiled batch.
            room: Bytes that the plan may be predicted to need.
            follows: Whether to replace the decided storage where another one is faster.
            samples: The batch's samples, if k cuts them as equally as it can; 0 for equal pieces.
        """
        # A plan without known replacements is kept.
        stays = self._rows is None or not follows
        if stays and self.placements.peak_bytes(self.decided, length, samples) <= room:
            return Placed(self.decided)
        fastest = self.placements.fastest
        found = None if self._rows is None else fastest(room, length, self._rows, samples=samples)
        found = found or fastest(room, length, samples=samples)
        if found is not None:
            return Placed(found)
        leanest = self.placements.leanest()
        return Placed(leanest, self.placements.peak_bytes(leanest, length, samples))
