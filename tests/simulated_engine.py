"""An engine that computes windows from a profile and a convergence model: a training run in microseconds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from simulation import Simulation, Windows, World

from autotune.engines.engine import EngineBase
from autotune.measurement import Failure, GradientStatistics, Measurement, UnitGradient
from autotune.simulator.simulated_job import SimulatedJob


class SimulatedEngine(EngineBase):
    """An engine that runs one simulated job.

    Args:
        job: the job.
        world: how the run differs from its profile; ``None`` if it does not.
        seed: random seed.
        discard_steps: first steps of a window that are not timed.

    Attributes:
        memory_budget_bytes: the budget of windows; the world may change it.
    """

    def __init__(self, job: SimulatedJob, *, world: World | None = None, seed: int = 0, discard_steps: int = 1) -> None:
        self.job = job
        super().__init__(job.profile.space)
        self._discard = discard_steps
        self._simulation = Simulation([job], world, seed=seed)
        self._simulation.begin(np.zeros(1, dtype=np.int64))

    def run(self, steps: int) -> Measurement:
        """Run a window.

        Raises:
            EngineError: if the engine was closed.
        """
        self.require_open()
        simulation, lanes = self._simulation, self._simulation.lanes
        budget = math.inf if self.memory_budget_bytes is None else float(self.memory_budget_bytes)
        if lanes.budget[0] != budget:
            simulation.set_budget(np.array([0]), np.array([budget]))
        k, choices = simulation.told.encode(0, self.plan)
        window = simulation.run(np.array([k]), choices[None], steps)
        if budget < math.inf:
            # The world may have changed the budget.
            lanes.budget[0] = self.memory_budget_bytes = int(lanes.budget[0])
        return measurement(simulation, window, 0, discard_steps=self._discard)

    def evaluate(self) -> float:
        """Return the job's metric."""
        return float(self._simulation.metric()[0])

    def snapshot(self) -> Any:
        """Return the run's state, including its generator's."""
        return self._simulation.snapshot()

    def restore(self, snapshot: Any) -> None:
        """Return to a snapshot."""
        self._simulation.restore(snapshot)


def measurement(simulation: Simulation, window: Windows, lane: int, *, discard_steps: int = 1) -> Measurement:
    """Return one lane's window as the measurement that a real engine would have returned.

    Args:
        simulation: the simulation that ran the window.
        window: results of all lanes.
        lane: number of the lane.
        discard_steps: first steps that are not timed.
    """

    def known(value: float) -> float | None:
        return None if math.isnan(value) else float(value)

    steps = int(window.steps[lane])
    seconds = known(window.seconds_per_step[lane])
    timed = max(steps - discard_steps, 0) if seconds is not None else 0
    budget, over = simulation.lanes.budget[lane], bool(window.over_budget[lane])
    age = known(window.noise_age_steps[lane])
    units = simulation.told.profiles[int(simulation.lanes.job[lane])].units
    return Measurement(
        steps=steps,
        samples=int(window.samples[lane]),
        items=int(window.samples[lane]),
        total_s=float(window.total_s[lane]),
        step_s=(seconds,) * timed if seconds is not None else (),
        seconds_per_step=seconds if timed else None,
        samples_per_step=float(window.samples_per_step[lane]) if timed else None,
        peak_bytes=int(window.peak_bytes[lane]),
        memory_budget_bytes=int(budget) if math.isfinite(budget) else None,
        loss=float(window.loss[lane]),
        gradient=GradientStatistics(
            norm=float(window.norm[lane]),
            noise_scale=known(window.noise_scale[lane]),
            noise_scale_age_steps=None if age is None else int(age),
            variance=known(window.variance[lane]),
            per_unit={
                unit.name: UnitGradient(
                    rms=float(window.unit_rms[lane, place]),
                    signal_to_noise=known(window.unit_signal_to_noise[lane, place]),
                    underflow_frac=float(window.unit_underflow[lane, place]),
                )
                for place, unit in enumerate(units)
            },
        ),
        learning_rate=float(window.learning_rate[lane]),
        failure=Failure.OVER_BUDGET if over else None,
        failure_detail=f"peak {window.peak_bytes[lane]:.0f} bytes over {budget:.0f}" if over else "",
    )
