"""The plans that a live run allows; reasons found during the run remove some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.plan import Plan, PlanSpace, Precision

K = "accumulation_steps"


class AllowedPlans:
    """The plans that are allowed, and why the others are not.

    Attributes:
        space: The allowed plans.
        locks: The reason for each lock, by what is locked: a unit that may not be recomputed, ``accumulation_steps``,
            smaller values of it (``accumulation_steps < 2``), or a precision.

    Args:
        space: The plans that are allowed at first.
    """

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self.locks: dict[str, str] = {}

    def plan(self, k: int, precision: Precision, *, lean: bool) -> Plan:
        """Return the plan with one precision everywhere.

        Args:
            k: The number of accumulation steps.
            precision: The precision.
            lean: Whether everything that may be recomputed is recomputed.
        """
        recomputed = self.space.recomputable if lean else ()
        return self.space.plan(accumulation_steps=k, precision=precision, recomputed=recomputed)

    @property
    def leanest(self) -> Plan:
        """The baseline, at the smallest k, with all allowed recomputation: the least memory before cuts are tried."""
        return self.plan(self.space.accumulation_choices[0], self.space.precisions[0], lean=True)

    def lock(self, what: str, reason: str) -> None:
        """Lock a choice: ``accumulation_steps``, or a precision by its name."""
        self.locks[what] = reason
        if what == K:
            self.space = replace(self.space, accumulation_choices=self.space.accumulation_choices[:1])
        else:
            kept = tuple(one for one in self.space.precisions if one != what)
            self.space = replace(self.space, precisions=kept)

    def lock_storage(self, reasons: Mapping[str, str]) -> None:
        """Lock the storage of units, which are then not recomputed.

        Args:
            reasons: The reason against recomputation, by unit.
        """
        self.locks.update(reasons)
        units = (
            replace(unit, recomputable=unit.recomputable and unit.name not in reasons) for unit in self.space.units
        )
        self.space = replace(self.space, units=tuple(units))

    def raise_k(self, k: int, reason: str) -> None:
        """Remove every smaller value of k."""
        self.locks[f"{K} < {k}"] = reason
        kept = tuple(one for one in self.space.accumulation_choices if one >= k)
        self.space = replace(self.space, accumulation_choices=kept)


def tried_choice(plan: Plan, reference: Plan) -> str:
    """Return the name of the choice that a trial pass under a plan tests, beside one under a reference."""
    differs = plan.accumulation_steps != reference.accumulation_steps
    return K if differs else str(next(iter(plan.precision.values())))
