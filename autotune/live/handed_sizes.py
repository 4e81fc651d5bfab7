"""What units are handed in a step, and what a batch tells of that before the step runs."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from autotune.live.attached import Step
from autotune.profiling.memory_scaling import Scaling

# Recent steps of which is known what units were handed, and as many of them that tell what a batch's size may mean.
_RECENT, _ALIKE = 256, 32
# Two steps contradict each other if units are handed more by the batch that is not larger. Batches do not tell what
# units are handed once there are as many such pairs as this share of recent steps, until there are fewer than the
# second one.
_BEGINS, _CEASES = 0.05, 0.025
# Batches of this share of a size are about as large.
_ABOUT = 0.8
# A step is unlike another one of its size if it is handed more by this factor.
DENSER = 1.02


class _Handed(NamedTuple):
    """What units were handed in a step.

    Attributes:
        calls: calls of the counted units per forward pass.
        size: bytes of the step's batches, or of the largest one where the loop accumulates several.
        handed: bytes that the units were handed.
    """

    calls: int
    size: int
    handed: int


class HandedSizes:
    """What units were handed in recent steps.

    Most often a batch's size tells it. It does not where a model is called with two texts of independent lengths, of
    which only the first is seen before the step: then ``varies`` is set, and steps count by what units were handed.

    Attributes:
        varies: Whether batches do not tell what units are handed.

    Args:
        scaling: Returns how memory grows with a batch's size, as far as it is known.
    """

    def __init__(self, scaling: Callable[[], Scaling]) -> None:
        self.varies = False
        self._scaling = scaling
        self._recent: deque[_Handed] = deque()
        # How many recent steps there are of each kind that no other step contradicts.
        self._agreeing: Counter[_Handed] = Counter()
        # For each size of a batch, what units may be handed in the next step.
        self._ahead: dict[int, float] = {}
        self.forget()

    def forget(self) -> None:
        """Discard what traced steps were handed."""
        # The size of the largest traced step, as the profile counts it, and the bytes that units were handed in it; and
        # the most of these per byte of a batch.
        self._traced: tuple[float, int] | None = None
        self._per_byte = 0.0
        # For each recent step with the usual calls, what units were handed divided by what its batch explains; and the
        # largest of both kinds of excess when a step was last traced for it.
        self._denser: deque[float] = deque([1.0], maxlen=_RECENT)
        self._looked_at = 1.0

    def begin_again(self) -> None:
        """Discard what is known, because other units count from now on; but not that batches tell nothing."""
        self.forget()
        if not self.varies:
            self._recent.clear()
            self._agreeing.clear()
            self._ahead.clear()

    def note(self, step: Step) -> bool:
        """Record a step; return whether steps have begun to show that batches do not tell it, or have ceased to."""
        if not step.handed_bytes:
            return False
        self._ahead.clear()
        self._add(_Handed(step.handed_calls, size_of(step), step.handed_bytes))
        found = (len(self._recent) - self._agreeing.total()) // 2
        limit = (_CEASES if self.varies else _BEGINS) * len(self._recent)
        former, self.varies = self.varies, found >= max(limit, 1)
        return former != self.varies

    def _add(self, new: _Handed) -> None:
        """Remember what units were handed in a step.

        A step contradicts one other at most, so that a single odd one is no reason to distrust all others.
        """
        if len(self._recent) == _RECENT:
            # Of steps of one kind, those that nothing contradicts are dropped last.
            old = self._recent.popleft()
            if self._agreeing[old] > self._recent.count(old):
                self._drop(old)
        self._recent.append(new)
        # No step that agrees with all others contradicts another such one.
        odd = None if new in self._agreeing else _contradicted(self._agreeing, new)
        if odd is None:
            self._agreeing[new] += 1
        else:
            self._drop(odd)

    def _drop(self, one: _Handed) -> None:
        self._agreeing[one] -= 1
        if not self._agreeing[one]:
            del self._agreeing[one]

    def note_trace(self, step: Step) -> None:
        """Record what units were handed in a traced step, whose memory is known from now on."""
        if not step.handed_bytes:
            return
        self._per_byte = max(self._per_byte, step.handed_bytes / size_of(step))
        counted = size_of(step) * (self.ratio(step) or 1.0)
        if self._traced is None or counted > self._traced[0]:
            self._traced = counted, step.handed_bytes

    def counted(self, step: Step, sizes: tuple[int, int]) -> tuple[int, int]:
        """Return the sizes by which memory grows as it does with batches that tell what units are handed.

        Args:
            step: The step.
            sizes: Bytes of its first batch, and of the largest later one; of the first one if there is no other.
        """
        if not self.varies or not step.handed_bytes:
            share = self._share(step)
            return round(sizes[0] * share), round(sizes[1] * share)
        traced, handed = self._traced or (size_of(step), step.handed_bytes)
        first, *later = step.handed
        return round(traced * first / handed), round(traced * max(later, default=first) / handed)

    def note_usual(self, step: Step) -> None:
        """Record a step with the usual calls."""
        self._denser.append(max(self.denser(step), 1.0))

    def denser(self, step: Step) -> float:
        """Return what units were handed in a step, divided by what its batches explain; 1 if that is not known."""
        if self._traced is None or not step.handed_bytes:
            return 1.0
        size, handed = self._traced
        # Loops that cut their batches to a length hand units the same in short and in long ones.
        explained = max(handed * self._scaling().at(size_of(step) / size), self._per_byte * size_of(step))
        return step.handed_bytes / explained

    def ratio(self, step: Step) -> float | None:
        """Return what units were handed in a step, divided by what its batches explain; ``None`` if batches tell it."""
        if not self.varies or self._traced is None or not step.handed_bytes:
            return None
        return step.handed_bytes / self._explained(size_of(step))

    def _share(self, step: Step) -> float:
        """Return which share of a step's batches units worked on; less than 1 if the loop itself makes them smaller."""
        if self._traced is None or not step.handed_bytes:
            return 1.0
        size, handed = self._traced
        if step.handed_bytes * DENSER > handed * self._scaling().at_least(size_of(step) / size):
            return 1.0
        return min(step.handed_bytes / self._explained(size_of(step)), 1.0)

    def ahead(self, size: int) -> float:
        """Return what units may be handed in the next step, divided by what its batch explains.

        Where batches do not tell it, it is the most that was handed per byte of a batch. Once enough steps are known,
        units are taken to be handed a part in proportion to the batch and another one that is independent of it, at
        most as large as in any recent step; and once enough batches were as large, not more than with these.

        Args:
            size: Bytes of the step's batches, or of the largest one where the loop accumulates several.
        """
        if not self.varies or self._traced is None:
            found = max(self._denser)
            return found if found > DENSER else 1.0
        if size not in self._ahead:
            self._ahead[size] = _most(self._usual(), max(size, 1))
        return self._ahead[size] / self._explained(size)

    @property
    def is_news(self) -> bool:
        """Whether a recent step was handed more than any for which one was traced."""
        return self._beyond > DENSER * self._looked_at

    def look(self) -> None:
        """Note that the next step is traced."""
        self._looked_at = self._beyond

    @property
    def _beyond(self) -> float:
        """The most that units were handed in a recent step, divided by what a traced one explains; at least 1."""
        if not self.varies or self._traced is None:
            return max(self._denser)
        return max(1.0, max(handed for _, handed in self._usual()) / self._traced[1])

    def _explained(self, size: int) -> float:
        """Return the bytes that units are handed of a batch, in proportion to those of the traced one."""
        assert self._traced is not None
        traced, handed = self._traced
        return handed * max(size, 1) / traced

    def _usual(self) -> list[tuple[int, int]]:
        """Return the sizes, and the bytes that units were handed, of recent steps without more calls than usual."""
        most = statistics.mode(one.calls for one in self._recent)
        return [(one.size, one.handed) for one in self._recent if one.calls <= most]


def _contradicted(known: Iterable[_Handed], new: _Handed) -> _Handed | None:
    """Return what contradicts a step: in as many calls, one was handed more by a batch that is not larger."""
    calls, size, handed = new
    more, less = DENSER * handed, handed / DENSER
    for one in known:
        if one[0] == calls and ((one[1] <= size and one[2] > more) or (one[1] >= size and one[2] < less)):
            return one
    return None


def size_of(step: Step) -> int:
    """Return the bytes of a step's batches, or of the largest one where the loop accumulates several; at least 1."""
    return max(step.batch_bytes if step.later_bytes else step.all_bytes, 1)


def _most(usual: Sequence[tuple[int, int]], size: int) -> float:
    """Return the most bytes that units may be handed in a step, as :meth:`HandedSizes.ahead` explains.

    Args:
        usual: the sizes of recent steps, and the bytes that units were handed in them.
        size: the size of the step.
    """
    rates = [handed / one for one, handed in usual]
    bound = max(rates) * size
    if len(usual) >= _ALIKE:
        beside = max(handed + min(rates) * max(size - one, 0) for one, handed in usual)
        near = max((handed * size / one for one, handed in usual if _ABOUT * size <= one <= size), default=0.0)
        bound = min(bound, max(beside, near))
    alike = [handed for one, handed in usual if one >= size]
    return min(bound, max(alike)) if len(alike) >= _ALIKE else bound
