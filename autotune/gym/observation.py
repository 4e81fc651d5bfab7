"""The observation of a window, and its features: named numbers that are the input of policies that choose plans.

Every feature is finite and lies in [-LIMIT, LIMIT]. Unknown quantities are 0; ``*_known`` features flag some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.choices import USUAL_PRECISIONS
from autotune.measurement import GradientStatistics, Measurement, UnitGradient
from autotune.plan import Plan, PlanSpace, Precision
from autotune.units import Unit

FEATURE_VERSION = 1
LIMIT = 5.0

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything that a policy may use after a window.

    Attributes:
        space: the plans that can be applied.
        plan: the plan of the window.
        window: measurements of the window.
        reference: measurements of a window of the baseline plan, to which features are relative.
        previous_loss: loss of the window before; ``None`` for the first.
        memory_budget_bytes: memory budget; ``None`` for none.
        budget_ahead: announced budgets of the next windows, the next one first; empty if nothing is announced.
        batch_size: samples in one batch of the job.
        adaptive: whether a step consumes k batches.
        progress: share of the run's samples that are done, 0 to 1.
    """

    space: PlanSpace
    plan: Plan
    window: Measurement
    reference: Measurement
    previous_loss: float | None = None
    memory_budget_bytes: int | None = None
    budget_ahead: tuple[int, ...] = ()
    batch_size: int = 1
    adaptive: bool = False
    progress: float = 0.0

    @property
    def gradient(self) -> GradientStatistics:
        """The gradient statistics; zeros and unknowns if no gradient was sampled."""
        return self.window.gradient or GradientStatistics(norm=0.0)

    def arrays(self, max_units: int | None = None) -> dict[str, Array]:
        """Return the features as new arrays.

        Args:
            max_units: rows of the unit array; rows without a unit are zeros. ``None`` for the number of units.

        Returns:
            ``global``: shape (len(GLOBAL_FEATURES),); ``units``: shape (max_units * len(UNIT_FEATURES),), the rows of
            all units in one flat array, as stable-baselines3 requires.

        Raises:
            ValueError: if the model has more units than ``max_units``.
        """
        units = self.space.units
        rows = len(units) if max_units is None else max_units
        if rows < len(units):
            raise ValueError(f"{len(units)} units do not fit into {rows} rows")
        table = np.zeros((rows, len(UNIT_FEATURES)), dtype=np.float32)
        model = _Model(
            num_units=len(units),
            num_parameters=sum(unit.num_parameters for unit in units),
            mean_rms=_mean_rms(self),
        )
        for index, unit in enumerate(units):
            table[index] = [_bounded(read(self, unit, index, model)) for read in UNIT_FEATURES.values()]
        values = [_bounded(read(self)) for read in GLOBAL_FEATURES.values()]
        return {"global": np.array(values, dtype=np.float32), "units": table.reshape(-1)}


def _bounded(value: float | bool | None) -> float:
    if value is None or math.isnan(value):
        return 0.0
    return float(min(max(value, -LIMIT), LIMIT))


def _log(value: float | None, base: float | None = None) -> float:
    """Return the natural logarithm of a ratio; 0 if it is unknown, -LIMIT for a ratio of 0, LIMIT for infinity."""
    if value is None or base is None or math.isnan(value) or math.isnan(base) or base <= 0 or value < 0:
        return 0.0
    if math.isinf(base):
        return 0.0
    ratio = value / base
    return math.log(ratio) if 0 < ratio < math.inf else math.copysign(LIMIT, ratio - 1)


def _share(value: float | None, whole: float | None) -> float:
    return 0.0 if value is None or not whole else value / whole


def _loss_trend(o: Observation) -> float:
    if o.window.loss is None or not o.previous_loss:
        return 0.0
    return (o.window.loss - o.previous_loss) / abs(o.previous_loss) * 10


def _known_norm(o: Observation) -> float | None:
    return None if o.window.gradient is None else o.window.gradient.norm


def _reference_norm(o: Observation) -> float | None:
    return None if o.reference.gradient is None else o.reference.gradient.norm


def _effective_batches(o: Observation) -> int:
    return o.plan.accumulation_steps if o.adaptive else 1


GLOBAL_FEATURES: dict[str, Callable[[Observation], float | bool | None]] = {
    "loss": lambda o: _log(o.window.loss, o.reference.loss),
    "loss_trend": _loss_trend,
    "gradient_norm": lambda o: _log(_known_norm(o), _reference_norm(o)),
    "noise_scale_known": lambda o: o.gradient.noise_scale is not None,
    "noise_scale": lambda o: _log(o.gradient.noise_scale, o.batch_size),
    "noise_scale_age": lambda o: math.log1p(o.gradient.noise_scale_age_steps or 0) / 2,
    "accumulation_steps": lambda o: math.log2(o.plan.accumulation_steps),
    "effective_batches": lambda o: math.log2(_effective_batches(o)),
    "throughput": lambda o: _log(o.window.throughput, o.reference.throughput),
    "peak": lambda o: _log(o.window.peak_bytes, o.reference.peak_bytes),
    "budgeted": lambda o: o.memory_budget_bytes is not None,
    "budget": lambda o: _share(o.memory_budget_bytes, o.reference.peak_bytes),
    "pressure": lambda o: _share(o.window.peak_bytes, o.memory_budget_bytes),
    "failed": lambda o: o.window.failure is not None,
    "skipped": lambda o: _share(o.window.skipped_steps, o.window.steps),
    "learning_rate": lambda o: _log(o.window.learning_rate, o.reference.learning_rate),
    "progress": lambda o: o.progress,
    "num_units": lambda o: math.log2(1 + len(o.space.units)) / 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """Figures of a whole model, to which the features of its units are relative.

    Attributes:
        num_units: number of units.
        num_parameters: parameters of all units.
        mean_rms: mean over units of the gradient's root mean square; ``None`` if no gradient was sampled.
    """

    num_units: int
    num_parameters: int
    mean_rms: float | None


def _unit_gradient(o: Observation, unit: Unit) -> UnitGradient | None:
    return o.gradient.per_unit.get(unit.name)


def _mean_rms(o: Observation) -> float | None:
    values = [entry.rms for entry in o.gradient.per_unit.values()]
    return sum(values) / len(values) if values else None


def _signal_to_noise(o: Observation, unit: Unit) -> float | None:
    found = _unit_gradient(o, unit)
    return None if found is None else found.signal_to_noise


def _is_in(precision: Precision) -> Callable[[Observation, Unit, int, _Model], bool]:
    return lambda o, u, _i, _m: o.plan.precision_of(u.name) is precision


UNIT_FEATURES: dict[str, Callable[[Observation, Unit, int, _Model], float | bool | None]] = {
    "present": lambda _o, _u, _i, _m: 1.0,
    "position": lambda _o, _u, i, m: i / max(m.num_units - 1, 1),
    "recomputable": lambda _o, u, _i, _m: u.recomputable,
    "parameters": lambda _o, u, _i, m: _share(u.num_parameters * m.num_units, m.num_parameters),
    "gradient_rms": lambda o, u, _i, m: _log(getattr(_unit_gradient(o, u), "rms", None), m.mean_rms),
    "signal_to_noise_known": lambda o, u, _i, _m: _signal_to_noise(o, u) is not None,
    "signal_to_noise": lambda o, u, _i, _m: _log(_signal_to_noise(o, u), 1.0),
    "underflow": lambda o, u, _i, _m: getattr(_unit_gradient(o, u), "underflow_frac", 0.0),
    **{f"is_{precision}": _is_in(precision) for precision in USUAL_PRECISIONS},
    "is_recomputed": lambda o, u, _i, _m: o.plan.storage_of(u.name).recomputes,
}
