"""Count the calls of units per forward pass: more calls, for example for an auxiliary loss, need more memory."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from autotune.mechanics.controls import Switcher

# Number of steps in a row with more calls after which these are the usual ones.
_IN_A_ROW = 16
# A step with more calls is expected again for this many steps, or for this many times the largest gap between two.
_STEPS, _GAPS = 1000, 4
# Most steps that are traced to measure one with more calls.
_LOOKS = 128


@dataclass(frozen=True, slots=True)
class _More:
    """What is known of steps with a number of calls that is more than usual.

    Attributes:
        needs: the most memory that one needed over what a step with the usual calls would have; ``None`` if unknown.
        last: number of the last one.
        span: for how many steps another one is expected.
    """

    needs: float | None
    last: int
    span: int


class UnitCalls:
    """Counts the calls of a few units, which represent all units.

    Args:
        switcher: The switcher that counts them.
    """

    def __init__(self, switcher: Switcher) -> None:
        self._switcher = switcher
        # For each recent step, calls per forward pass divided by those when the run was profiled.
        self._recent: deque[int] = deque([1], maxlen=_IN_A_ROW)
        # By the number of calls that was more than usual.
        self._more: dict[int, _More] = {}
        self._looks = _LOOKS
        # The calls of each counted unit per forward pass when the run was profiled.
        self._profiled: dict[str, int] = {}
        self._passes = 0
        self._before_aside: Counter[str] = Counter()

    @property
    def usual(self) -> int:
        """Calls per forward pass in most recent steps, divided by those when the run was profiled."""
        return min(self._recent)

    @property
    def extra(self) -> float:
        """What a step is expected to need at most over what one with the usual calls does; at least 1.

        A step of n times as many calls counts as n times as much, or as what it was measured to need if that is more.
        """
        found = (max(calls / self.usual, more.needs or 1.0) for calls, more in self._more.items())
        return max(found, default=1.0)

    @property
    def is_unmeasured(self) -> bool:
        """Whether steps should be traced until one with more calls is among them: none was measured, nor looked for."""
        return self._looks > 0 and any(more.needs is None for more in self._more.values())

    @property
    def counting(self) -> bool:
        """Whether calls are counted."""
        return bool(self._profiled)

    def count(self, profiled: Mapping[str, int]) -> None:
        """Begin to count.

        Args:
            profiled: The calls of each unit per forward pass when the run was profiled.
        """
        self._profiled = {name: max(profiled[name], 1) for name in representatives(profiled)}
        self._switcher.count(self._profiled)
        # Calls of earlier steps do not count.
        self._switcher.calls()

    def begin_step(self) -> None:
        """Begin a step."""
        self._passes, self._before_aside = 0, Counter()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out what is called within: trial passes are not the loop's own."""
        self._before_aside.update(self._switcher.calls())
        try:
            yield
        finally:
            self._switcher.calls()

    def begin_pass(self) -> None:
        """Note that a forward pass begins."""
        self._passes += 1

    def end_step(self) -> int:
        """Return a step's calls per forward pass, divided by those when the run was profiled; 1 if it is not known.

        Of units that differ, the one that was called most often counts.
        """
        calls, passes, self._passes = self._before_aside + Counter(self._switcher.calls()), self._passes, 0
        times = (math.ceil(calls[name] / max(passes, 1) / usual) for name, usual in self._profiled.items())
        return max([1, *times]) if passes else 1

    def note(self, step: int, calls: int, needs: float | None = None) -> None:
        """Record a step.

        Args:
            step: number of the step.
            calls: its calls per forward pass, divided by those when the run was profiled.
            needs: memory that it needed over what a step with the usual calls would have; ``None`` if it is not known.
        """
        self._recent.append(calls)
        self._looks -= self.is_unmeasured and self._looks > 0
        if calls > self.usual:
            more = self._more.get(calls, _More(None, step, _STEPS))
            known = [one for one in (needs, more.needs) if one is not None]
            span = max(more.span, _GAPS * (step - more.last))
            self._more[calls] = _More(max(known, default=None), step, span)
        self._more = {calls: more for calls, more in self._more.items() if step - more.last <= more.span}


def representatives(names: Iterable[str]) -> list[str]:
    """Return the first and the last unit of each list of modules, and every other unit.

    Args:
        names: The units in the order of their calls.
    """
    lists: dict[str, list[str]] = {}
    for name in names:
        parent, _, key = name.rpartition(".")
        lists.setdefault(f"{parent}." if key.isdigit() else name, []).append(name)
    return [name for units in lists.values() for name in dict.fromkeys((units[0], units[-1]))]
