"""Tell from traced steps of several batch sizes how memory grows with a batch's size.

Each part of a step's memory (what a unit saves, what its passes need beside that, what is passed on) is taken to grow
like a polynomial of degree two at most with no negative coefficient: activations grow in proportion to a batch, and
attention's weights with the square of its length. Two sizes bound such a law from above:

* between them, a part grows at most by about the exponent that leads from one to the other;
* beyond the larger one, at most as if all that was added there were its square.

The steepest part counts: under another plan it may be kept by every unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autotune.plan import Plan
from autotune.profiling.attribution import Attribution

# With the square, and all of it.
_STEEPEST = (2.0, 1.0)
# Sizes must differ by this factor for a law to be told from them.
_APART = 1.5
# What is added to a law between sizes that was measured.
_MARGIN = 0.1
# A part below this share of all of them tells no law: rounded allocations, generators' states.
_WORTH = 0.02


class Growth:
    """What is known of the law.

    Attributes:
        within: exponent that bounds the growth from one traced size to a larger one.
        beyond: share of what the largest traced size needs that may grow with its square, as :func:`grown` takes it.
    """

    def __init__(self) -> None:
        self.within, self.beyond = _STEEPEST
        self._points: dict[Plan, list[tuple[int, dict[str, int]]]] = {}

    def note(self, plan: Plan, size: int, seen: Attribution) -> None:
        """Take in a traced step.

        Args:
            plan: its plan.
            size: its batch's bytes.
            seen: who kept what.
        """
        points = self._points.setdefault(plan, [])
        points.append((size, _parts(seen)))
        (small, low), (large, high) = (pick(points, key=lambda point: point[0]) for pick in (min, max))
        if large > _APART * small > 0:
            self.within, self.beyond = _law(large / small, low, high)

    def told_by(self, plan: Plan, size: int) -> bool:
        """Tell whether a step under a plan would show the law, which is not known yet."""
        points = self._points.get(plan, [])
        if (self.within, self.beyond) != _STEEPEST or len(points) != 1 or not size:
            return False
        known = points[0][0]
        return max(known, size) > _APART * min(known, size)


def grown(length: float, square_share: float) -> float:
    """Return the length that a step's memory is predicted at.

    Args:
        length: a batch's size over the largest traced one's.
        square_share: share of what that one needs that may grow with the square.
    """
    return length if length <= 1 else 1 + square_share * (length**2 - 1)


def _law(ratio: float, low: Mapping[str, int], high: Mapping[str, int]) -> tuple[float, float]:
    """Return the exponent within two sizes whose ratio is given and the share beyond, of the steepest part."""
    least = _WORTH * max(high.values(), default=0)
    # Half of it growing with the square is more than all of it growing in proportion.
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
    """Return the bytes of a step's parts that hang on the batch, and their sum, by name."""
    parts: dict[str, int] = {f"boundary {key}": boundary.size for key, boundary in seen.boundaries.items()}
    for number, saved in enumerate(seen.saved):
        parts[f"saved {number}"] = saved
    for name, peaks in (("forward", seen.forward_peaks), ("backward", seen.backward_peaks)):
        for number, (first, _) in enumerate(peaks):
            parts[f"{name} {number}"] = first
    kept = sum(seen.saved) + sum(boundary.size for boundary in seen.boundaries.values())
    parts["all"] = kept + max((first for first, _ in seen.backward_peaks), default=0)
    return parts
