"""Rates of one machine's operators, measured once, from which steps of jobs that never ran there are estimated.

An operator that multiplies (a matrix product, a convolution, attention) takes its floating-point operations over a rate
that grows with its arithmetic intensity, the operations per byte that it moves: thin matrices are slow. Any other takes
its bytes over a rate that depends on how many there are: small tensors stay in caches, and large ones are allocated
anew. Both are interpolated between measured sizes.

Source: the roofline model (Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785), with measured roofs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PRODUCT, OTHER = "product", "other"
# Tensors of which the rate of an operator does not depend much on their size.
_LARGE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Work:
    """What one call of an operator does.

    Attributes:
        operator: its name, as in ``aten.mm``; of attention, ``/`` and the size of a head follow.
        operations: floating-point operations of products; 0 for an operator without any.
        moved_bytes: bytes read and written.
        dtype: format of its first floating-point tensor, as in ``float32``.
    """

    operator: str
    operations: float
    moved_bytes: float
    dtype: str

    @property
    def size(self) -> float:
        """Return what the rate depends on: operations per byte of a product, the bytes of any other operator."""
        return self.operations / max(self.moved_bytes, 1.0) if self.operations else self.moved_bytes

    @property
    def amount(self) -> float:
        """Return what the rate is a rate of: a product's operations, the bytes of any other operator."""
        return self.operations or self.moved_bytes


@dataclass(frozen=True, slots=True)
class Curve:
    """An operator's measured rates in one format.

    Attributes:
        sizes: the sizes that were measured, ascending (:attr:`Work.size`).
        rates: operations, or bytes, per second at each size.
    """

    sizes: tuple[float, ...]
    rates: tuple[float, ...]

    def rate(self, size: float) -> float:
        """Return the rate at a size, linear between the logarithms of measured ones, and constant beyond them."""
        above = bisect_left(self.sizes, size)
        if above in (0, len(self.sizes)):
            return self.rates[min(above, len(self.rates) - 1)]
        low, high = math.log(self.sizes[above - 1]), math.log(self.sizes[above])
        share = (math.log(size) - low) / (high - low)
        return math.exp((1 - share) * math.log(self.rates[above - 1]) + share * math.log(self.rates[above]))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """The measured rates of a machine.

    Attributes:
        curves: by operator, then by format.
        alike: the operator whose curve stands for others of its kind, by kind: ``PRODUCT`` for all that multiply,
            ``OTHER`` for those of no other kind.
        call_s: seconds that each call takes besides, in Python and in autograd.
        recompute_s: seconds that recomputing a unit takes besides its operators, for each call of it.
    """

    curves: Mapping[str, Mapping[str, Curve]]
    alike: Mapping[str, str]
    call_s: float
    recompute_s: float

    def seconds(self, work: Work, kind: str) -> float:
        """Return the estimated seconds of an operator.

        Args:
            work: what it does.
            kind: its kind, for an operator that was not measured.
        """
        if not work.amount:
            return self.call_s
        like = self.alike[PRODUCT] if work.operations else self.alike.get(kind, self.alike[OTHER])
        curves = self.curves[self._nearest(work.operator) or like]
        curve = curves.get(work.dtype) or next(iter(curves.values()))
        rate = curve.rate(work.size)
        if curve.sizes[-1] < min(work.size, _LARGE_BYTES) and not work.operations:
            # Small tensors show the time of a call, not the rate of large ones.
            common = self.curves[self.alike[OTHER]]
            rate = max(rate, (common.get(work.dtype) or next(iter(common.values()))).rate(work.size))
        return work.amount / rate + self.call_s

    def _nearest(self, operator: str) -> str | None:
        """Return the measured operator of a name, for attention with the nearest size of heads; ``None`` for none."""
        if operator in self.curves or "/" not in operator:
            return operator if operator in self.curves else None
        base, _, size = operator.partition("/")
        sizes = {int(one.partition("/")[2]): one for one in self.curves if one.startswith(f"{base}/")}
        return sizes[min(sizes, key=lambda own: abs(math.log(own / int(size))))] if sizes else None

    def to_json(self) -> dict[str, Any]:
        """Return the rates as a JSON object."""
        curves = {
            name: {dtype: [list(curve.sizes), list(curve.rates)] for dtype, curve in formats.items()}
            for name, formats in self.curves.items()
        }
        return {"call_s": self.call_s, "recompute_s": self.recompute_s, "alike": dict(self.alike), "curves": curves}
