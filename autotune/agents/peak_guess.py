"""Linear estimates of a plan's peak memory from measured plans, with one model for each k."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from autotune.choices import STORAGES
from autotune.plan import Plan, PlanSpace

# Ridge penalty, which limits the weight of choices that few measured plans contain.
_RIDGE = 0.1

# Coefficients for one k, and the standard deviation of the residuals.
_Line = tuple[NDArray[np.float64], float]


class PeakGuess:
    """Estimates from measured peaks whether a plan may fit a memory budget.

    A plan may fit if its estimated peak exceeds the budget by less than the standard deviation of the residuals.

    Args:
        space: the plans.
    """

    def __init__(self, space: PlanSpace) -> None:
        self._units = [unit.name for unit in space.units]
        self._recomputable = space.recomputable
        self._seen: dict[int, list[tuple[list[float], float]]] = {}
        self._lines: dict[int, _Line] = {}

    def tell(self, plan: Plan, share: float) -> None:
        """Add the measured peak of a plan, as a share of the budget."""
        k = plan.accumulation_steps
        self._seen.setdefault(k, []).append((self._row(plan), share))
        self._lines.pop(k, None)

    def may_fit(self, plan: Plan) -> bool:
        """Return whether a plan may fit; true if no plan with its k was measured."""
        k = plan.accumulation_steps
        if k not in self._seen:
            return True
        if k not in self._lines:
            self._lines[k] = self._line(k)
        coefficients, deviation = self._lines[k]
        return float(np.dot(coefficients, self._row(plan))) - deviation <= 1.0

    def _row(self, plan: Plan) -> list[float]:
        bits = [float(plan.precision_of(name).is_reduced) for name in self._units]
        stored = (plan.storage_of(name) for name in self._recomputable)
        return [1.0, *bits, *(float(own is storage) for own in stored for storage in STORAGES[1:])]

    def _line(self, k: int) -> _Line:
        rows, shares = (np.array(column) for column in zip(*self._seen[k], strict=True))
        ridge = _RIDGE * np.eye(rows.shape[1])
        ridge[0, 0] = 0.0
        coefficients = np.linalg.solve(rows.T @ rows + ridge, rows.T @ shares)
        return coefficients, math.sqrt(np.mean((rows @ coefficients - shares) ** 2))
