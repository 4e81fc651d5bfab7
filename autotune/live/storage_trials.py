"""Which units an approximate storage suits, found in trial passes beside the steps of a live run.

A storage is tried in many units at once. Where the gradient of some unit is off by more than its limit, halves are
tried, down to the single units that are to blame, and more again after a trial that harms none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence

from autotune.choices import Storage
from autotune.live.allowed_plans import AllowedPlans

# Trial passes for one storage; units that were not tried by then may not have it.
_MOST_TRIALS = 24
# Trial passes in a row that show nothing, for example because losses are not finite, after which a storage is locked.
_MOST_UNJUDGED = 32

# Units that should have a storage.
Group = tuple[Storage, Sequence[str]]


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
        # The number of trials planned since the last one that was judged.
        self._unjudged: Counter[Storage] = Counter()
        # What is tried again after a late trial that failed.
        self._doubts: Generator[Group, str | None, None] | None = None
        self._doubted: Group | None = None
        self._waits = 0

    def suits(self, name: str, storage: Storage) -> bool:
        """Return whether a unit may have a storage: it is exact, or was tried."""
        locked = self._allowed.space.locked.get(name, ())
        return not storage.approximates or ((name, storage) in self._good and storage not in locked)

    def knows(self, tried: Mapping[str, Storage]) -> bool:
        """Return whether the trials of all these storages, by unit, have harmed none before."""
        return tried.items() <= self._good

    def next(self, storage: Storage, names: Iterable[str]) -> Sequence[str]:
        """Return the units in which a storage is tried next; none if all were tried, or enough trials were made.

        Args:
            storage: The storage.
            names: The units that should have it.
        """
        untried = [name for name in names if not self.suits(name, storage)]
        reason = None
        if self._trials[storage] == _MOST_TRIALS:
            reason = "too many trials would be needed"
        elif self._unjudged[storage] == _MOST_UNJUDGED:
            reason = f"{_MOST_UNJUDGED} trials in a row showed no finite gradients"
        if untried and reason is not None:
            self._allowed.lock_choice(storage, untried, reason)
            return ()
        self._unjudged[storage] += bool(untried)
        return untried[: self._most.get(storage)]

    def note(self, storage: Storage, names: Sequence[str], reason: str | None) -> None:
        """Record a trial.

        Args:
            storage: The storage.
            names: The units that had it.
            reason: What speaks against it; ``None`` for nothing.
        """
        self._trials[storage] += 1
        self._unjudged[storage] = 0
        if reason is None:
            self._good.update((name, storage) for name in names)
            if storage in self._most:
                self._most[storage] = 2 * len(names)
        elif len(names) == 1:
            self._allowed.lock_choice(storage, names, reason)
        else:
            self._most[storage] = len(names) // 2

    # Late trials, of storages that units have had.

    def doubted(self) -> Group | None:
        """Return what is to be tried in the next step because a late trial has failed; ``None`` if none has.

        Until it is known which units are bad, none should have an approximate storage.
        """
        return self._doubted

    def try_doubted(self) -> None:
        """Note that what is doubted is tried in the next step."""
        self._waits += 1
        if self._waits > _MOST_UNJUDGED:
            self._go_on(f"it failed, and {_MOST_UNJUDGED} further trials showed no finite gradients")

    def note_late(self, tried: Mapping[str, Storage], reason: str | None) -> None:
        """Record a late trial: of what is doubted, or of all that units have.

        Args:
            tried: The storages that were tried, by unit.
            reason: What speaks against them; ``None`` for nothing.
        """
        if self._doubted is not None:
            storage, names = self._doubted
            if tried == dict.fromkeys(names, storage):
                self._go_on(reason)
        elif reason is not None:
            self._doubts = self._sort_out(tried, reason)
            self._go_on(None)

    def _go_on(self, reason: str | None) -> None:
        assert self._doubts is not None
        self._waits = 0
        try:
            self._doubted = self._doubts.send(None if self._doubted is None else reason)
        except StopIteration:
            self._doubts = self._doubted = None

    def _sort_out(self, tried: Mapping[str, Storage], reason: str) -> Generator[Group, str | None, None]:
        groups = {one: [name for name, own in tried.items() if own is one] for one in dict.fromkeys(tried.values())}
        found = False
        for storage, names in groups.items():
            why = reason if len(groups) == 1 else (yield storage, names)
            if why is not None:
                found = True
                yield from self._halve(storage, names, why)
        if not found:
            # Each is good enough, all together are not.
            storage = max(groups, key=list(Storage).index)
            self._allowed.lock_choice(storage, groups[storage], reason)

    def _halve(self, storage: Storage, names: Sequence[str], reason: str) -> Generator[Group, str | None, None]:
        if len(names) == 1:
            self._allowed.lock_choice(storage, names, reason)
            return
        found, half = False, len(names) // 2
        for part in (names[:half], names[half:]):
            why = yield storage, part
            if why is not None:
                found = True
                yield from self._halve(storage, part, why)
        if not found and (yield storage, names) is not None:
            # Each half is good enough, both together are not; what does not fail again was a batch's fault.
            self._allowed.lock_choice(storage, names[half:], reason)
