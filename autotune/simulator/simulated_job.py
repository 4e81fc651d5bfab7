"""Simulated training jobs: one job as numbers, and many jobs as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from autotune.cost_model.cost_arrays import CostArrays, Floats, Indices
from autotune.cost_model.profile import Profile
from autotune.job import WarmupCosine
from autotune.simulator.convergence import Convergence, Curve, falling

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """A simulated job.

    Attributes:
        name: name of the job.
        profile: profiled costs, which planners know.
        convergence: how the job converges.
        target: value of the metric at which a run has reached its target.
        goal: ``min`` if a lower metric is better, ``max`` if a higher one is.
        total_samples: samples after which a run ends even if it has not reached its target.
        schedule: the learning-rate schedule.
        splits_to_learn: whether a batch may be cut in two to estimate the noise scale at k = 1.
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
    """One curve per job or lane; see :class:`autotune.simulator.convergence.Curve`."""

    asymptote: Floats
    drop: Floats
    scale: Floats
    exponent: Floats

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> Curves:
        """Return the curves as arrays."""
        return cls(*(np.array([getattr(curve, item.name) for curve in curves]) for item in fields(cls)))

    def at(self, effort: Floats) -> Floats:
        """Return the value of each curve at its effort, shape (n,)."""
        return falling(effort, self.asymptote, self.drop, self.scale, self.exponent)

    def take(self, job: Indices) -> Curves:
        """Return one curve per lane, given the number of each lane's job."""
        return Curves(*(getattr(self, item.name)[job] for item in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArrays:
    """The properties of jobs other than costs, as arrays over jobs; see :class:`SimulatedJob`."""

    loss: Curves
    noise_reference: Floats
    noise_loss: Floats
    noise_exponent: Floats
    noise_factor: Floats
    splits: Flags
    squared_errors: Floats

    @classmethod
    def of(cls, jobs: Sequence[SimulatedJob], arrays: CostArrays) -> JobArrays:
        """Return jobs as arrays.

        Args:
            jobs: the jobs.
            arrays: their costs, which determine the number of units and choices in the arrays.
        """
        models = [job.convergence for job in jobs]
        choices = np.arange(arrays.max_choices)
        squared_errors = np.zeros((len(jobs), arrays.max_units, arrays.max_choices))
        for number, job in enumerate(jobs):
            for place, unit in enumerate(job.profile.units):
                errors = job.convergence.squared_errors.get(unit.name, {})
                for index, precision in enumerate(job.profile.precisions):
                    chosen = arrays.numbering.precision(choices) == index
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
