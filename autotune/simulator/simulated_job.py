"""Training jobs as numbers, and many of them as arrays: what simulations run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from autotune.cost_model.cost_arrays import CostArrays, Floats, Indices, precision_index
from autotune.cost_model.profile import Profile
from autotune.job import WarmupCosine
from autotune.simulator.convergence import Convergence, Curve, falling

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """A job as numbers.

    Attributes:
        name: what it is called.
        profile: what a planner is told that it costs.
        convergence: how it converges.
        target: the metric at which it has arrived.
        goal: whether the metric shall be small (``min``) or large (``max``).
        total_samples: samples after which a run that has not arrived ends.
        schedule: its learning-rate schedule.
        splits_to_learn: whether a whole batch may be cut in two so that the noise scale is learnt at k = 1.
    """

    name: str
    profile: Profile
    convergence: Convergence
    target: float
    total_samples: float
    goal: str = "min"
    schedule: WarmupCosine | None = None
    splits_to_learn: bool = True


@dataclass(frozen=True, slots=True)
class Curves:
    """One curve per job, or per lane; see :class:`autotune.simulator.convergence.Curve`."""

    asymptote: Floats
    drop: Floats
    scale: Floats
    exponent: Floats

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> Curves:
        """Return curves as one."""
        return cls(*(np.array([getattr(curve, item.name) for curve in curves]) for item in fields(cls)))

    def at(self, effort: Floats) -> Floats:
        """Return each curve's value at its effort."""
        return falling(effort, self.asymptote, self.drop, self.scale, self.exponent)

    def take(self, job: Indices) -> Curves:
        """Return the curves of each lane's job."""
        return Curves(self.asymptote[job], self.drop[job], self.scale[job], self.exponent[job])


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArrays:
    """What differs between jobs, besides costs, as arrays over jobs; see :class:`SimulatedJob`."""

    loss: Curves
    noise_reference: Floats
    noise_loss: Floats
    noise_exponent: Floats
    noise_factor: Floats
    splits: Flags
    squared_errors: Floats

    @classmethod
    def of(cls, jobs: Sequence[SimulatedJob], arrays: CostArrays) -> JobArrays:
        """Return what differs between jobs.

        Args:
            jobs: the jobs.
            arrays: what they cost, which says how many units and choices there is room for.
        """
        models = [job.convergence for job in jobs]
        choices = np.arange(arrays.max_choices)
        squared_errors = np.zeros((len(jobs), arrays.max_units, arrays.max_choices))
        for number, job in enumerate(jobs):
            for place, unit in enumerate(job.profile.units):
                errors = job.convergence.squared_errors.get(unit.name, {})
                for index, precision in enumerate(job.profile.precisions):
                    chosen = precision_index(choices) == index
                    squared_errors[number, place, chosen] = errors.get(str(precision), 0.0)
        return cls(
            loss=Curves.of([model.loss for model in models]),
            noise_reference=np.array([model.noise.reference for model in models]),
            noise_loss=np.array([model.noise.reference_loss for model in models]),
            noise_exponent=np.array([model.noise.exponent for model in models]),
            noise_factor=np.array([model.noise_factor for model in models]),
            splits=np.array([job.splits_to_learn and job.profile.batching == "fixed" for job in jobs]),
            squared_errors=squared_errors,
        )
