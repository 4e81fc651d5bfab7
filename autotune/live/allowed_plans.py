"""The plans that a live run allows; reasons found during the run remove some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autotune.plan import Plan, PlanSpace, Precision, Storage

K = "accumulation_steps"
# Most units that a reason names.
_NAMED = 3


class AllowedPlans:
    """The plans that are allowed, and why the others are not.

    Attributes:
        space: The allowed plans.
        locks: The reason for each lock, by what is locked: a unit that may not be recomputed, ``accumulation_steps``,
            smaller values of it (``accumulation_steps < 2``), a precision, or a storage in some units or in all.

    Args:
        space: The plans that are allowed at first.
    """

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self.locks: dict[str, str] = {}
        # The units in which a storage is locked.
        self._without: dict[Storage, dict[str, None]] = {}

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

    def lock_choice(self, storage: Storage, names: Sequence[str], reason: str) -> None:
        """Lock a storage in some units.

        Args:
            storage: The storage; neither the first nor the last of the space.
            names: The units.
            reason: Why; of several reasons, the last is told.
        """
        self.space = self.space.locking({name: (str(storage),) for name in names})
        known = self._without.setdefault(storage, {})
        known.update(dict.fromkeys(names))
        some = [*known][:_NAMED] + ([f"{len(known) - _NAMED} others"] if len(known) > _NAMED else [])
        self.locks[str(storage)] = f"in {' and '.join(filter(None, [', '.join(some[:-1]), some[-1]]))}: {reason}"

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


def tried_choice(plan: Plan, reference: Plan) -> str | Storage:
    """Return the choice that a trial pass under a plan tests, beside one under a reference; a precision by its name."""
    if plan.accumulation_steps != reference.accumulation_steps:
        return K
    tried = tried_storages(plan, reference)
    return next(iter(tried.values())) if tried else str(next(iter(plan.precision.values())))


def tried_storages(plan: Plan, reference: Plan) -> dict[str, Storage]:
    """Return the storages that a plan gives to units in place of a reference's, by unit."""
    return {name: own for name, own in plan.storage.items() if own is not reference.storage_of(name)}
