"""Plans from a few prices: a search space of three numbers instead of two choices per unit."""

from __future__ import annotations

import math

import numpy as np

from autotune.cost_model.cost_arrays import CostArrays
from autotune.cost_model.plan_pool import make_pool
from autotune.cost_model.profile import Profile
from autotune.plan import Plan

# Ranges of the share of the budget that a plan may need, and of the logarithm of the price of 16-bit choices.
SHARES = (0.6, 1.05)
PRICES = (-0.5, 0.5)


class PricedPlans:
    """The plans of a profile at given prices.

    Args:
        profile: the profile of the job.
        budget_bytes: memory budget; ``None`` for none.
    """

    def __init__(self, profile: Profile, budget_bytes: int | None) -> None:
        self._arrays = CostArrays([profile])
        self._budget = math.inf if budget_bytes is None else float(budget_bytes)
        self._lanes = make_pool(self._arrays).take(np.zeros(1, dtype=np.int64))
        self._peaks = self._lanes.peak_bytes(np.ones(1))[0]

    def plan(self, accumulation_steps: int, share: float, price_16_bit: float) -> Plan:
        """Return the fastest plan with a given k that is predicted to fit; if none fits, the plan with the lowest peak.

        Args:
            accumulation_steps: k.
            share: share of the budget that the plan may need.
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
