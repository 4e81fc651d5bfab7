"""Growth of memory with a batch's size, from traced steps of several sizes.

Each part of a step's memory (what a unit saves, what its passes need in addition, what is passed on) is assumed to grow
as a polynomial of at most degree two with no negative coefficients: activations grow linearly with a batch, attention
weights with the square of its length. Two sizes give upper bounds:

* between them, a part grows at most with about the exponent that leads from one to the other;
* beyond the larger one, it grows at most as if all growth between them were quadratic.

The steepest part counts, because under another plan every unit may keep it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autotune.plan import Plan
from autotune.profiling.attribution import Attribution

# Exponent and share where all memory grows quadratically.
_STEEPEST = (2.0, 1.0)
# Smallest ratio of two sizes from which growth is measured.
_APART = 1.5
# Added to a measured exponent.
_MARGIN = 0.1
# Parts smaller than this share of the largest are ignored, for example rounded allocations and generator states.
_WORTH = 0.02


class Growth:
    """Upper bounds on the growth of memory; quadratic while they are not known.

    Attributes:
        within: exponent that bounds the growth from one traced size to a larger one.
        beyond: share of the memory at the largest traced size that may grow quadratically; see :func:`grown`.
    """

    def __init__(self) -> None:
        self.within, self.beyond = _STEEPEST
        self._points: dict[Plan, list[tuple[int, dict[str, int]]]] = {}

    def note(self, plan: Plan, size: int, seen: Attribution) -> None:
        """Add a traced step.

        Args:
            plan: the step's plan.
            size: bytes of its batch.
            seen: memory of its segments.
        """
        points = self._points.setdefault(plan, [])
        points.append((size, _parts(seen)))
        (small, low), (large, high) = (pick(points, key=lambda point: point[0]) for pick in (min, max))
        if large > _APART * small > 0:
            self.within, self.beyond = _law(large / small, low, high)

    def told_by(self, plan: Plan, size: int) -> bool:
        """Return whether the growth is still unknown and a step would show it.

        Args:
            plan: the step's plan.
            size: bytes of its batch.
        """
        points = self._points.get(plan, [])
        if (self.within, self.beyond) != _STEEPEST or len(points) != 1 or not size:
            return False
        known = points[0][0]
        return max(known, size) > _APART * min(known, size)


def grown(length: float, square_share: float) -> float:
    """Return the relative batch size at which to predict memory: larger than the actual one for a quadratic share.

    Args:
        length: a batch's size divided by the largest traced size.
        square_share: share of the memory at the largest traced size that may grow quadratically.
    """
    return length if length <= 1 else 1 + square_share * (length**2 - 1)


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
            return _STEEPEST
        within = max(within, math.log(value / former) / math.log(ratio))
        # The steepest curve through both: value = c + b * large**2 and former = c + b * small**2.
        beyond = max(beyond, (1 - former / value) / (1 - ratio**-2))
    return min(within + _MARGIN, _STEEPEST[0]), min(beyond, _STEEPEST[1])


def _parts(seen: Attribution) -> dict[str, int]:
    """Return the bytes of the parts of a step that depend on its batch, and their sum, by name."""
    parts: dict[str, int] = {f"boundary {key}": boundary.size for key, boundary in seen.boundaries.items()}
    for number, saved in enumerate(seen.saved):
        parts[f"saved {number}"] = saved
    for name, peaks in (("forward", seen.forward_peaks), ("backward", seen.backward_peaks)):
        for number, (first, _) in enumerate(peaks):
            parts[f"{name} {number}"] = first
    kept = sum(seen.saved) + sum(boundary.size for boundary in seen.boundaries.values())
    parts["all"] = kept + max((first for first, _ in seen.backward_peaks), default=0)
    return parts
