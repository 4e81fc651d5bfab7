"""Convergence of a training run as a function of its batch size, gradient noise scale and precision.

Progress is measured as *effort*: the number of steps that a batch without gradient noise would have needed. A step adds
:func:`autotune.cost_model.goodput.step_efficiency` to the effort. Loss and metric are functions of the effort, and the
noise scale phi is a function of the loss.

Sources: McCandlish et al. 2018 (arXiv:1812.06162), eqs. 2.7 and 2.11, for the progress per step; Kaplan et al. 2020
(arXiv:2001.08361), section 5.1, for a noise scale that is a power of the loss.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autotune.cost_model.goodput import Number, step_efficiency
from autotune.errors import ProfileError
from autotune.io.documents import STRICT, NotNegative, Positive, Quantity, validated
from autotune.plan import Plan

CONVERGENCE_VERSION = 1
# Candidate factors on the measured noise scale for a fit to runs with different batches.
_NOISE_FACTORS = tuple(float(2.0**power) for power in np.arange(-3, 3.5, 0.5))
# Number of points in the integral over the effort.
_GRID = 256


def falling(effort: Number, asymptote: Number, drop: Number, scale: Number, exponent: Number) -> Number:
    """Return asymptote + drop (1 + effort/scale)^-exponent; see :class:`Curve`."""
    fallen: Number = asymptote + drop * (1.0 + effort / scale) ** -exponent
    return fallen


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A quantity as a function of the effort: asymptote + drop (1 + effort/scale)^-exponent.

    Attributes:
        asymptote: limit of the quantity.
        drop: initial distance from the limit; negative for a quantity that grows.
        scale: effort, in steps, after which the quantity falls as a power of the effort; > 0.
        exponent: exponent of that power; > 0.
    """

    __pydantic_config__ = STRICT

    asymptote: Quantity
    drop: Quantity
    scale: Positive
    exponent: Positive

    def at(self, effort: float) -> float:
        """Return the quantity at an effort >= 0."""
        return falling(effort, self.asymptote, self.drop, self.scale, self.exponent)

    def along(self, efforts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the quantity at many efforts."""
        parts = (np.asarray(part) for part in (self.asymptote, self.drop, self.scale, self.exponent))
        return falling(efforts, *parts)

    def effort_to(self, value: float) -> float:
        """Return the effort at which a value is reached: 0 if it is reached at the start, infinity if never."""
        if self.drop == 0:
            return 0.0 if value == self.asymptote else math.inf
        share = (value - self.asymptote) / self.drop
        if share >= 1:
            return 0.0
        if share <= 0:
            return math.inf
        power = -math.log(share) / self.exponent
        return self.scale * math.expm1(power) if power < 700 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseLaw:
    """The noise scale as a power of the loss: reference (reference_loss / loss)^exponent.

    Attributes:
        reference: the noise scale at the reference loss, in samples, >= 0.
        reference_loss: the reference loss, > 0.
        exponent: power with which the noise scale grows as the loss falls; >= 0.
    """

    __pydantic_config__ = STRICT

    reference: NotNegative
    reference_loss: Positive
    exponent: NotNegative

    def at(self, loss: Number) -> Number:
        """Return the noise scale in samples at a loss > 0."""
        grown: Number = self.reference * (self.reference_loss / loss) ** self.exponent
        return grown


@dataclass(frozen=True, slots=True, kw_only=True)
class Convergence:
    """How a job converges.

    Attributes:
        loss: the training loss as a function of the effort.
        metric: the job's metric as a function of the effort.
        noise: the noise scale as a function of the loss.
        noise_factor: factor on the measured noise scale that explains runs with different batches; 1 if all runs had
            the same batch.
        squared_errors: by unit and 16-bit precision, the squared relative error of the whole gradient late in a run if
            only this unit uses that precision; additive over units.
        early_squared_errors: like ``squared_errors``, but after a few steps.
        runs: number of real runs that the model was fitted to.
        steps: optimizer steps of these runs.
        loss_error_frac: median relative error of the fitted loss.
        metric_error_frac: median relative error of the fitted metric.
    """

    __pydantic_config__ = STRICT

    loss: Curve
    metric: Curve
    noise: NoiseLaw
    noise_factor: float = 1.0
    squared_errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    early_squared_errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    runs: int = 0
    steps: int = 0
    loss_error_frac: float = 0.0
    metric_error_frac: float = 0.0

    def noise_scale(self, loss: Number) -> Number:
        """Return the effective noise scale at a loss, in samples."""
        return self.noise_factor * self.noise.at(loss)

    def squared_error(self, plan: Plan) -> float:
        """Return the squared relative error of the gradient under a plan."""
        return sum(
            self.squared_errors.get(unit, {}).get(str(precision), 0.0) for unit, precision in plan.precision.items()
        )

    def steps_to(self, metric: float, batch: float, squared_error: float = 0.0) -> float:
        """Return the number of steps to reach a value of the metric with a constant batch; infinity if never.

        Args:
            metric: value of the metric.
            batch: effective batch in samples.
            squared_error: squared relative error of the gradient, see :meth:`squared_error`.
        """
        effort = self.metric.effort_to(metric)
        if not 0 < effort < math.inf:
            return effort
        grid = np.linspace(0.0, effort, _GRID)
        worth = step_efficiency(np.asarray(batch), self.noise_scale(self.loss.along(grid)), squared_error)
        return float(np.trapezoid(1.0 / worth, grid))

    def to_json(self) -> dict[str, Any]:
        """Return the model as a JSON object of the current version."""
        return {"version": CONVERGENCE_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, where: str = "convergence") -> Convergence:
        """Read a model from a JSON object.

        Raises:
            ProfileError: if it is damaged or of another version.
        """
        return validated(cls, document, where=where, version=CONVERGENCE_VERSION, error=ProfileError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Measurements of a real run, window by window.

    Attributes:
        batch: effective batch in samples.
        steps: total steps at the end of each window.
        losses: mean training loss of each window.
        metrics: the metric after each window.
        noise_scales: estimated noise scale after each window; ``None`` while unknown.
    """

    batch: float
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    metrics: tuple[float, ...]
    noise_scales: tuple[float | None, ...]

    def efforts(self, noise: NoiseLaw, factor: float) -> NDArray[np.float64]:
        """Return the effort at the end of each window."""
        worth = step_efficiency(np.asarray(self.batch), factor * noise.at(np.array(self.losses)))
        efforts: NDArray[np.float64] = np.cumsum(np.diff(np.array(self.steps), prepend=0) * worth)
        return efforts

    def middles(self, noise: NoiseLaw, factor: float) -> NDArray[np.float64]:
        """Return the effort in the middle of each window, to which its mean loss belongs."""
        ends = self.efforts(noise, factor)
        middles: NDArray[np.float64] = (ends + np.concatenate([[0.0], ends[:-1]])) / 2
        return middles


def fit(
    runs: Sequence[RunRecord],
    squared_errors: Mapping[str, Mapping[str, float]] | None = None,
    early_squared_errors: Mapping[str, Mapping[str, float]] | None = None,
) -> Convergence:
    """Return the convergence model that fits real runs best.

    Args:
        runs: at least one run of three windows; runs with different batches show how much the noise scale matters.
        squared_errors: squared relative gradient errors of low precision late in a run; see :class:`Convergence`.
        early_squared_errors: like ``squared_errors``, but after a few steps.

    Raises:
        ValueError: if no run has three windows.
    """
    runs = [run for run in runs if len(run.steps) >= 3]
    if not runs:
        raise ValueError("a fit needs a run of at least three windows")
    noise = fit_noise(runs)
    factors = _NOISE_FACTORS if len({run.batch for run in runs}) > 1 and noise.reference > 0 else (1.0,)
    fits = [(_fit_curves(runs, noise, factor), factor) for factor in factors]
    (loss, metric, errors), factor = min(fits, key=lambda item: item[0][2][0] + item[0][2][1])
    return Convergence(
        loss=loss,
        metric=metric,
        noise=noise,
        noise_factor=factor,
        squared_errors=squared_errors or {},
        early_squared_errors=early_squared_errors or {},
        runs=len(runs),
        steps=sum(run.steps[-1] for run in runs),
        loss_error_frac=errors[0],
        metric_error_frac=errors[1],
    )


def fit_noise(runs: Sequence[RunRecord]) -> NoiseLaw:
    """Return the power law fitted to the known noise scales; a constant if no power can be fitted, 0 without data."""
    seen = [
        (loss, noise)
        for run in runs
        for loss, noise in zip(run.losses, run.noise_scales, strict=True)
        if noise is not None and noise > 0 and loss > 0
    ]
    if not seen:
        return NoiseLaw(reference=0.0, reference_loss=1.0, exponent=0.0)
    losses, scales = np.log([pair[0] for pair in seen]), np.log([pair[1] for pair in seen])
    middle = float(np.median(losses))
    exponent, level = 0.0, float(np.median(scales))
    if len(seen) >= 4 and np.ptp(losses) > 0.05:
        solution = least_squares(lambda x: x[1] - x[0] * (losses - middle) - scales, [1.0, level], loss="soft_l1")
        exponent, level = float(solution.x[0]), float(solution.x[1])
    if exponent < 0:
        exponent, level = 0.0, float(np.median(scales))
    return NoiseLaw(reference=math.exp(level), reference_loss=math.exp(middle), exponent=exponent)


def _fit_curves(runs: Sequence[RunRecord], noise: NoiseLaw, factor: float) -> tuple[Curve, Curve, tuple[float, float]]:
    middles = np.concatenate([run.middles(noise, factor) for run in runs])
    ends = np.concatenate([run.efforts(noise, factor) for run in runs])
    loss, loss_error = fit_curve(middles, np.concatenate([run.losses for run in runs]))
    metric, metric_error = fit_curve(ends, np.concatenate([run.metrics for run in runs]))
    return loss, metric, (loss_error, metric_error)


def fit_curve(efforts: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[Curve, float]:
    """Return the curve fitted to values, and its median relative error.

    Args:
        efforts: shape (n,), in steps.
        values: shape (n,); values that are not finite are ignored.
    """
    good = np.isfinite(values)
    efforts, values = efforts[good], values[good]
    order = np.argsort(efforts)
    first, last = float(np.median(values[order[:2]])), float(np.median(values[order[-2:]]))
    drop = first - last if abs(first - last) > 1e-9 else 1e-9
    size = max(abs(drop), 1e-9)

    def curve(x: NDArray[np.float64]) -> Curve:
        # The asymptote lies beyond the last value by up to three times the progress so far.
        return Curve(
            asymptote=last - x[0] * drop,
            drop=(first - last) * x[1] + x[0] * drop if first != last else drop,
            scale=math.exp(x[2]),
            exponent=math.exp(x[3]),
        )

    top = math.log(max(float(efforts.max()), 1.0))
    best = min(
        (
            least_squares(
                lambda x: (curve(x).along(efforts) - values) / size,
                [0.2, 1.2, scale, exponent],
                bounds=([0.0, 0.2, -3.0, -2.0], [3.0, 5.0, top + 3.0, 2.5]),
                loss="soft_l1",
                f_scale=0.05,
            )
            for scale in (0.0, top)
            for exponent in (-0.7, 1.0)
        ),
        key=lambda solution: solution.cost,
    )
    fitted = curve(best.x)
    predicted = fitted.along(efforts)
    errors = np.abs(predicted - values) / np.maximum(np.abs(values), 1e-9)
    return fitted, statistics.median(errors.tolist())
