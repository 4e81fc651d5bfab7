"""Count the calls of units per forward pass, and the bytes that they are handed.

More calls, for example for an auxiliary loss, need more memory, as does a batch that the loop itself makes larger.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from autotune.mechanics.controls import Switcher

# Number of steps in a row with more calls after which these are the usual ones.
_IN_A_ROW = 16
# A step with more calls is expected again for this many steps, or for this many times the largest gap between two.
_STEPS, _GAPS = 1000, 4
# Most steps that are traced to measure one with more calls.
_LOOKS = 128
# What such a step needs was measured with all recomputed; fuller plans may need a little more of it.
_FULLER = 1.05
# Steps for which one that had several micro-batches is expected again.
_SEVERAL_STEPS = 256


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

    A call counts once for each usual size of what the unit is handed, if the step has more calls than usual.

    Args:
        switcher: The switcher that counts them.
        tells_apart: Whether to tell apart steps that call different units. Units that only some steps call do not count
            then among those that are handed something.

    Attributes:
        handed: bytes that the counted units were handed in each forward pass of the last step; in all of them together
            if passes did not call the same units.
        handed_calls: the calls per forward pass in which they were.
        called: the units that the last step called, once steps are told apart; empty before.
    """

    def __init__(self, switcher: Switcher, *, tells_apart: bool = False) -> None:
        self._switcher = switcher
        self.handed, self.handed_calls = [0], 0
        self._names: list[str] = []
        self._all: list[str] = []
        self._tells_apart, self._told = tells_apart, False
        self.called: frozenset[str] = frozenset()
        # The counted units that the first kinds of steps have called, and those that every step has.
        self._kinds: list[frozenset[str]] = []
        self._always = frozenset[str]()
        # For each recent step, whether it had several micro-batches.
        self._several: deque[bool] = deque(maxlen=_SEVERAL_STEPS)
        # For each recent step, calls per forward pass divided by those when the run was profiled.
        self._recent: deque[int] = deque([1], maxlen=_IN_A_ROW)
        # By the number of calls that was more than usual; those that are not expected any more are kept, too.
        self._more: dict[int, _More] = {}
        self._step, self._looks = 0, _LOOKS
        # The calls of each counted unit per forward pass when the run was profiled, and the bytes that these were
        # handed in the last step with the usual calls.
        self._profiled: dict[str, int] = {}
        self._usual_bytes: dict[str, float] = {}
        self._passes = 0
        self._before_aside: dict[str, list[int]] = {}

    @property
    def usual(self) -> int:
        """Calls per forward pass in most recent steps, divided by those when the run was profiled."""
        return min(self._recent)

    @property
    def extra(self) -> float:
        """What a step is expected to need at most over what one with the usual calls does; at least 1.

        A step of n times as many calls counts as n times as much, or as what it was measured to need if that is more.
        """
        found = (max(calls / self.usual, (more.needs or 0.0) * _FULLER) for calls, more in self._expected())
        return max(found, default=1.0)

    @property
    def is_unmeasured(self) -> bool:
        """Whether steps should be traced until one with more calls is among them: none was measured, nor looked for."""
        return self._looks > 0 and any(more.needs is None for _, more in self._expected())

    @property
    def counting(self) -> bool:
        """Whether calls are counted."""
        return bool(self._names)

    @property
    def compares(self) -> bool:
        """Whether calls are compared with those when the run was profiled."""
        return bool(self._profiled)

    @property
    def accumulates(self) -> bool:
        """Whether a recent step had several micro-batches, of which all but the first have gradients beside them."""
        return any(self._several)

    def count(self, names: Iterable[str]) -> None:
        """Begin to count.

        Args:
            names: All units in the order of their calls.
        """
        self._all = list(names)
        self._names = representatives(self._all)
        self._switcher.count(self._names)

    def also_count(self, names: Collection[str]) -> bool:
        """Count further units, which a first step has left out: steps may differ in these alone.

        Args:
            names: The units; those that are counted already do not matter.

        Returns:
            Whether any is new, so that the plan must be applied again.
        """
        new = [name for name in names if name not in self._names] if self._names else []
        if new:
            self._names = [*self._names, *new]
            self._switcher.count(self._names)
        return bool(new)

    def tell_apart(self) -> list[frozenset[str]]:
        """Count all units from now on; return those called by each kind of steps so far, of the counted ones."""
        self._names, self._told = self._all, True
        self._switcher.count(self._names)
        return self._kinds

    @property
    def takes_turns(self) -> bool:
        """Whether steps have called different units, and should be told apart from now on."""
        return self._tells_apart and not self._told and len(self._kinds) > 1

    def compare(self, profiled: Mapping[str, int]) -> None:
        """Begin to compare, or compare with another profile from now on.

        Args:
            profiled: The calls of each unit per forward pass when the run was profiled.
        """
        former, self._profiled = self._profiled, {name: max(profiled.get(name, 0), 1) for name in self._names}
        if any(calls > former.get(name, calls) for name, calls in self._profiled.items()):
            # What had more calls than usual may be in the profile now.
            self._more.clear()

    def begin_step(self) -> None:
        """Begin a step; calls before it, such as those under a probe, do not count."""
        self._passes, self._before_aside = 0, {}
        self._switcher.calls()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out what is called within: trial passes are not the loop's own."""
        self._before_aside = self._taken()
        try:
            yield
        finally:
            self._switcher.calls()

    def begin_pass(self) -> None:
        """Note that a forward pass begins."""
        self._passes += 1

    def end_step(self, probed: Collection[str] = ()) -> int:
        """Return a step's calls per forward pass, divided by those when the run was profiled; 1 if it is not known.

        Of units that differ, the one that was called most often counts.

        Args:
            probed: the units that were called under a probe, which does not count them.
        """
        found, passes = self._taken(), max(self._passes, 1)
        called = frozenset(name for name, own in found.items() if own) | set(self._names).intersection(probed)
        if called:
            self._always = self._always & called if self._kinds else called
            self._kinds += [called] if len(self._kinds) < 2 and called not in self._kinds else []
        self.called = called if self._told else frozenset()
        common = list(found.values())
        if self._tells_apart:
            # Steps of two kinds cannot be compared before they are told apart.
            common = [own for name, own in found.items() if name in self._always and not self.takes_turns]
        self._note_handed(common, passes)
        self._several.append(self._passes > 1)
        times = {
            name: len(found.get(name, ())) / passes / usual for name, usual in self._profiled.items() if self._passes
        }
        self._passes, self._before_aside = 0, {}
        most = math.ceil(max(times.values(), default=1.0))
        if most > self.usual:
            sizes = (self._sizes(name, own, passes) for name, own in found.items() if any(own))
            return max(most, math.ceil(self.usual * max(sizes, default=0.0)))
        self._usual_bytes.update((name, float(sum(own))) for name, own in found.items() if sum(own))
        return max(most, 1)

    def _note_handed(self, found: list[list[int]], passes: int) -> None:
        """Record what units were handed.

        Args:
            found: the bytes of each call, by unit.
            passes: the number of forward passes.
        """
        self.handed, self.handed_calls = [sum(map(sum, found))], math.ceil(sum(map(len, found)) / passes)
        if any(len(own) % passes for own in found):
            return
        # Each pass called a unit as often as every other one did.
        parts = [(own, len(own) // passes) for own in found]
        self.handed = [sum(sum(own[n * each : (n + 1) * each]) for own, each in parts) for n in range(passes)]

    def note(self, step: int, calls: int, needs: float | None = None) -> None:
        """Record a step.

        Args:
            step: number of the step.
            calls: its calls per forward pass, divided by those when the run was profiled.
            needs: memory that it needed over what a step with the usual calls would have; ``None`` if it is not known.
        """
        self._step = step
        self._recent.append(calls)
        self._looks -= self.is_unmeasured and self._looks > 0
        if calls > self.usual:
            if calls > max(self._more, default=0):
                self._looks = _LOOKS
            more = self._more.get(calls, _More(None, step, _STEPS))
            known = [one for one in (needs, more.needs) if one is not None]
            span = max(more.span, _GAPS * (step - more.last))
            self._more[calls] = _More(max(known, default=None), step, span)

    def measure(self, needs: float) -> None:
        """Record what steps with more calls need at most, where it is not known.

        Args:
            needs: as for :meth:`note`.
        """
        for calls, more in self._more.items():
            if more.needs is None:
                self._more[calls] = replace(more, needs=needs)

    def _sizes(self, name: str, handed: list[int], passes: int) -> float:
        """Return how many times as many bytes a unit was handed as usual.

        Usual are those of the last step with the usual calls, or of as many calls as this step's first, if these are
        more: batches differ in size.
        """
        first = handed[0] * passes * self._profiled[name] * self.usual
        return sum(handed) / max(self._usual_bytes.get(name, math.inf), first, 1)

    def _taken(self) -> dict[str, list[int]]:
        return {name: self._before_aside.get(name, []) + own for name, own in self._switcher.calls().items()}

    def _expected(self) -> list[tuple[int, _More]]:
        """Return what is known of the numbers of calls that are more than usual and expected again."""
        usual = self.usual
        return [(n, more) for n, more in self._more.items() if n > usual and self._step - more.last <= more.span]


def representatives(names: Iterable[str]) -> list[str]:
    """Return the first, the middle and the last unit of each list of modules, and every other unit.

    Args:
        names: The units in the order of their calls.
    """
    lists: dict[str, list[str]] = {}
    for name in names:
        parent, _, key = name.rpartition(".")
        lists.setdefault(f"{parent}." if key.isdigit() else name, []).append(name)
    some = ((units[0], units[len(units) // 2], units[-1]) for units in lists.values())
    return [name for units in some for name in dict.fromkeys(units)]
