"""Fit the strengths of changing conditions to recorded windows of real runs.

Curricula, announced events and the loss of a window that runs out of memory are not fitted, because no recorded run
contains them. A mechanism that a run does not show, such as changing lengths in a job with constant lengths, is left
out.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.cost_model.memory_model import choices
from autotune.cost_model.profile import Profile
from autotune.cost_model.time_model import seconds_per_step
from autotune.plan import Plan
from autotune.simulator.moving_conditions import Strengths

Floats = NDArray[np.float64]
Row = Mapping[str, Any]
# With fewer values, a deviation cannot be distinguished from noise.
_FEWEST = 6
# Smaller differences between logarithms of lengths are rounding errors.
_ALIKE = 1e-3
# The logarithm of the loss must vary by more than this to fit a law of the loss.
_FLAT = 0.05
_ROUNDS = 200
# Correlation times to try, in windows: speed changes that last less than three windows count as noise.
_SLOW = np.geomspace(3.0, 48.0, 13)
_ANY = np.geomspace(0.25, 48.0, 24)
_SHARES = np.linspace(0.0, 0.95, 20)
_COMMON_SHARES = np.linspace(0.0, 1.0, 11)
# Variance of a measured plan's cost relative to that of a unit's cost.
_NOISE_RATIOS = np.geomspace(1e-3, 30.0, 24)


@dataclass(frozen=True, slots=True)
class Fitted:
    """One fitted value.

    Attributes:
        value: the value, in the unit of the field of ``Strengths`` with the same name.
        count: number of values it is based on.
        source: the rows that these values came from.
    """

    value: float
    count: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedStrengths:
    """Fitted values; ``None`` if the rows do not show them. The fields are those of ``Strengths``."""

    noise_error: Fitted | None = None
    cost_error: Fitted | None = None
    common_share: Fitted | None = None
    time_noise: Fitted | None = None
    drift: Fitted | None = None
    drift_windows: Fitted | None = None
    length: Fitted | None = None
    length_windows: Fitted | None = None
    jitter: Fitted | None = None
    switch_windows: Fitted | None = None

    def found(self) -> dict[str, Fitted]:
        """Return the fitted values by field."""
        pairs = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: value for name, value in pairs if value is not None}

    def strengths(self) -> Strengths:
        """Return the strengths; values that were not fitted keep their defaults."""
        values: dict[str, Any] = {name: fitted.value for name, fitted in self.found().items()}
        return Strengths(**values)


@dataclass(frozen=True, slots=True)
class Costs:
    """Differences between measured plans of one job and their predictions.

    Attributes:
        residuals: shape (n,), logarithm of measured over predicted seconds per step.
        shares: shape (n, units, precisions), share of the predicted seconds that each unit spends in each precision.
    """

    residuals: Floats
    shares: Floats


def fit(rows: Sequence[Row], *, batch_size: int, adaptive: bool, costs: Sequence[Costs] = ()) -> FittedStrengths:
    """Return the strengths fitted to recorded windows.

    Args:
        rows: the windows of one run, in order, as ``campaign.traces.record`` returns them.
        batch_size: the job's samples per batch.
        adaptive: whether a step consumes k batches.
        costs: measured relative to predicted costs of plans, per job.
    """
    good = [row for row in rows if row["measurement"]["failure"] is None]
    return FittedStrengths(
        noise_error=fit_noise_error(good, batch_size=batch_size, adaptive=adaptive),
        switch_windows=fit_switch(good),
        **fit_times(good),
        **fit_lengths(good),
        **fit_costs(costs),
    )


def fit_noise_error(rows: Sequence[Row], *, batch_size: int, adaptive: bool) -> Fitted | None:
    """Return the relative error of one estimate of the trace and of the square behind the noise scale.

    The reported noise scale is smoothed by moving averages, which cannot be undone where the square falls manyfold
    within their memory. But the rows hold what they were fed: the variance of the micro-batches is tr(Sigma) over
    their size, and the squared norm is |G|^2 plus tr(Sigma) over the batch. Each is compared with a smooth law of the
    loss, quadratic in the logarithms. The square is taken to err by min(0.2 + noise scale/batch, 2) times as much as
    the trace, as in the simulator; the root of the mean of both squared errors is returned, each from the median size
    of its residuals. What really changes from step to step counts as error, too.

    Args:
        rows: windows, each of which fed the moving averages at most once.
        batch_size: the job's samples per batch.
        adaptive: whether a step consumes k batches; else k = 1 was cut in two where the noise scale was fed.
    """
    fed = [(gradient, row) for row in rows if (gradient := _fed(row)) is not None and gradient["variance"]]
    if len(fed) < _FEWEST:
        return None
    steps = np.array([row["plan"]["accumulation_steps"] for _, row in fed], dtype=np.float64)
    batch = batch_size * (steps if adaptive else np.ones_like(steps))
    micro = batch / (steps if adaptive else np.maximum(steps, 2.0))
    trace = np.array([gradient["variance"] for gradient, _ in fed]) * micro
    square = np.array([gradient["norm"] for gradient, _ in fed]) ** 2 - trace / batch
    losses = np.log([row["measurement"]["loss"] for _, row in fed])
    powers = np.vander(losses - losses.mean(), 3 if np.ptp(losses) > _FLAT else 1)
    level = powers @ np.linalg.lstsq(powers, np.log(trace), rcond=None)[0]
    mean = _mean_law(powers, square)
    unlike = np.minimum(0.2 + np.exp(level) / mean / batch, 2.0)
    sizes = [_typical(rest, powers.shape[1]) for rest in (np.log(trace) - level, (square / mean - 1.0) / unlike)]
    return Fitted(float(np.sqrt(np.mean(np.square(sizes)))), len(fed), "windows that fed the noise scale")


def fit_times(rows: Sequence[Row]) -> dict[str, Fitted]:
    """Return ``time_noise``, ``drift`` and ``drift_windows``: fast and slow changes of a plan's seconds per step.

    The logarithm of a window's median step is modelled as a level of its plan, a power of the batch's bytes where they
    vary, noise, and a first-order autoregressive series of its precisions; restricted likelihood tells these apart.
    """
    timed = [row for row in rows if row["measurement"]["seconds_per_step"]]
    plans = [_key(row["plan"]) for row in timed]
    if len(timed) - len(set(plans)) < _FEWEST:
        return {}
    seconds = np.log([row["measurement"]["seconds_per_step"] for row in timed])
    columns = [[float(plan == other) for plan in plans] for other in dict.fromkeys(plans)]
    sizes = np.log([row["batch_bytes"][0] for row in timed])
    if np.ptp(sizes) > _ALIKE:
        columns.append((sizes - sizes.mean()).tolist())
    apart = _apart([row["window"] for row in timed])
    precisions = [_key(row["plan"]["precision"]) for row in timed]
    alike = np.array([[first == second for second in precisions] for first in precisions])

    def covariance(share: float, memory: float) -> Floats:
        return np.asarray(share * np.exp(-apart / memory) * alike + (1 - share) * np.eye(len(timed)))

    grid = [(0.0, float(_SLOW[0])), *((share, memory) for share in _SHARES[1:].tolist() for memory in _SLOW.tolist())]
    (share, memory), variance = _likeliest(grid, [(seconds, np.array(columns).T)], [covariance])
    source = "medians of windows"
    found = {"time_noise": Fitted(float(np.sqrt((1 - share) * variance)), len(timed), source)}
    if share > 0:
        found["drift"] = Fitted(float(np.sqrt(share * variance)), len(timed), source)
        found["drift_windows"] = Fitted(memory, len(timed), source)
    return found


def fit_lengths(rows: Sequence[Row]) -> dict[str, Fitted]:
    """Return ``length``, ``length_windows`` and ``jitter`` from batch bytes; nothing if all are equal."""
    used = [row for row in rows if row["batch_bytes"][0] > 0]
    if len(used) < _FEWEST:
        return {}
    means, largest = np.log(np.array([row["batch_bytes"] for row in used], dtype=np.float64)).T
    if np.ptp(means) < _ALIKE:
        return {}
    apart = _apart([row["window"] for row in used])

    def covariance(memory: float) -> Floats:
        return np.asarray(np.exp(-apart / memory))

    grid = [(memory,) for memory in _ANY.tolist()]
    (memory,), variance = _likeliest(grid, [(means, np.ones((len(used), 1)))], [covariance])
    # The longest batch is a half-normal deviation above the mean.
    jitter = float(np.sqrt(np.mean((largest - means) ** 2)))
    return {
        "length": Fitted(float(np.sqrt(variance)), len(used), "mean bytes of windows"),
        "length_windows": Fitted(memory, len(used), "mean bytes of windows"),
        "jitter": Fitted(jitter, len(used), "largest over mean bytes of windows"),
    }


def fit_costs(costs: Sequence[Costs]) -> dict[str, Fitted]:
    """Return ``cost_error`` and ``common_share``: deviations of unit costs from the profile.

    The average level of each job and of its units is left out, because no choice of plan depends on it, and so is the
    noise of single plans. One job says little about the common share: it has as many common deviations as precisions.
    """
    costs = [cost for cost in costs if len(cost.residuals) >= _FEWEST]
    if not costs:
        return {}

    def covariance(shares: Floats) -> Callable[[float, float], Floats]:
        together, flat = shares.sum(axis=1), shares.reshape(len(shares), -1)
        same, own = together @ together.T, flat @ flat.T

        def of(common: float, noise: float) -> Floats:
            return np.asarray(common * same + (1 - common) * own + noise * np.eye(len(shares)))

        return of

    series = [(cost.residuals, _levels(cost.shares)) for cost in costs]
    # Noise is relative to the contribution of a plan's mean unit.
    size = float(np.mean([np.sum(cost.shares**2) / len(cost.shares) for cost in costs]))
    grid = [(share, ratio * size) for share in _COMMON_SHARES.tolist() for ratio in _NOISE_RATIOS.tolist()]
    (share, _), variance = _likeliest(grid, series, [covariance(cost.shares) for cost in costs])
    count = sum(len(cost.residuals) for cost in costs)
    source = f"measured plans of {len(costs)} jobs"
    return {
        "cost_error": Fitted(float(np.sqrt(variance)), count, source),
        "common_share": Fitted(share, count, source),
    }


def costs_of(profile: Profile, plans: Sequence[Plan], seconds: Sequence[float]) -> Costs:
    """Return the differences between measured plans of a job and its profile.

    Args:
        profile: the job's profile.
        plans: n measured plans.
        seconds: their seconds per step.

    Raises:
        ProfileError: if a plan's k or one of its choices is not in the profile.
    """
    units = {unit.name: number for number, unit in enumerate(profile.units)}
    shares = np.zeros((len(plans), len(units), len(profile.precisions)))
    predicted = np.array([seconds_per_step(profile, plan) for plan in plans])
    for row, plan in enumerate(plans):
        segments = profile.table_for(plan).segments
        for segment, name in zip(segments, choices(segments, plan), strict=True):
            if segment.unit is not None:
                place = profile.precisions.index(plan.precision_of(segment.unit))
                shares[row, units[segment.unit], place] += profile.calibration.scale * segment.cost(name).seconds
    return Costs(np.log(np.array(seconds) / predicted), shares / predicted[:, None, None])


def fit_switch(rows: Sequence[Row]) -> Fitted | None:
    """Return the median cost of a plan switch, in recorded windows of the first row's plan.

    The cost is a window's time beyond its number of steps times their median, minus the same quantity for windows of
    the same plan that followed no switch; this removes the cost of sampling gradients.
    """
    windows = [(_key(row["plan"]), row["measurement"]) for row in rows]
    extra: dict[tuple[str, bool], list[float]] = {}
    for (before, _), (plan, seen) in itertools.pairwise(windows):
        if seen["seconds_per_step"]:
            over = seen["total_s"] - seen["steps"] * seen["seconds_per_step"]
            extra.setdefault((plan, plan != before), []).append(over)
    usual = {plan: float(np.median(values)) for (plan, switched), values in extra.items() if not switched}
    switches = [
        value - usual[plan]
        for (plan, switched), values in extra.items()
        if switched and plan in usual
        for value in values
    ]
    first = [
        seen["steps"] * seen["seconds_per_step"] for plan, seen in windows if plan == windows[0][0] and seen["step_s"]
    ]
    if len(switches) < 3 or not first:
        return None
    value = max(float(np.median(switches)), 0.0) / float(np.median(first))
    return Fitted(value, len(switches), "windows after a switch")


def _fed(row: Row) -> Mapping[str, Any] | None:
    """Return a window's gradient statistics if the window fed the noise scale."""
    gradient: Mapping[str, Any] | None = row["measurement"]["gradient"]
    if gradient is None or gradient["noise_scale_age_steps"] is None:
        return None
    return gradient if gradient["noise_scale_age_steps"] <= row["measurement"]["steps"] else None


def _mean_law(powers: Floats, values: Floats) -> Floats:
    """Return a positive law exp(powers x coefficients) fitted to the mean of values, some of which may be negative.

    Args:
        powers: shape (n, p).
        values: shape (n,); their relative errors are assumed to be equal.
    """
    least = 0.1 * float(np.median(np.abs(values)))
    coefficients = np.linalg.lstsq(powers, np.log(np.maximum(values, least)), rcond=None)[0]
    for _ in range(_ROUNDS):
        rest = np.clip(values / np.exp(powers @ coefficients) - 1.0, -3.0, 3.0)
        coefficients = coefficients + 0.3 * np.linalg.lstsq(powers, rest, rcond=None)[0]
    return np.asarray(np.exp(powers @ coefficients))


def _typical(rest: Floats, fitted: int) -> float:
    """Return the standard deviation of residuals from their median size, given the number of fitted coefficients."""
    return float(1.4826 * np.median(np.abs(rest)) * np.sqrt(len(rest) / (len(rest) - fitted)))


def _levels(shares: Floats) -> Floats:
    """Return the regressors that remove the level of a job and of its units, shape (n, 1) or (n, 2)."""
    together = shares.sum(axis=(1, 2))
    columns = [np.ones(len(shares)), *([together - together.mean()] if np.ptp(together) > _ALIKE else [])]
    return np.array(columns).T


def _key(document: object) -> str:
    """Return a text that is equal for equal JSON objects."""
    return json.dumps(document, sort_keys=True)


def _apart(windows: Sequence[int]) -> Floats:
    """Return the distance in windows between each pair, shape (n, n)."""
    numbers = np.array(windows, dtype=np.float64)
    return np.asarray(np.abs(numbers[:, None] - numbers))


def _likeliest(
    grid: Sequence[tuple[float, ...]],
    series: Sequence[tuple[Floats, Floats]],
    covariances: Sequence[Callable[..., Floats]],
) -> tuple[tuple[float, ...], float]:
    """Return the parameters of highest restricted likelihood, and the corresponding variance.

    Args:
        grid: parameters to try.
        series: independent series, each of values, shape (n,), and regressors, shape (n, p).
        covariances: for each series, the covariance of its values at given parameters, divided by the variance.
    """
    free = sum(len(values) - np.linalg.matrix_rank(regressors) for values, regressors in series)
    best: tuple[float, tuple[float, ...], float] | None = None
    for parameters in grid:
        squares = volume = 0.0
        for (values, regressors), covariance in zip(series, covariances, strict=True):
            root = np.linalg.cholesky(covariance(*parameters) + 1e-9 * np.eye(len(values)))
            y, x = np.linalg.solve(root, values), np.linalg.solve(root, regressors)
            coefficients, _, rank, singular = np.linalg.lstsq(x, y, rcond=None)
            squares += float(np.sum((y - x @ coefficients) ** 2))
            volume += 2 * float(np.sum(np.log(np.diag(root))) + np.sum(np.log(singular[:rank])))
        score = volume + free * float(np.log(max(squares, 1e-300)))
        if best is None or score < best[0]:
            best = score, parameters, squares / free
    assert best is not None
    return best[1], best[2]
