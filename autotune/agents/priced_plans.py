"""Turn a few prices into a plan: the low-dimensional space that a search can use instead of every unit's choices."""

from __future__ import annotations

import math

import numpy as np

from autotune.cost_model.cost_arrays import CostArrays
from autotune.cost_model.plan_pool import make_pool
from autotune.cost_model.profile import Profile
from autotune.plan import Plan

# Range of the share of the budget that plans are predicted to need, and of the logarithm of 16-bit choices' price.
SHARES = (0.6, 1.05)
PRICES = (-0.5, 0.5)


class PricedPlans:
    """Plan from a profile at given prices.

    Args:
        profile: what the job costs.
        budget_bytes: the budget; ``None`` for none.
    """

    def __init__(self, profile: Profile, budget_bytes: int | None) -> None:
        self._arrays = CostArrays([profile])
        self._budget = math.inf if budget_bytes is None else float(budget_bytes)
        self._lanes = make_pool(self._arrays).take(np.zeros(1, dtype=np.int64))
        self._peaks = self._lanes.peak_bytes(np.ones(1))[0]

    def plan(self, accumulation_steps: int, share: float, price_16_bit: float) -> Plan:
        """Return the fastest plan of one k that is predicted to fit; the leanest of that k if none does.

        Args:
            accumulation_steps: k.
            share: of the budget that may be needed.
            price_16_bit: logarithm of a factor on the seconds of units in 16 bits.
        """
        pool, arrays = self._lanes, self._arrays
        factor = np.ones((1, arrays.max_units, arrays.max_precisions))
        factor[:, :, 1:] *= math.exp(price_16_bit)
        seconds = pool.seconds_per_step(factor, np.ones(1))[0]
        own = pool.there[0] & (arrays.accumulation_steps[0][pool.k[0]] == accumulation_steps)
        fits = own & (self._peaks <= share * self._budget)
        cost = np.where(fits, seconds, np.inf) if fits.any() else np.where(own, self._peaks, np.inf)
        best = int(cost.argmin())
        return arrays.decode(0, int(pool.k[0, best]), pool.choices[0, best])
