"""Which units an approximate storage suits, found in trial passes beside the steps of a live run.

A storage is tried in many units at once. Where the gradient of some unit is off by more than its limit, halves are
tried, down to the single units that are to blame, and more again after a trial that harms none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from autotune.choices import Storage
from autotune.live.allowed_plans import AllowedPlans

# Trial passes for one storage; units that were not tried by then may not have it.
_MOST_TRIALS = 24


class StorageTrials:
    """The approximate storages that units may have in plans, once they were tried.

    Args:
        allowed: The plans that are allowed; storages are locked there in the units that they do not suit.
    """

    def __init__(self, allowed: AllowedPlans) -> None:
        self._allowed = allowed
        self._good: set[tuple[str, Storage]] = set()
        # The most units of the next trial, and the number of trials.
        self._most: dict[Storage, int] = {}
        self._trials: Counter[Storage] = Counter()

    def suits(self, name: str, storage: Storage) -> bool:
        """Return whether a unit may have a storage: it is exact, or was tried."""
        return not storage.approximates or (name, storage) in self._good

    def next(self, storage: Storage, names: Iterable[str]) -> Sequence[str]:
        """Return the units in which a storage is tried next; none if all were tried, or enough trials were made.

        Args:
            storage: The storage.
            names: The units that should have it.
        """
        untried = [name for name in names if not self.suits(name, storage)]
        if untried and self._trials[storage] == _MOST_TRIALS:
            self._allowed.lock_choice(storage, untried, "too many trials would be needed")
            return ()
        self._trials[storage] += bool(untried)
        return untried[: self._most.get(storage)]

    def note(self, storage: Storage, names: Sequence[str], reason: str | None) -> None:
        """Record a trial.

        Args:
            storage: The storage.
            names: The units that had it.
            reason: What speaks against it; ``None`` for nothing.
        """
        if reason is None:
            self._good.update((name, storage) for name in names)
            if storage in self._most:
                self._most[storage] = 2 * len(names)
        elif len(names) == 1:
            self._allowed.lock_choice(storage, names, reason)
        else:
            self._most[storage] = len(names) // 2

    def take_back(self, storage: Storage, names: Sequence[str], reason: str) -> None:
        """Lock a storage in units that had it, because a late trial speaks against it."""
        self._good.difference_update((name, storage) for name in names)
        self._allowed.lock_choice(storage, names, reason)
