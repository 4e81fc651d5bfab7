"""Growth of memory with a batch's size, from traced steps of several sizes.

Each part of a step's memory (what a unit saves, what its passes need in addition, what is passed on) is assumed to grow
as a polynomial of at most degree two with no negative coefficients: activations grow linearly with a batch, attention
weights with the square of its length. Two sizes give upper bounds:

* from the smaller to the larger one, a part grows at most with about the exponent that leads from one to the other;
* beyond the larger one, it grows at most as if all growth between them were quadratic;
* between both, it lies on the line through them, or below that, and at smaller sizes on the parabola through them that
  is level at size 0: what does not depend on the batch, such as latents of a fixed number, does not shrink with it.

The part for which a bound is highest counts, because under another plan every unit may keep it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from autotune.plan import Plan
from autotune.profiling.attribution import Attribution

# Exponent where all memory grows quadratically.
_STEEPEST = 2.0
# Smallest ratio of two sizes from which growth is measured, and from which it is measured what does not shrink.
_APART, _SMALLER = 1.5, 1.1
# Added to a measured exponent.
_MARGIN = 0.1
# Parts smaller than this share of the largest are ignored, for example rounded allocations and generator states; those
# that do not shrink are ignored below the second.
_WORTH, _WORTH_KEPT = 0.02, 0.1

Parts = dict[str, int]


@dataclass(frozen=True, slots=True)
class Scaling:
    """Bounds of memory at other sizes of a batch than the largest traced one.

    Attributes:
        square_share: share of the memory at that size that may grow quadratically beyond it.
        smallest: the smallest traced size, divided by the largest.
        memory: memory at the smallest traced size, divided by that at the largest.
    """

    square_share: float = 1.0
    smallest: float = 1.0
    memory: float = 1.0

    def at(self, length: float) -> float:
        """Return the relative size at which memory in proportion to it would be as large as the bound.

        Args:
            length: a batch's size divided by the largest traced size.
        """
        if length > 1:
            return 1 + self.square_share * (length**2 - 1)
        # Between both sizes it is at most on the line through them. Below them, a constant and a quadratic part are
        # the most that there can be.
        degree = 1 if length >= self.smallest else 2
        return self._kept(degree) + (1 - self._kept(degree)) * length**degree

    def at_least(self, length: float) -> float:
        """Return a lower bound of memory, relative to that at the largest traced size.

        Args:
            length: a batch's size divided by the largest traced size.
        """
        return length**2 if length < 1 else self.kept_share + (1 - self.kept_share) * length

    @property
    def kept_share(self) -> float:
        """Return the share of the memory that the smallest batches may need as well."""
        return self._kept(2)

    def _kept(self, degree: int) -> float:
        if self.smallest >= 1:
            return 1.0
        ratio = self.smallest**degree
        return min(max((self.memory - ratio) / (1 - ratio), 0.0), 1.0)


class Growth:
    """Upper bounds on the growth of memory; quadratic, and without shrinking, while they are not known.

    Attributes:
        within: exponent that bounds the growth from one traced size to a larger one.
        scaling: bounds below and beyond the largest traced size.
    """

    def __init__(self) -> None:
        self.within, self.scaling = _STEEPEST, Scaling()
        self._points: dict[tuple[Plan, Hashable], list[tuple[int, Parts]]] = {}

    def note(self, plan: Plan, size: int, seen: Attribution, kind: Hashable = None) -> None:
        """Add a traced step.

        Args:
            plan: the step's plan.
            size: bytes of its batch.
            seen: memory of its segments.
            kind: the kind of the step, if steps of several kinds take turns. The kind that grows most counts.
        """
        self._points.setdefault((plan, kind), []).append((size, _parts(seen)))
        laws = []
        for points in (points for (own, _), points in self._points.items() if own == plan):
            (small, low), (large, high) = (pick(points, key=lambda point: point[0]) for pick in (min, max))
            laws += [_law(large / small, low, high)] if large > _APART * small > 0 else []
        square_share = max((share for _, share in laws), default=self.scaling.square_share)
        self.within = max((within for within, _ in laws), default=self.within)
        shrunk = filter(None, map(_shrunk, self._points.values()))
        smallest, memory = min(shrunk, key=lambda pair: (pair[0], -pair[1]), default=(1.0, 1.0))
        self.scaling = Scaling(square_share, smallest, memory)

    def told_by(self, plan: Plan, size: int) -> bool:
        """Return whether the growth is still unknown and a step would show it.

        Args:
            plan: the step's plan.
            size: bytes of its batch.
        """
        sizes = [known for (own, _), points in self._points.items() if own == plan for known, _ in points]
        if not sizes or not size:
            return False
        spread, other = (max(found) / max(min(found), 1) for found in (sizes, [*sizes, size]))
        if (self.within, self.scaling.square_share) == (_STEEPEST, 1.0) and other > _APART >= spread:
            return True
        smaller = self.scaling.smallest * max(sizes) / size
        return smaller > _APART or (smaller > _SMALLER and self.scaling.smallest == 1)


def _law(ratio: float, low: Mapping[str, int], high: Mapping[str, int]) -> tuple[float, float]:
    """Return the exponent between two sizes and the quadratic share beyond them, each of the steepest part.

    Args:
        ratio: the larger size divided by the smaller one.
        low: bytes of the parts at the smaller size, by name.
        high: bytes of the parts at the larger size, by name.
    """
    least = _WORTH * max(high.values(), default=0)
    # Half of the memory growing quadratically exceeds all of it growing linearly.
    within, beyond = 1.0, 0.5
    for name, value in high.items():
        former = low.get(name, 0)
        if value < least or value <= former:
            continue
        if former <= 0:
            return _STEEPEST, 1.0
        within = max(within, math.log(value / former) / math.log(ratio))
        # The steepest curve through both: value = c + b * large**2 and former = c + b * small**2.
        beyond = max(beyond, (1 - former / value) / (1 - ratio**-2))
    return min(within + _MARGIN, _STEEPEST), min(beyond, 1.0)


def _shrunk(points: list[tuple[int, Parts]]) -> tuple[float, float] | None:
    """Return the smallest size and its memory, of the part that shrank least; ``None`` if the sizes are similar.

    Both are relative to the largest size.
    """
    (small, low), (large, high) = (pick(points, key=lambda point: point[0]) for pick in (min, max))
    if large <= _SMALLER * small or not small:
        return None
    least = _WORTH_KEPT * max(high.values(), default=0)
    return small / large, max((low.get(name, 0) / value for name, value in high.items() if value > least), default=1.0)


def _parts(seen: Attribution) -> Parts:
    """Return the bytes of the parts of a step that depend on its batch, and their sum, by name."""
    parts = {f"boundary {key}": boundary.size for key, boundary in seen.boundaries.items()}
    for number, saved in enumerate(seen.saved):
        parts[f"saved {number}"] = saved
    for name, peaks in (("forward", seen.forward_peaks), ("backward", seen.backward_peaks)):
        for number, (first, _) in enumerate(peaks):
            parts[f"{name} {number}"] = first
    kept = sum(seen.saved) + sum(boundary.size for boundary in seen.boundaries.values())
    parts["all"] = kept + max((first for first, _ in seen.backward_peaks), default=0)
    return parts
