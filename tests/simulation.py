"""Simulated training of many jobs at once.

A profile gives the cost of a step, and a convergence model its progress. Everything random comes from one generator, so
that a simulation repeats exactly for the same seed and plans.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from autotune.cost_model.cost_arrays import CostArrays, Floats, Indices, Plans
from autotune.cost_model.goodput import step_efficiency
from autotune.cost_model.noise_scale import NoiseScaleAverage
from autotune.job import WarmupCosine
from autotune.simulator.simulated_job import Curves, Flags, JobArrays, SimulatedJob

_DECAY = NoiseScaleAverage().decay


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """How a run differs from its profile's predictions; not at all if all values are zero.

    Attributes:
        time_noise_frac: standard deviation of the logarithm of a window's median step.
        drift_frac: standard deviation of the logarithm of the machine's slow changes of speed.
        drift_windows: correlation time of these changes in windows.
        noise_scale_error: standard deviation of one sample of tr(Sigma) and of |G|^2, relative.
        loss_noise_frac: standard deviation of a window's mean loss, relative, at a batch of one noise scale.
        length_rate: chance per window that sequences change their length.
        length_range: factor on the profiled length, from and to.
        budget_rate: chance per window that the budget changes.
        budget_range: factor on the first budget, from and to.
        noise_rate: chance per window that the noise of the data changes.
        noise_range: factor on the noise scale, from and to.
    """

    time_noise_frac: float = 0.0
    drift_frac: float = 0.0
    drift_windows: float = 20.0
    noise_scale_error: float = 0.0
    loss_noise_frac: float = 0.0
    length_rate: float = 0.0
    length_range: tuple[float, float] = (0.5, 1.5)
    budget_rate: float = 0.0
    budget_range: tuple[float, float] = (0.8, 1.25)
    noise_rate: float = 0.0
    noise_range: tuple[float, float] = (0.5, 2.0)


# Round values of the order observed in real runs on a shared machine; not fitted to recorded runs.
MOVING = World(
    time_noise_frac=0.03,
    drift_frac=0.05,
    noise_scale_error=0.5,
    loss_noise_frac=0.01,
    length_rate=0.02,
    budget_rate=0.02,
    noise_rate=0.02,
)


@dataclass(slots=True)
class Lanes:
    """The state of n runs; every array has shape (n,).

    Attributes:
        job: number of the job that each lane runs.
        effort: effective steps so far.
        steps: optimizer steps.
        samples: samples consumed.
        seconds: wall time so far.
        drift: logarithm of the machine's slowness.
        length: current sequence length relative to the profiled length.
        noise_factor: factor on the noise scale.
        budget: in bytes; infinity for none.
        first_budget: the budget that the run began with.
        trace: moving average of tr(Sigma).
        square: moving average of |G|^2.
        learnt: samples in these averages.
        learnt_at: the step that last fed them; -1 before the first.
        plan_row: number that identifies the plan, so that a switch is detected.
    """

    job: Indices
    effort: Floats
    steps: Indices
    samples: Floats
    seconds: Floats
    drift: Floats
    length: Floats
    noise_factor: Floats
    budget: Floats
    first_budget: Floats
    trace: Floats
    square: Floats
    learnt: Indices
    learnt_at: Indices
    plan_row: Indices

    @classmethod
    def begin(cls, job: Indices) -> Lanes:
        """Return lanes before their first step."""
        n = len(job)
        zero, none = np.zeros(n), np.full(n, np.inf)
        return cls(
            job=job.copy(),
            effort=zero.copy(),
            steps=np.zeros(n, dtype=np.int64),
            samples=zero.copy(),
            seconds=zero.copy(),
            drift=zero.copy(),
            length=np.ones(n),
            noise_factor=np.ones(n),
            budget=none.copy(),
            first_budget=none.copy(),
            trace=zero.copy(),
            square=zero.copy(),
            learnt=np.zeros(n, dtype=np.int64),
            learnt_at=np.full(n, -1, dtype=np.int64),
            plan_row=np.full(n, -1, dtype=np.int64),
        )

    def take(self, where: Indices) -> Lanes:
        """Return copies of some lanes."""
        return Lanes(**{item.name: getattr(self, item.name)[where] for item in fields(self)})

    def put(self, where: Indices, other: Lanes) -> None:
        """Replace some lanes by others."""
        for item in fields(self):
            getattr(self, item.name)[where] = getattr(other, item.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Measurements of a window of each lane; shape (n,), or (n, max_units) for units; unknown values are NaN.

    Attributes:
        steps: optimizer steps that were run.
        samples: samples consumed.
        samples_per_step: samples of one step.
        seconds_per_step: measured median; NaN where no step was timed.
        total_s: wall seconds.
        peak_bytes: the peak.
        over_budget: whether the window ended because it exceeded the budget.
        loss: mean training loss.
        norm: norm of the gradient.
        noise_scale: as estimated so far.
        noise_age_steps: steps since the noise scale was last updated.
        variance: eq. 7.
        learning_rate: relative to the job's own.
        unit_rms: root mean square of each unit's gradient.
        unit_signal_to_noise: signal-to-noise ratio of each unit.
        unit_underflow: share of each unit's gradient that fp16 cannot hold.
    """

    steps: Indices
    samples: Floats
    samples_per_step: Floats
    seconds_per_step: Floats
    total_s: Floats
    peak_bytes: Floats
    over_budget: Flags
    loss: Floats
    norm: Floats
    noise_scale: Floats
    noise_age_steps: Floats
    variance: Floats
    learning_rate: Floats
    unit_rms: Floats
    unit_signal_to_noise: Floats
    unit_underflow: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _MoreArrays:
    """Further properties of jobs, as arrays over jobs."""

    metric: Curves
    batch: Floats
    adaptive: Flags
    target: Floats
    sign: Floats
    total_samples: Floats
    switch_s: Floats
    warmup: Floats
    minimum: Floats
    scheduled: Flags
    unit_share: Floats

    @classmethod
    def of(cls, jobs: Sequence[SimulatedJob]) -> _MoreArrays:
        schedules = [job.schedule or WarmupCosine() for job in jobs]
        units = [sum(unit.num_parameters for unit in job.profile.units) for job in jobs]
        return cls(
            metric=Curves.of([job.convergence.metric for job in jobs]),
            batch=np.array([float(job.profile.batch_size) for job in jobs]),
            adaptive=np.array([job.profile.batching == "adaptive" for job in jobs]),
            target=np.array([job.target for job in jobs]),
            sign=np.array([1.0 if job.goal == "min" else -1.0 for job in jobs]),
            total_samples=np.array([float(job.total_samples) for job in jobs]),
            switch_s=np.array([job.profile.switch_s for job in jobs]),
            warmup=np.array([schedule.warmup_frac for schedule in schedules]),
            minimum=np.array([schedule.minimum_frac for schedule in schedules]),
            scheduled=np.array([job.schedule is not None for job in jobs]),
            unit_share=1 / np.sqrt(np.maximum(units, 1)),
        )


class Simulation:
    """A simulation of many lanes, each of which runs one job.

    Args:
        jobs: the jobs that lanes can run.
        world: how runs differ from their profiles.
        seed: random seed.
        max_units: size of arrays over units; ``None`` takes the largest job's.

    Attributes:
        told: costs of plans as planners know them.
        lanes: the runs' state.
    """

    def __init__(
        self, jobs: Sequence[SimulatedJob], world: World | None = None, *, seed: int = 0, max_units: int | None = None
    ) -> None:
        self.jobs = tuple(jobs)
        self.world = world or World()
        self.told = CostArrays([job.profile for job in jobs], max_units=max_units)
        self._generator = np.random.default_rng(seed)
        self._facts = JobArrays.of(self.jobs, self.told)
        self._more = _MoreArrays.of(self.jobs)
        self.lanes = Lanes.begin(np.zeros(0, dtype=np.int64))

    def reseed(self, seed: int) -> None:
        """Set the seed of all further random draws."""
        self._generator = np.random.default_rng(seed)

    def begin(self, job: Indices) -> None:
        """Begin a run of a job in each lane, shape (n,)."""
        self.lanes = Lanes.begin(job)

    def restart(self, where: Indices, job: Indices) -> None:
        """Begin other runs in some lanes."""
        self.lanes.put(where, Lanes.begin(job))

    def set_budget(self, where: Indices, budget_bytes: Floats) -> None:
        """Set the budget of some lanes from now on; infinity for none."""
        self.lanes.budget[where] = budget_bytes
        self.lanes.first_budget[where] = budget_bytes

    def batch(self, k: Indices) -> Floats:
        """Return each lane's effective batch in samples, given the number of its k."""
        job = self.lanes.job
        times = np.where(self._more.adaptive[job], self.told.accumulation_steps[job, k], 1)
        return np.asarray(self._more.batch[job] * times)

    def metric(self) -> Floats:
        """Return each lane's metric."""
        return self._more.metric.take(self.lanes.job).at(self.lanes.effort)

    def arrived(self) -> Flags:
        """Tell which lanes have reached their target."""
        job = self.lanes.job
        return np.asarray(self._more.sign[job] * self.metric() <= self._more.sign[job] * self._more.target[job])

    def progress(self) -> Floats:
        """Return the share of its samples that each lane has consumed, at most 1."""
        return np.minimum(self.lanes.samples / self._more.total_samples[self.lanes.job], 1.0)

    def run_some(self, where: Indices, k: Indices, choices: Indices, steps: int) -> Windows:
        """Run a window of some lanes; the arrays belong to these lanes. See :meth:`run`."""
        whole, self.lanes = self.lanes, self.lanes.take(where)
        try:
            return self.run(k, choices, steps)
        finally:
            whole.put(where, self.lanes)
            self.lanes = whole

    def run(self, k: Indices, choices: Indices, steps: int) -> Windows:
        """Run a window of each lane.

        Args:
            k: shape (n,), number of each lane's k among its job's.
            choices: shape (n, max_units); see :class:`autotune.cost_model.cost_arrays.Numbering`.
            steps: optimizer steps of the window; one that is over its budget ends after its first.
        """
        lanes, plans = self.lanes, Plans(job=self.lanes.job, k=k, choices=choices)
        self._happen()
        peak = self.told.peak_bytes(plans, lanes.length)
        over = peak > lanes.budget
        done = np.where(over, 1, steps)
        seconds = self.told.seconds_per_step(plans, lanes.length) * np.exp(lanes.drift)
        switched = self._note_plan(plans)
        total = seconds * done + switched * self._more.switch_s[lanes.job]
        loss, batch, square, noise = self._train(plans, done)
        samples = batch * done
        lanes.seconds += total
        lanes.steps += done
        lanes.samples += samples
        variance = self._learn(k, batch, square, noise)
        norm = np.sqrt(square * (1 + noise / batch))
        return Windows(
            steps=done,
            samples=samples,
            samples_per_step=batch,
            seconds_per_step=np.where(over, np.nan, seconds * np.exp(self._normal(self.world.time_noise_frac))),
            total_s=total,
            peak_bytes=peak,
            over_budget=over,
            loss=loss * (1 + self._normal(self.world.loss_noise_frac)),
            norm=norm,
            noise_scale=self.known_noise_scale(),
            noise_age_steps=np.where(lanes.learnt_at >= 0, lanes.steps - 1.0 - lanes.learnt_at, np.nan),
            variance=variance,
            learning_rate=self._learning_rate(),
            **self._units(norm, batch, noise, variance),
        )

    def snapshot(self) -> tuple[Lanes, np.random.Generator]:
        """Return a copy of the state of all lanes and of the generator."""
        return copy.deepcopy(self.lanes), copy.deepcopy(self._generator)

    def restore(self, state: tuple[Lanes, np.random.Generator]) -> None:
        """Return to a snapshot."""
        self.lanes, self._generator = copy.deepcopy(state)

    def _happen(self) -> None:
        """Advance the world by one window."""
        world, lanes = self.world, self.lanes
        if world.drift_frac:
            keep = np.exp(-1 / world.drift_windows)
            lanes.drift = keep * lanes.drift + self._normal(world.drift_frac * float(np.sqrt(1 - keep**2)))
        for rate, (low, high), name in (
            (world.length_rate, world.length_range, "length"),
            (world.noise_rate, world.noise_range, "noise_factor"),
            (world.budget_rate, world.budget_range, "budget"),
        ):
            if rate:
                n = len(lanes.job)
                value = np.exp(self._generator.uniform(np.log(low), np.log(high), n))
                hit = self._generator.random(n) < rate
                value = value * lanes.first_budget if name == "budget" else value
                setattr(lanes, name, np.where(hit, value, getattr(lanes, name)))

    def _note_plan(self, plans: Plans) -> Flags:
        """Return which lanes run another plan than in the previous window."""
        weights = np.arange(1, plans.choices.shape[1] + 1) * 2654435761 + 97
        row = (plans.choices + 1) @ weights + plans.k * 40503
        switched = (row != self.lanes.plan_row) & (self.lanes.plan_row >= 0)
        self.lanes.plan_row = row
        return np.asarray(switched)

    def _train(self, plans: Plans, steps: Indices) -> tuple[Floats, Floats, Floats, Floats]:
        """Advance the effort; return loss, |G|^2 (both mid-window), batch and true noise scale."""
        lanes, facts = self.lanes, self._facts
        curve, batch = facts.loss.take(lanes.job), self.batch(plans.k)
        noise = self._noise_at(curve.at(lanes.effort))
        errors = np.take_along_axis(facts.squared_errors[lanes.job], plans.choices[:, :, None], 2)[:, :, 0].sum(axis=1)
        gained = steps * step_efficiency(batch, noise, errors)
        middle = lanes.effort + gained / 2
        lanes.effort = lanes.effort + gained
        # For gradient descent the loss falls in proportion to |G|^2; both are relative to the first step.
        square = (1 + middle / curve.scale) ** (-curve.exponent - 1)
        return curve.at(middle), batch, square, noise

    def _noise_at(self, loss: Floats) -> Floats:
        facts, job = self._facts, self.lanes.job
        law = facts.noise_reference[job] * (facts.noise_loss[job] / loss) ** facts.noise_exponent[job]
        return np.asarray(law * facts.noise_factor[job] * self.lanes.noise_factor)

    def _learn(self, k: Indices, batch: Floats, square: Floats, noise: Floats) -> Floats:
        """Update the noise scale's averages if a step had two batch sizes; return the variance of eq. 7."""
        lanes, facts = self.lanes, self._facts
        pieces = self.told.accumulation_steps[lanes.job, k]
        split = (pieces == 1) & facts.splits[lanes.job]
        pieces = np.where(split, 2, pieces)
        seen = pieces > 1
        error = self.world.noise_scale_error
        trace = noise * square * np.exp(self._normal(error) - error**2 / 2)
        # The gradient noise remaining at this batch size makes |G|^2 less certain.
        found = square * (1 + self._normal(error) * np.minimum(0.2 + noise / batch, 2.0))
        past = np.minimum(_DECAY, lanes.learnt / (lanes.learnt + 1.0))
        lanes.trace = np.where(seen, past * lanes.trace + (1 - past) * trace, lanes.trace)
        lanes.square = np.where(seen, past * lanes.square + (1 - past) * found, lanes.square)
        lanes.learnt = lanes.learnt + seen
        lanes.learnt_at = np.where(seen, lanes.steps - 1, lanes.learnt_at)
        return np.where(seen, trace * pieces / batch, np.nan)

    def known_noise_scale(self) -> Floats:
        """Return each lane's estimate of the noise scale in samples; NaN while unknown."""
        lanes = self.lanes
        known = (lanes.learnt > 0) & (lanes.trace > 0) & (lanes.square > 0)
        return np.where(known, lanes.trace / np.where(known, lanes.square, 1.0), np.nan)

    def _units(self, norm: Floats, batch: Floats, noise: Floats, variance: Floats) -> dict[str, Floats]:
        """Return per-unit statistics: constant shares of the whole."""
        share = np.repeat(self._more.unit_share[self.lanes.job][:, None], self.told.max_units, axis=1)
        ratio = np.where(np.isnan(variance), np.nan, batch / np.maximum(noise, 1e-9))
        return {
            "unit_rms": norm[:, None] * share,
            "unit_signal_to_noise": ratio[:, None] * np.ones_like(share),
            "unit_underflow": np.zeros_like(share),
        }

    def _learning_rate(self) -> Floats:
        more, lanes = self._more, self.lanes
        job = lanes.job
        done = np.minimum(lanes.samples / more.total_samples[job], 1.0)
        warmup, minimum = more.warmup[job], more.minimum[job]
        share = np.clip((done - warmup) / np.maximum(1 - warmup, 1e-12), 0.0, 1.0)
        cosine = minimum + (1 - minimum) * 0.5 * (1 + np.cos(np.pi * share))
        rate = np.where(done <= warmup, done / np.maximum(warmup, 1e-12), cosine)
        return np.where(more.scheduled[job], rate, 1.0)

    def _normal(self, deviation: float) -> Floats:
        n = len(self.lanes.job)
        return deviation * self._generator.standard_normal(n) if deviation else np.zeros(n)
