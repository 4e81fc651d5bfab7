"""The growth of memory with a batch's size, from traced steps of several sizes.

Each part of a step's memory (what a unit saves, what its passes need in addition, what is passed on) is assumed to grow
like a polynomial of degree two at most without negative coefficients: activations grow in proportion to a batch, and
attention weights with the square of its length. Two sizes bound such a law from above:

* between them, a part grows at most by about the exponent that leads from one to the other;
* beyond the larger one, it grows at most as if everything that was added between them grew with the square.

The steepest part counts, because under another plan every unit may keep it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autotune.plan import Plan
from autotune.profiling.attribution import Attribution

# All memory grows with the square.
_STEEPEST = (2.0, 1.0)
# Sizes must differ by this factor to show a law.
_APART = 1.5
# Added to a measured exponent.
_MARGIN = 0.1
# Smaller parts than this share of the largest are ignored: rounded allocations, states of generators.
_WORTH = 0.02


class Growth:
    """The law of growth, as far as it is known.

    Attributes:
        within: exponent that bounds the growth from one traced size to a larger one.
        beyond: share of the memory at the largest traced size that may grow with the square of the size; see
            :func:`grown`.
    """

    def __init__(self) -> None:
        self.within, self.beyond = _STEEPEST
        self._points: dict[Plan, list[tuple[int, dict[str, int]]]] = {}

    def note(self, plan: Plan, size: int, seen: Attribution) -> None:
        """Take in a traced step.

        Args:
            plan: its plan.
            size: its batch's bytes.
            seen: the memory of its segments.
        """
        points = self._points.setdefault(plan, [])
        points.append((size, _parts(seen)))
        (small, low), (large, high) = (pick(points, key=lambda point: point[0]) for pick in (min, max))
        if large > _APART * small > 0:
            self.within, self.beyond = _law(large / small, low, high)

    def told_by(self, plan: Plan, size: int) -> bool:
        """Tell whether the law is not known yet, and a step would show it.

        Args:
            plan: the plan that the step runs under.
            size: its batch's bytes.
        """
        points = self._points.get(plan, [])
        if (self.within, self.beyond) != _STEEPEST or len(points) != 1 or not size:
            return False
        known = points[0][0]
        return max(known, size) > _APART * min(known, size)


def grown(length: float, square_share: float) -> float:
    """Return the relative batch size at which a step's memory is predicted: larger if part of it grows with the square.

    Args:
        length: a batch's size over the largest traced size.
        square_share: share of the memory at that size that may grow with the square.
    """
    return length if length <= 1 else 1 + square_share * (length**2 - 1)


def _law(ratio: float, low: Mapping[str, int], high: Mapping[str, int]) -> tuple[float, float]:
    """Return the exponent between two sizes and the share beyond them, of the steepest part.

    Args:
        ratio: the larger size over the smaller one.
        low: bytes of the parts at the smaller size, by name.
        high: bytes of the parts at the larger size, by name.
    """
    least = _WORTH * max(high.values(), default=0)
    # If half of the memory grows with the square, that is more than if all of it grows in proportion.
    within, beyond = 1.0, 0.5
    for name, value in high.items():
        former = low.get(name, 0)
        if value < least or value <= former:
            continue
        if former <= 0:
            return _STEEPEST
        within = max(within, math.log(value / former) / math.log(ratio))
        # The steepest law through both: value = c + b * large**2 and former = c + b * small**2.
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
