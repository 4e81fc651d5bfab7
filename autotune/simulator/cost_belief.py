"""A belief about what units really cost, learnt from the seconds of whole steps, and what a measurement would teach.

Profiles err, machines change their speed, and measurements are noisy; how much of each, nobody knows beforehand. So the
belief weighs three explanations by how well they predicted the measurements so far: costs differ and drift much, they
do so little, or the profile is right and all differences are noise.

Source: Kalman filters of unknown scale and their mixtures are in M. West and J. Harrison, *Bayesian Forecasting and
Dynamic Models*, chapters 2.5 and 12. What a measurement is worth is the knowledge gradient of P. Frazier, W. Powell and
S. Dayanik, "The knowledge-gradient policy for correlated normal beliefs" (2009).
"""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr

from autotune.cost_model.cost_arrays import Floats
from autotune.simulator.planner_settings import PlannerSettings
from autotune.simulator.simulated_job import Flags

# Explanations of measured times: factors on the assumed variance of costs, for the same variance of noise.
_EXPLANATIONS = (2.0, 0.25, 0.0)
# Weight of what earlier measurements said about explanations, for each later one: causes change.
_KEPT = 0.99
# Variance of a prediction's relative error that counts as none, and the largest error in standard deviations: beyond
# it, something else happened to the machine, which is not to be mistaken for a cost.
_EXACT, _OUTLIER = 1e-8, 5.0
# Sum of squared errors before the first measurement, in the unit of their variance: the profile is trusted.
_NO_ERROR = 1e-6
# Standard deviations beyond which no measurement makes a plan the best.
_HOPELESS = 30.0


class CostFilter:
    """Estimates of each unit's cost in each precision, relative to its profile, under one explanation.

    The seconds of a step are linear in these factors, so that a Kalman filter is exact. Factors are normal, those of
    one precision are correlated, and old measurements are forgotten at a constant rate.

    Args:
        lanes: number of lanes.
        units: units per lane.
        precisions: precisions per unit.
        settings: the assumed errors of profiles and measurements.
        variance: factor on the assumed variance of costs and of their drift.

    Attributes:
        mean: shape (lanes, units, precisions), expected factors.
        covariance: shape (lanes, units x precisions, units x precisions), for errors of the assumed size.
        noise: variance of a measurement, as a share of its square.
    """

    def __init__(
        self, lanes: int, units: int, precisions: int, settings: PlannerSettings, variance: float = 1.0
    ) -> None:
        self.mean = np.ones((lanes, units, precisions))
        same = np.kron(np.ones((units, units)), np.eye(precisions))
        own = np.eye(units * precisions)
        prior = settings.common_share * same + (1 - settings.common_share) * own
        self.covariance = np.tile(variance * settings.cost_error**2 * prior, (lanes, 1, 1))
        self.noise = settings.time_noise**2
        self._forgotten = variance * settings.drift**2 * same
        self._measured = np.ones(lanes)
        self._squares = np.full(lanes, _NO_ERROR)
        self._log_variances = np.zeros(lanes)

    @property
    def scale(self) -> Floats:
        """Return the variance of errors over the assumed one, as measurements show it; shape (lanes,)."""
        return np.asarray(self._squares / self._measured)

    @property
    def log_evidence(self) -> Floats:
        """Return the logarithm of the likelihood of all measurements, but for a constant; shape (lanes,)."""
        return np.asarray(-0.5 * (self._log_variances + self._measured * np.log(self._squares)))

    def deviation(self) -> Floats:
        """Return the standard deviation of each factor for errors of the assumed size, shaped as ``mean``."""
        variance = np.einsum("nii->ni", self.covariance).reshape(self.mean.shape)
        return np.asarray(np.sqrt(np.maximum(variance, 0.0)))

    def learn(self, weights: Floats, constant: Floats, measured: Floats, valid: Flags) -> None:
        """Update the estimates with one step of each lane.

        Args:
            weights: shape (lanes, units x precisions), profiled seconds of each unit in its precision.
            constant: shape (lanes,), seconds of a step to which no factor applies.
            measured: shape (lanes,), measured seconds of the step.
            valid: shape (lanes,), whether the measurement counts.
        """
        self.covariance += self._forgotten
        expected = constant + (weights * self.mean.reshape(len(weights), -1)).sum(axis=1)
        spread = np.matmul(self.covariance, weights[:, :, None])[:, :, 0]
        square = np.maximum(np.square(expected), 1e-30)
        variance = (weights * spread).sum(axis=1) + self.noise * square
        gain = spread / np.where(variance > 0, variance, 1.0)[:, None] * valid[:, None]
        deviation = np.sqrt(np.maximum(variance, _EXACT * square))
        error = np.clip(measured - expected, -_OUTLIER * deviation, _OUTLIER * deviation)
        self.mean = np.clip(self.mean + (gain * error[:, None]).reshape(self.mean.shape), 0.1, 10.0)
        self.covariance -= gain[:, :, None] * spread[:, None, :]
        kept = np.where(valid, _KEPT, 1.0)
        self._measured = kept * self._measured + valid
        self._squares = kept * self._squares + np.square(error / deviation) * valid
        self._log_variances = kept * self._log_variances + np.log(np.square(deviation) / square) * valid


class CostBelief:
    """Filters under several explanations, weighed by their evidence.

    Args:
        lanes: number of lanes.
        units: units per lane.
        precisions: precisions per unit.
        settings: the assumed errors; without any error of costs, the profile is right.

    Attributes:
        mean: shape (lanes, units, precisions), expected factors on profiled costs.
        weights: shape (explanations, lanes), probability of each explanation.
    """

    def __init__(self, lanes: int, units: int, precisions: int, settings: PlannerSettings) -> None:
        explanations = _EXPLANATIONS if settings.costs == "weighed" else (1.0,)
        self.mean = np.ones((lanes, units, precisions))
        self._filters = [CostFilter(lanes, units, precisions, settings, variance) for variance in explanations]
        self._off = settings.cost_error == 0
        self.weights = np.full((len(explanations), lanes), 1 / len(explanations))

    def learn(self, weights: Floats, constant: Floats, measured: Floats, valid: Flags) -> None:
        """Update the estimates with one step of each lane; arguments are those of :meth:`CostFilter.learn`."""
        if self._off:
            return
        for one in self._filters:
            one.learn(weights, constant, measured, valid)
        evidence = np.stack([one.log_evidence for one in self._filters])
        likely = np.exp(evidence - evidence.max(axis=0))
        self.weights = likely / likely.sum(axis=0)
        means = np.stack([one.mean for one in self._filters])
        self.mean = np.einsum("hn,hnup->nup", self.weights, means)

    def deviation(self) -> Floats:
        """Return the standard deviation of each factor, shape (lanes, units, precisions)."""
        if len(self._filters) == 1:
            return self._filters[0].deviation()
        squares = [
            one.scale[:, None, None] * np.square(one.deviation()) + np.square(one.mean - self.mean)
            for one in self._filters
        ]
        return np.asarray(np.sqrt(np.einsum("hn,hnup->nup", self.weights, np.stack(squares))))

    def moved(self, plans: Floats, other: Floats, seconds: Floats) -> Floats:
        """Return by how much one measurement of each plan is expected to change its time against another plan's.

        It is a standard deviation, shape (lanes, plans).

        Args:
            plans: shape (lanes, plans, units x precisions), profiled seconds of each unit in its precision.
            other: shape (lanes, units x precisions), those of the other plan.
            seconds: shape (lanes, plans), expected seconds of each plan.
        """
        shares = self.weights * np.stack([one.scale for one in self._filters])
        # One product and sum after another: a stack would copy all covariances.
        covariance = shares[0][:, None, None] * self._filters[0].covariance
        for share, one in zip(shares[1:], self._filters[1:], strict=True):
            covariance += share[:, None, None] * one.covariance
        noise = shares.sum(axis=0) * self._filters[0].noise
        spread = np.matmul(plans, covariance)
        variance = (spread * plans).sum(axis=2) + noise[:, None] * np.square(seconds)
        common = (spread * (plans - other[:, None])).sum(axis=2)
        return np.asarray(np.abs(common) / np.sqrt(np.maximum(variance, 1e-30)))


def expected_gain(slower: Floats, moved: Floats) -> Floats:
    """Return how much time a measurement is expected to save in each later window.

    Args:
        slower: the plan's expected time beyond that of the best plan; infinite for a plan that cannot be used.
        moved: standard deviation of the change of this difference by the measurement, in the same unit.
    """
    useful = slower < _HOPELESS * moved
    moved = np.where(useful, moved, 1.0)
    place = np.where(useful, slower, 0.0) / moved
    density = np.exp(-0.5 * np.square(place)) / np.sqrt(2 * np.pi)
    return np.where(useful, moved * np.maximum(density - place * ndtr(-place), 0.0), 0.0)
