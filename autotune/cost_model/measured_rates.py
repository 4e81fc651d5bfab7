"""Times of one machine's operators, measured once, from which steps of jobs that never ran there are estimated.

A roofline gives an operator's time from its floating-point operations and the bytes that it moves, with the highest
rates that were measured, and the time of the least call. How far real calls miss it is taken from the nearest ones that
were measured: thin matrices are slow, small tensors stay in caches, and large ones are allocated anew.

Source: the roofline model (Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785), with measured roofs;
weights of the nearest samples by inverse squared distance (Shepard 1968, doi:10.1145/800186.810616).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import nsmallest
from typing import Any, NamedTuple

PRODUCT, OTHER = "product", "other"
# The nearest samples that an estimate is taken from, and a squared distance that counts as none.
_NEAREST, _NEAR = 3, 1e-3


@dataclass(frozen=True, slots=True)
class Work:
    """What one call of an operator does.

    Attributes:
        operator: its name, as in ``aten.mm``; of attention, ``/`` and the size of a head follow, of a convolution ``/``
            and its kind.
        operations: floating-point operations of products; 0 for an operator without any.
        moved_bytes: bytes read and written.
        dtype: format of its first floating-point tensor, as in ``float32``.
    """

    operator: str
    operations: float
    moved_bytes: float
    dtype: str


class Sample(NamedTuple):
    """A measured call: its floating-point operations, the bytes that it moved, and its seconds."""

    operations: float
    moved_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """The measured times of a machine's operators.

    Attributes:
        samples: calls by operator, then by format.
        alike: the operator whose samples stand for others of its kind, by kind: ``PRODUCT`` for all that multiply,
            ``OTHER`` for those of no other kind.
        call_s: seconds that each call takes besides, in Python and in autograd.
        recompute_s: seconds that recomputing a unit takes besides its operators, for each call of it.
    """

    samples: Mapping[str, Mapping[str, tuple[Sample, ...]]]
    alike: Mapping[str, str]
    call_s: float
    recompute_s: float

    def seconds(self, work: Work, kind: str) -> float:
        """Return the estimated seconds of an operator.

        Args:
            work: what it does.
            kind: its kind, for an operator that was not measured.
        """
        if not work.operations and not work.moved_bytes:
            return self.call_s
        like = self.alike[PRODUCT] if work.operations else self.alike.get(kind, self.alike[OTHER])
        formats = self.samples[self._nearest_operator(work.operator) or like]
        known = formats.get(work.dtype) or next(iter(formats.values()))
        peak = max(one.operations / one.seconds for one in known)

        def roof_s(operations: float, moved_bytes: float) -> float:
            computing = operations / peak if peak else 0.0
            return self._least_s + computing + moved_bytes / self.bandwidth

        def distance(one: Sample) -> float:
            return _distance(one.operations, work.operations) + _distance(one.moved_bytes, work.moved_bytes)

        nearest = nsmallest(_NEAREST, ((distance(one), one) for one in known))
        weights = [1 / (far + _NEAR) for far, _ in nearest]
        missed = [math.log(one.seconds / roof_s(one.operations, one.moved_bytes)) for _, one in nearest]
        mean = sum(map(float.__mul__, weights, missed)) / sum(weights)
        return roof_s(work.operations, work.moved_bytes) * math.exp(mean) + self.call_s

    @cached_property
    def bandwidth(self) -> float:
        """Return the highest rate of an operator that multiplies nothing, in bytes read and written per second."""
        return max(one.moved_bytes / one.seconds for one in _all(self.samples[self.alike[OTHER]]))

    def highest_rate(self, dtype: str) -> float:
        """Return the highest rate of a product in a format, in floating-point operations per second."""
        return max(one.operations / one.seconds for one in self.samples[self.alike[PRODUCT]][dtype])

    @cached_property
    def _least_s(self) -> float:
        """Return the seconds of the least calls, without single ones that the clock missed."""
        seconds = sorted(one.seconds for formats in self.samples.values() for one in _all(formats))
        return seconds[len(seconds) // 20]

    def _nearest_operator(self, operator: str) -> str | None:
        """Return the measured operator of a name, for attention with the nearest size of heads; ``None`` for none."""
        base, _, variant = operator.partition("/")
        if operator in self.samples or not variant:
            return operator if operator in self.samples else None
        others = [one for one in self.samples if one.startswith(f"{base}/")]
        if not others or not variant.isdigit():
            return others[0] if others else None
        return min(others, key=lambda one: abs(math.log(int(one.partition("/")[2]) / int(variant))))

    def to_json(self) -> dict[str, Any]:
        """Return the times as a JSON object."""
        samples = {
            name: {dtype: [list(one) for one in known] for dtype, known in formats.items()}
            for name, formats in self.samples.items()
        }
        return {"call_s": self.call_s, "recompute_s": self.recompute_s, "alike": dict(self.alike), "samples": samples}


def _all(formats: Mapping[str, Iterable[Sample]]) -> Iterable[Sample]:
    return (one for known in formats.values() for one in known)


def _distance(one: float, two: float) -> float:
    """Return the squared distance of two amounts; those below 1 count as 1."""
    return math.log(max(one, 1.0) / max(two, 1.0)) ** 2
