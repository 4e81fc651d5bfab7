"""Let conditions move under training runs: what a planner cannot know, each thing at a strength, each can be off.

A run is cut into windows of equal progress: whatever plan is chosen, a window ends at the same loss, so that a plan is
judged by time alone and no plan can hide in an early, noisy phase. All that happens to a lane is drawn beforehand; two
methods on the same course meet the same world, and a clairvoyant can be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from autotune.physics.convergence import step_efficiency
from autotune.physics.cost_arrays import CostArrays, Floats, Indices, Plans
from autotune.physics.simulated_job import Flags, JobArrays, SimulatedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Strengths:
    """Say how strongly each thing moves; 0 switches it off.

    Attributes:
        noise_error: relative error of one estimate of tr(Sigma) and of |G|^2, whose moving averages also lag; 0 tells
            the noise scale as it is.
        cost_error: standard deviation of the logarithm of what a unit really costs in a precision, over its profile.
        drift: the same of each precision's speed as it slowly changes.
        drift_windows: after how many windows such a change is forgotten.
        length: standard deviation of the logarithm of a window's sequence length.
        length_windows: after how many windows a length is forgotten.
        curriculum: logarithm by which lengths grow from the first window to the last.
        jitter: standard deviation of the logarithm of a window's longest batch, over its mean.
        event_every: windows from one announced event (an evaluation beside training, say) to the next; 0 for none.
        event_share: share of the budget that such a window leaves.
        switch_windows: what a switch of plans costs, in windows of the baseline.
        retry_windows: share of a window's time that is lost when it runs out of memory.
    """

    noise_error: float = 0.0
    cost_error: float = 0.0
    drift: float = 0.0
    drift_windows: float = 12.0
    length: float = 0.0
    length_windows: float = 6.0
    curriculum: float = 0.0
    jitter: float = 0.0
    event_every: int = 0
    event_share: float = 0.8
    switch_windows: float = 0.0
    retry_windows: float = 1.0

    def only(self, *names: str) -> Strengths:
        """Return the strengths with everything but the named ones, and what shapes them, off."""
        shapes = ("drift_windows", "length_windows", "event_share", "retry_windows")
        kept = {name: value for name, value in asdict(self).items() if name in names or name in shapes}
        return Strengths(**kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Hold all that will happen to n lanes in w windows.

    Attributes:
        job: shape (n,).
        budget: shape (n, w), bytes that each window leaves.
        event: shape (n, w), whether it is an announced event.
        length: shape (n, w), factor on the profiled sequence length.
        longest: shape (n, w), the same of the window's longest batch.
        drift: shape (n, w, precisions), factor on the seconds of each precision.
        cost: shape (n, max_units, precisions), factor on the seconds of each unit and precision.
        trace_error: shape (n, w), factor on the estimate of tr(Sigma).
        square_error: shape (n, w), standard normal, for the estimate of |G|^2.
    """

    job: Indices
    budget: Floats
    event: Flags
    length: Floats
    longest: Floats
    drift: Floats
    cost: Floats
    trace_error: Floats
    square_error: Floats

    def take(self, lanes: Indices) -> Course:
        """Return some lanes' course."""
        return Course(**{item.name: getattr(self, item.name)[lanes] for item in fields(self)})


def draw_course(
    generator: np.random.Generator,
    strengths: Strengths,
    arrays: CostArrays,
    job: Indices,
    budget_bytes: Floats,
    windows: int,
) -> Course:
    """Return what will happen to each lane.

    Args:
        generator: of the draw.
        strengths: how strongly things move.
        arrays: the jobs.
        job: shape (n,), each lane's job.
        budget_bytes: shape (n,), each lane's budget while nothing happens.
        windows: how many.
    """
    n, precisions = len(job), arrays.max_choices // 2
    length = _wandering(generator, (n, windows), strengths.length, strengths.length_windows)
    length += strengths.curriculum * np.linspace(-0.5, 0.5, windows)
    every = strengths.event_every
    phase = generator.integers(0, max(every, 1), n)[:, None]
    event = (np.arange(windows) + phase) % every == every - 1 if every else np.zeros((n, windows), dtype=bool)
    drift = _wandering(generator, (n, precisions, windows), strengths.drift, strengths.drift_windows)
    error = strengths.noise_error
    return Course(
        job=job,
        budget=budget_bytes[:, None] * np.where(event, strengths.event_share, 1.0),
        event=event,
        length=np.exp(length),
        longest=np.exp(length + strengths.jitter * np.abs(generator.standard_normal((n, windows)))),
        drift=np.exp(np.swapaxes(drift, 1, 2)),
        cost=np.exp(strengths.cost_error * generator.standard_normal((n, arrays.max_units, precisions))),
        trace_error=np.exp(error * generator.standard_normal((n, windows)) - error**2 / 2),
        square_error=error * generator.standard_normal((n, windows)),
    )


def _wandering(generator: np.random.Generator, shape: tuple[int, ...], deviation: float, memory: float) -> Floats:
    """Return stationary first-order autoregressive series along the last axis."""
    values = generator.standard_normal(shape)
    keep = np.exp(-1.0 / memory)
    for place in range(1, shape[-1]):
        values[..., place] = keep * values[..., place - 1] + np.sqrt(1 - keep**2) * values[..., place]
    return deviation * values


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Hold what one window of each lane came to; arrays of shape (n,) but for the last two.

    Attributes:
        seconds: what the window took, switching and lost work included.
        ran_out: whether it ran out of memory and was repeated under the leanest plan.
        switched: whether the plan was another than before.
        peak_bytes: the peak that the plan needed.
        steps: optimizer steps that the window's progress took.
        step_s: seconds of each step, without switching.
        unit_seconds: shape (n, max_units), each unit's seconds of a step under its choice.
        noise_scale: the estimate after the window, in samples; NaN while unknown.
    """

    seconds: Floats
    ran_out: Flags
    switched: Flags
    peak_bytes: Floats
    steps: Floats
    step_s: Floats
    unit_seconds: Floats
    noise_scale: Floats


class MovingRuns:
    """Run lanes along a course.

    Args:
        jobs: the jobs.
        strengths: what switching and running out of memory cost; the rest lies in the course.
        windows: of a run.
        max_units: units that arrays have room for; ``None`` takes the largest job's.

    Attributes:
        arrays: what planners are told that plans cost.
        facts: how the jobs converge.
        window: the next window.
        seconds: shape (n,), time so far.
        k: shape (n,), the running plan's number of k.
        choices: shape (n, max_units), the running plan's choices.
    """

    def __init__(
        self, jobs: Sequence[SimulatedJob], strengths: Strengths, *, windows: int = 40, max_units: int | None = None
    ) -> None:
        self.jobs = tuple(jobs)
        self.strengths = strengths
        self.windows = windows
        self.arrays = CostArrays([job.profile for job in jobs], max_units=max_units)
        self.facts = JobArrays.of(self.jobs, self.arrays)
        effort = np.array([job.convergence.metric.effort_to(job.target) for job in jobs])
        if not (np.isfinite(effort) & (effort > 0)).all():
            raise ValueError("every job must be able to reach its target, and not have reached it")
        self._effort = effort
        self._leanest = self._leanest_choices()
        self.course: Course | None = None

    def begin(self, course: Course) -> None:
        """Begin a run of each lane under its baseline plan."""
        n = len(course.job)
        self.course = course
        self.window = 0
        self.seconds = np.zeros(n)
        self.k = np.zeros(n, dtype=np.int64)
        self.choices = np.zeros((n, self.arrays.max_units), dtype=np.int64)
        self._trace, self._square, self._learnt = np.zeros(n), np.zeros(n), np.zeros(n)
        # A window of the baseline at the profiled length is what switching is counted in.
        self.unit_of_time = self.window_seconds(0, self.k, self.choices, np.ones(n), told=True)

    def noise_scale(self, window: int) -> Floats:
        """Return the true noise scale of each lane in a window, in samples."""
        course = self._course()
        facts, job = self.facts, course.job
        loss = facts.loss.take(job).at((window + 0.5) / self.windows * self._effort[job])
        law = facts.noise_reference[job] * (facts.noise_loss[job] / loss) ** facts.noise_exponent[job]
        return np.asarray(law * facts.noise_factor[job])

    def steps(self, window: int, k: Indices, choices: Indices, noise: Floats | None = None) -> Floats:
        """Return the optimizer steps that a window's progress takes.

        Args:
            window: its number.
            k: shape (n,).
            choices: shape (n, max_units).
            noise: the noise scale to count with; ``None`` takes the true one.
        """
        job, facts = self._course().job, self.facts
        noise = self.noise_scale(window) if noise is None else noise
        batch = facts.batch[job] * np.where(facts.adaptive[job], self.arrays.accumulation_steps[job, k], 1)
        errors = np.take_along_axis(facts.squared_errors[job], choices[:, :, None], axis=2)[:, :, 0].sum(axis=1)
        return np.asarray(self._effort[job] / self.windows / step_efficiency(batch, noise, errors))

    def unit_factors(self, window: int) -> Floats:
        """Return by what each lane's units really cost more than told, shape (n, max_units, choices)."""
        course = self._course()
        factor = course.cost * course.drift[:, window][:, None, :]
        return np.repeat(factor, 2, axis=2)

    def window_seconds(
        self, window: int, k: Indices, choices: Indices, length: Floats, *, told: bool = False
    ) -> Floats:
        """Return the seconds of a window without switching, with true costs or with those that planners are told."""
        plans = Plans(self._course().job, k, choices)
        own = self.arrays.unit_seconds[plans.job, self.arrays.variant(plans)]
        own = own if told else own * self.unit_factors(window)
        return self.steps(window, k, choices) * self.arrays.seconds_per_step(plans, length, own)

    def run(self, k: Indices, choices: Indices) -> Outcome:
        """Run the next window of every lane under these plans."""
        course, window = self._course(), self.window
        plans = Plans(course.job, k, choices)
        peak = self.arrays.peak_bytes(plans, course.longest[:, window])
        ran_out = peak > course.budget[:, window]
        # The first window's plan is the one to launch with, which costs no switch.
        switched = ((k != self.k) | (choices != self.choices).any(axis=1)) & (window > 0)
        own = self.arrays.unit_seconds[course.job, self.arrays.variant(plans)] * self.unit_factors(window)
        step_s = self.arrays.seconds_per_step(plans, course.length[:, window], own)
        steps = self.steps(window, k, choices)
        seconds = np.where(ran_out, self._retried(window, steps * step_s), steps * step_s)
        seconds = seconds + switched * self.switch_seconds()
        chosen = np.take_along_axis(own, choices[:, :, None], axis=2)[:, :, 0]
        self._learn(k)
        self.k, self.choices = k.copy(), choices.copy()
        self.seconds = self.seconds + seconds
        self.window += 1
        return Outcome(
            seconds=seconds,
            ran_out=ran_out,
            switched=switched,
            peak_bytes=peak,
            steps=steps,
            step_s=step_s,
            unit_seconds=chosen * course.length[:, window][:, None],
            noise_scale=self.known_noise_scale(),
        )

    def judged_seconds(self, window: int, k: Indices, choices: Indices) -> Floats:
        """Return what a window takes under a plan, running out of memory included, switching to it left out."""
        course = self._course()
        plans = Plans(course.job, k, choices)
        seconds = self.window_seconds(window, k, choices, course.length[:, window])
        ran_out = self.arrays.peak_bytes(plans, course.longest[:, window]) > course.budget[:, window]
        return np.where(ran_out, self._retried(window, seconds), seconds)

    def switch_seconds(self) -> Floats:
        """Return what a switch costs each lane."""
        return self.strengths.switch_windows * self.unit_of_time

    def known_noise_scale(self) -> Floats:
        """Return the estimate of each lane's noise scale; NaN while unknown."""
        if not self.strengths.noise_error:
            return self.noise_scale(min(self.window, self.windows - 1))
        known = (self._trace > 0) & (self._square > 0)
        return np.where(known, self._trace / np.where(known, self._square, 1.0), np.nan)

    def _retried(self, window: int, seconds: Floats) -> Floats:
        """Return the seconds of a window that ran out of memory: part of it lost, then the leanest plan, and back."""
        course = self._course()
        k, choices = self._leanest[0][course.job], self._leanest[1][course.job]
        again = self.window_seconds(window, k, choices, course.length[:, window])
        return self.strengths.retry_windows * seconds + again + 2 * self.switch_seconds()

    def _learn(self, k: Indices) -> None:
        """Feed the noise scale's moving averages, where a step had several micro-batches or could be cut in two."""
        course, window, facts = self._course(), self.window, self.facts
        job = course.job
        noise = self.noise_scale(window)
        pieces = self.arrays.accumulation_steps[job, k]
        batch = facts.batch[job] * np.where(facts.adaptive[job], pieces, 1)
        seen = (pieces > 1) | facts.splits[job]
        middle = (window + 0.5) / self.windows * self._effort[job]
        curve = facts.loss.take(job)
        square = (1 + middle / curve.scale) ** (-curve.exponent - 1)
        found = square * (1 + course.square_error[:, window] * np.minimum(0.2 + noise / batch, 2.0))
        past = np.minimum(0.8, self._learnt / (self._learnt + 1.0))
        trace = noise * square * course.trace_error[:, window]
        self._trace = np.where(seen, past * self._trace + (1 - past) * trace, self._trace)
        self._square = np.where(seen, past * self._square + (1 - past) * found, self._square)
        self._learnt = self._learnt + seen

    def _leanest_choices(self) -> tuple[Indices, Indices]:
        jobs = range(len(self.jobs))
        encoded = [self.arrays.encode(job, self.jobs[job].profile.space.leanest()) for job in jobs]
        return np.array([k for k, _ in encoded]), np.stack([choices for _, choices in encoded])

    def _course(self) -> Course:
        if self.course is None:
            raise ValueError("begin a course first")
        return self.course
