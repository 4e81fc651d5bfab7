"""Cost and reward of a window: the paper's cost relative to the baseline, and a fixed cost of failures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autotune.cost_model.goodput import efficiency
from autotune.cost_model.paper_equations import Constraints, Weights, cost
from autotune.errors import InputError
from autotune.gym.observation import Observation
from autotune.measurement import Measurement

# A failed window costs more than any plan that fits, but not much more than a good plan: with a cost of 3, PPO learned
# to avoid failures before it had compared the plans that fit. Costs of expensive plans that fit are thus compressed.
FAILURE_COST = 1.5
_EXPENSIVE = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The objective, which is minimised.

    Attributes:
        weights: w1, w2, w3 of eq. 3.
        gradient_norm: the largest gradient norm allowed, before clipping; ``None`` for no limit.

    Raises:
        InputError: if the gradient norm is not a number above 0.
    """

    weights: Weights = field(default_factory=Weights)
    gradient_norm: float | None = None

    def __post_init__(self) -> None:
        if self.gradient_norm is not None and not 0 < self.gradient_norm < math.inf:
            raise InputError(f"is {self.gradient_norm!r}", where="--gradient-norm", allowed="a number above 0")

    def check(self, reference: Measurement) -> None:
        """Reject an objective that needs an unmeasured quantity.

        Args:
            reference: the window of the baseline.

        Raises:
            InputError: if energy has a weight and was not measured.
        """
        if self.weights.energy > 0 and not reference.sample_j:
            raise InputError(
                "energy has a weight but cannot be read on this machine",
                where="--weights",
                allowed="w3 = 0, or the device's power by --watts",
            )

    def cost(self, observation: Observation) -> float:
        """Return C = w1 T + w2 M + w3 E of a window, lower is better; the baseline costs w1 + w2 + w3.

        T and E are time and energy per sample, divided by the efficiency of a sample (Pollux) if batching is adaptive
        and the noise scale is known. A window that failed or violated a constraint costs w1 + w2 + w3 times the sum of
        ``FAILURE_COST`` and its excess over the budget (at most 1).
        """
        excess = overshoot(observation)
        if excess > 0 or not self.feasible(observation):
            weights = self.weights.time + self.weights.memory + self.weights.energy
            return (FAILURE_COST + min(excess, 1.0)) * weights
        ratios = _time_ratio(observation), _memory_ratio(observation), _energy_ratio(observation)
        total = cost(*ratios, self.weights)
        return total if math.isfinite(total) else math.inf

    def feasible(self, observation: Observation) -> bool:
        """Return whether a window completed, was timed, and met the constraints."""
        window = observation.window
        if window.failure is not None or window.throughput is None or not window.within_budget:
            return False
        norm = math.nan if window.gradient is None else window.gradient.norm
        limits = Constraints(memory_budget=observation.memory_budget_bytes, gradient_norm=self.gradient_norm)
        return limits.met(loss=window.loss or 0.0, memory=window.peak_bytes or 0, gradient_norm=norm)

    def reward(self, observation: Observation) -> float:
        """Return minus the cost, with the costs of expensive plans that fit compressed by :func:`drawn_together`.

        The order of plans that fit is kept, and each of them is better than any plan that does not fit.
        """
        total = self.cost(observation)
        if overshoot(observation) > 0 or not self.feasible(observation):
            return -total
        whole = sum((self.weights.time, self.weights.memory, self.weights.energy))
        return -float(drawn_together(np.asarray(total), whole))


def drawn_together(total: NDArray[np.float64], baseline: float) -> NDArray[np.float64]:
    """Return costs, with those above 1.25 times the baseline's compressed below a failure's; their order is kept."""
    expensive, worst = _EXPENSIVE * baseline, FAILURE_COST * baseline
    beyond = np.maximum(total - expensive, 0.0)
    return np.where(total <= expensive, total, worst - (worst - expensive) * np.exp(-beyond / (worst - expensive)))


def overshoot(observation: Observation) -> float:
    """Return the excess over the budget as a share of the budget: 0 within the budget, 1 if the excess is unknown."""
    window, budget = observation.window, observation.memory_budget_bytes
    if window.within_budget and (budget is None or (window.peak_bytes or 0) <= budget):
        return 0.0
    if not budget or window.peak_bytes is None or window.peak_bytes <= budget:
        return 1.0
    return window.peak_bytes / budget - 1


def _time_ratio(observation: Observation) -> float:
    window, reference = observation.window, observation.reference
    return (reference.throughput or 0.0) / (window.throughput or 1.0) / _worth(observation)


def _worth(observation: Observation) -> float:
    """Return the efficiency of a sample at the effective batch, relative to the job's own batch; 1 if unknown."""
    noise = observation.gradient.noise_scale
    if not observation.adaptive or noise is None:
        return 1.0
    batch = observation.batch_size * observation.plan.accumulation_steps
    return efficiency(batch, noise, observation.batch_size)


def _memory_ratio(observation: Observation) -> float:
    window, reference = observation.window, observation.reference
    return window.peak_bytes / reference.peak_bytes if window.peak_bytes and reference.peak_bytes else 1.0


def _energy_ratio(observation: Observation) -> float | None:
    own, other = observation.window.sample_j, observation.reference.sample_j
    return None if own is None or not other else own / other / _worth(observation)
