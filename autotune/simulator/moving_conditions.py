"""Simulated training runs under moving conditions: lengths, budgets, speeds and noise that a planner cannot know.

A run consists of windows of equal progress: under every plan, a window ends at the same loss, so that plans are
compared by time alone. Everything that happens to a lane is drawn in advance. Two methods on the same course therefore
meet the same conditions, and the best possible sequence of plans can be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from autotune.cost_model.cost_arrays import CostArrays, Floats, Indices
from autotune.cost_model.goodput import step_efficiency
from autotune.cost_model.plan_pool import PoolSettings, make_pool
from autotune.io.documents import STRICT
from autotune.simulator.dip_families import draw_events
from autotune.simulator.online_planner import LOOK_AHEAD, Lanes, Seen, Situation
from autotune.simulator.simulated_job import Flags, JobArrays, SimulatedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Strengths:
    """How strongly each condition varies; 0 turns a variation off.

    Attributes:
        noise_error: relative error of a single estimate of tr(Sigma) or |G|^2, before averaging; with 0, planners know
            the noise scale exactly.
        cost_error: standard deviation of the logarithm of a unit's real cost in a precision, relative to its profile.
        common_share: share of that variance that is common to all units in a precision.
        time_noise: standard deviation of the logarithm of a window's measured seconds per step.
        drift: standard deviation of the logarithm of each precision's speed, which changes slowly.
        drift_windows: correlation time of the drift, in windows.
        length_lanes: share of lanes whose sequence lengths vary; planners know which.
        length: standard deviation of the logarithm of a window's sequence length.
        length_windows: correlation time of the length, in windows.
        curriculum: growth of the logarithm of the length from the first window to the last.
        jitter: standard deviation of the logarithm of a window's longest batch, relative to its mean.
        event_families: names of :data:`autotune.simulator.dip_families.FAMILIES`; each lane draws one of them.
        event_every: mean windows from one event (such as an evaluation that shares the device) to the next; 0 for none.
        event_share: share of the budget that an event leaves; ``spread`` applies to its logarithm.
        event_depth: standard deviation of the depth of an event, as a share of its lane's mean depth (a logarithm).
        event_windows: largest duration of an event, in windows; each lane draws its own, from 1 to this. Only the first
            window of an unannounced event is a surprise.
        event_told: share of lanes in which events are announced to the planner.
        switch_windows: cost of a switch of plans, in windows of the baseline.
        retry_windows: share of a window's time that is lost when it runs out of memory.
        spread: largest factor by which the strengths of a lane differ from these, drawn for each variation separately.
    """

    __pydantic_config__ = STRICT

    noise_error: float = 0.0
    cost_error: float = 0.0
    common_share: float = 0.6
    time_noise: float = 0.0
    drift: float = 0.0
    drift_windows: float = 12.0
    length_lanes: float = 1.0
    length: float = 0.0
    length_windows: float = 6.0
    curriculum: float = 0.0
    jitter: float = 0.0
    event_families: tuple[str, ...] = ("periodic",)
    event_every: int = 0
    event_share: float = 0.8
    event_depth: float = 0.0
    event_windows: int = 1
    event_told: float = 1.0
    switch_windows: float = 0.0
    retry_windows: float = 1.0
    spread: float = 1.0

    def only(self, *names: str) -> Strengths:
        """Return strengths with only the named variations on; values that shape a variation are kept."""
        shapes = (
            "common_share",
            "drift_windows",
            "length_lanes",
            "length_windows",
            "event_families",
            "event_share",
            "event_depth",
            "event_windows",
            "event_told",
            "retry_windows",
            "spread",
        )
        kept = {name: value for name, value in asdict(self).items() if name in names or name in shapes}
        return Strengths(**kept)


# The largest values fitted to recorded runs, rounded up, where the runs show a variation; lengths are those of text.
# Curricula and events are assumed, not measured. The shipped policy is trained under these strengths.
RECORDED = Strengths(
    noise_error=0.75,
    cost_error=0.2,
    common_share=0.6,
    time_noise=0.05,
    drift=0.1,
    drift_windows=12,
    length_lanes=0.67,
    length=0.1,
    length_windows=2,
    jitter=0.12,
    curriculum=0.4,
    event_families=("periodic", "missing", "bursts"),
    event_every=8,
    event_share=0.7,
    event_depth=0.15,
    event_windows=3,
    event_told=0.5,
    switch_windows=0.05,
    retry_windows=1,
    spread=2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The conditions of n lanes in w windows.

    Attributes:
        job: shape (n,), number of each lane's job.
        budget: shape (n, w), memory budget of each window, in bytes.
        told: shape (n, w), budget that is announced just before each window, in bytes.
        announced: shape (n,), whether budgets of later windows are also announced.
        still: shape (n,), whether all sequences have one length.
        length: shape (n, w), mean sequence length relative to the profiled one.
        longest: shape (n, w), sequence length of the window's longest batch, relative to the profiled one.
        drift: shape (n, w, precisions), factor on the seconds of each precision.
        cost: shape (n, max_units, precisions), factor on the seconds of each unit and precision.
        time_noise: shape (n, w), factor on the measured seconds per step.
        switch_windows: shape (n,), cost of a switch of plans, in windows of the baseline.
        trace_error: shape (n, w), factor on the estimate of tr(Sigma).
        square_error: shape (n, w), normal error of the estimate of |G|^2, before scaling for the batch size.
    """

    job: Indices
    budget: Floats
    told: Floats
    announced: Flags
    still: Flags
    length: Floats
    longest: Floats
    drift: Floats
    cost: Floats
    time_noise: Floats
    switch_windows: Floats
    trace_error: Floats
    square_error: Floats

    def take(self, lanes: Indices) -> Course:
        """Return the course of some lanes."""
        return Course(**{item.name: getattr(self, item.name)[lanes] for item in fields(self)})


def draw_course(
    generator: np.random.Generator,
    strengths: Strengths,
    arrays: CostArrays,
    job: Indices,
    budget_bytes: Floats,
    windows: int,
) -> Course:
    """Return a course drawn at random.

    Args:
        generator: source of random numbers.
        strengths: how strongly the conditions vary.
        arrays: costs of the jobs.
        job: shape (n,), number of each lane's job.
        budget_bytes: shape (n,), each lane's budget outside of events.
        windows: number of windows.
    """
    n, units, precisions = len(job), arrays.max_units, arrays.max_precisions

    def own(strength: float) -> Floats:
        """Return the strength of a variation in each lane, shape (n, 1)."""
        return np.asarray(strength * np.exp(np.log(strengths.spread) * generator.uniform(-1, 1, (n, 1))))

    still = generator.random((n, 1)) >= strengths.length_lanes
    if not (strengths.length or strengths.curriculum or strengths.jitter):
        still = np.ones((n, 1), dtype=bool)
    length = own(strengths.length) * _wandering(generator, (n, windows), strengths.length_windows)
    length += own(strengths.curriculum) * np.linspace(-0.5, 0.5, windows)
    jitter = np.where(still, 0.0, own(strengths.jitter) * np.abs(generator.standard_normal((n, windows))))
    length = np.where(still, 0.0, length)
    event, begins = draw_events(
        generator,
        strengths.event_families,
        np.round(own(strengths.event_every)).astype(np.int64),
        generator.integers(1, strengths.event_windows + 1, (n, 1)),
        windows,
    )
    depth = np.maximum(1 + strengths.event_depth * generator.standard_normal((n, windows)), 0.2)
    # All windows of an event have the depth of its first.
    depth = np.take_along_axis(depth, np.cumsum(begins, axis=1) - 1, axis=1)
    left = np.exp(own(np.log(strengths.event_share)) * depth)
    drift = own(strengths.drift)[:, :, None] * _wandering(generator, (n, precisions, windows), strengths.drift_windows)
    common, alone = generator.standard_normal((n, 1, precisions)), generator.standard_normal((n, units, precisions))
    cost = np.sqrt(strengths.common_share) * common + np.sqrt(1 - strengths.common_share) * alone
    error = own(strengths.noise_error)
    announced = generator.random((n, 1)) < strengths.event_told
    return Course(
        job=job,
        budget=budget_bytes[:, None] * np.where(event, left, 1.0),
        told=budget_bytes[:, None] * np.where(event & (announced | ~begins), left, 1.0),
        announced=announced[:, 0],
        still=still[:, 0],
        length=np.exp(length),
        longest=np.exp(length + jitter),
        drift=np.exp(np.swapaxes(drift, 1, 2)),
        cost=np.exp(own(strengths.cost_error)[:, :, None] * cost),
        time_noise=np.exp(own(strengths.time_noise) * generator.standard_normal((n, windows))),
        switch_windows=own(strengths.switch_windows)[:, 0],
        trace_error=np.exp(error * generator.standard_normal((n, windows)) - error**2 / 2),
        square_error=error * generator.standard_normal((n, windows)),
    )


def _wandering(generator: np.random.Generator, shape: tuple[int, ...], memory: float) -> Floats:
    """Return stationary first-order autoregressive series of unit variance along the last axis."""
    values = generator.standard_normal(shape)
    keep = np.exp(-1.0 / memory)
    for place in range(1, shape[-1]):
        values[..., place] = keep * values[..., place - 1] + np.sqrt(1 - keep**2) * values[..., place]
    return np.asarray(values)


class MovingRuns:
    """Simulated runs of many lanes under the conditions of a course.

    Args:
        jobs: the jobs.
        strengths: only ``noise_error`` and ``retry_windows`` are used; everything else is in the course.
        windows: windows per run.
        pool: settings for generating plans.

    Attributes:
        arrays: the profiled costs, which planners know.
        pool: the plans of each job.
        facts: how the jobs converge, which planners do not know.
        lanes: what planners know about the lanes.
        window: number of the next window.
        seconds: shape (n,), time so far.
        plan: shape (n,), number of each lane's running plan.
    """

    def __init__(
        self,
        jobs: Sequence[SimulatedJob],
        strengths: Strengths,
        *,
        windows: int = 40,
        pool: PoolSettings | None = None,
    ) -> None:
        self.jobs = tuple(jobs)
        self.strengths = strengths
        self.windows = windows
        self.arrays = CostArrays([job.profile for job in jobs])
        self.pool = make_pool(self.arrays, pool)
        self.facts = JobArrays.of(self.jobs, self.arrays)
        effort = np.array([job.convergence.metric.effort_to(job.target) for job in jobs])
        if not (np.isfinite(effort) & (effort > 0)).all():
            raise ValueError("every job must be able to reach its target and must not start at it")
        self._effort = effort
        self._errors = self._squared_errors()
        self.course: Course | None = None
        self.lanes: Lanes

    def begin(self, course: Course) -> None:
        """Start a run of each lane under its baseline plan."""
        n = len(course.job)
        self.course = course
        self.lanes = Lanes.of(self.pool, self.arrays, course.job, course.still)
        self.window = 0
        self.seconds = np.zeros(n)
        self.plan = self.lanes.pool.baseline
        self._trace, self._square, self._learnt = np.zeros(n), np.zeros(n), np.zeros(n)
        # Switching costs are given in windows of the baseline at the profiled length.
        told = self.lanes.pool.seconds_of(self.plan, np.ones_like(course.cost), np.ones(n))
        self.baseline_s = self.steps(0, self.plan[:, None])[:, 0] * told
        self.switch_s = course.switch_windows * self.baseline_s

    def noise_scale(self, window: int) -> Floats:
        """Return the true noise scale of each lane in a window, in samples."""
        course = self._course()
        facts, job = self.facts, course.job
        loss = facts.loss.take(job).at((window + 0.5) / self.windows * self._effort[job])
        law = facts.noise_reference[job] * (facts.noise_loss[job] / loss) ** facts.noise_exponent[job]
        return np.asarray(law * facts.noise_factor[job])

    def steps(self, window: int, plans: Indices) -> Floats:
        """Return the optimizer steps that a window takes under plans of shape (n, m), in the same shape."""
        lanes, rows = self.lanes, np.arange(len(self.lanes))[:, None]
        job = self._course().job
        batch = lanes.batch[:, None] * np.where(lanes.adaptive[:, None], lanes.steps[rows, plans], 1.0)
        worth = step_efficiency(batch, self.noise_scale(window)[:, None], self._errors[job[:, None], plans])
        return np.asarray((self._effort[job] / self.windows)[:, None] / worth)

    def factor(self, window: int) -> Floats:
        """Return the real cost of each unit relative to its profile, shape (n, max_units, precisions)."""
        course = self._course()
        return course.cost * course.drift[:, window][:, None, :]

    def every_plan(self, window: int) -> Floats:
        """Return the seconds of a window under every plan, shape (n, plans), without the cost of switching."""
        course, pool = self._course(), self.lanes.pool
        every = np.broadcast_to(np.arange(pool.k.shape[1]), pool.k.shape)
        working = self.steps(window, every) * pool.seconds_per_step(self.factor(window), course.length[:, window])
        ran_out = pool.peak_bytes(course.longest[:, window]) > course.budget[:, window][:, None]
        again = np.take_along_axis(working, pool.leanest[:, None], axis=1)
        retried = self.strengths.retry_windows * working + again + 2 * self.switch_s[:, None]
        return np.where(pool.there, np.where(ran_out, retried, working), np.inf)

    def situation(self) -> Situation:
        """Return what a planner knows before the next window."""
        course, window = self._course(), self.window
        ahead = np.minimum(np.arange(window, window + LOOK_AHEAD), self.windows - 1)
        told = course.told[:, ahead]
        return Situation(
            budget=np.where(course.announced[:, None], told, told[:, :1]),
            progress=np.full(len(course.job), window / self.windows),
            windows_left=np.full(len(course.job), float(self.windows - window)),
            noise_scale=self.known_noise_scale(),
            switch_s=self.switch_s,
        )

    def run(self, plan: Indices) -> Seen:
        """Run the next window of every lane and return its measurements.

        Args:
            plan: shape (n,), number of each lane's plan.
        """
        course, window, pool = self._course(), self.window, self.lanes.pool
        length, factor = course.length[:, window], self.factor(window)
        ran_out = pool.peak_of(plan, course.longest[:, window]) > course.budget[:, window]
        # The plan of the first window is the initial plan and costs no switch.
        switched = (plan != self.plan) & (window > 0)
        step_s = pool.seconds_of(plan, factor, length)
        working = self.steps(window, plan[:, None])[:, 0] * step_s
        again = self.steps(window, pool.leanest[:, None])[:, 0] * pool.seconds_of(pool.leanest, factor, length)
        # Part of the window is lost; then the leanest plan repeats the window, and the run switches back.
        retried = self.strengths.retry_windows * working + again + 2 * self.switch_s
        seconds = np.where(ran_out, retried, working) + switched * self.switch_s
        self._learn(plan)
        self.plan = plan
        self.seconds = self.seconds + seconds
        self.window += 1
        return Seen(
            plan=plan,
            length=length,
            longest=course.longest[:, window],
            dip=np.log(course.told[:, window] / course.budget[:, window]),
            budget=course.budget[:, window],
            step_s=step_s * course.time_noise[:, window],
            window_s=working,
            total_s=seconds,
            ran_out=ran_out,
        )

    def known_noise_scale(self) -> Floats:
        """Return the estimated noise scale of each lane in samples, shape (n,); NaN while unknown."""
        if not self.strengths.noise_error:
            return self.noise_scale(min(self.window, self.windows - 1))
        known = (self._trace > 0) & (self._square > 0)
        return np.where(known, self._trace / np.where(known, self._square, 1.0), np.nan)

    def _learn(self, plan: Indices) -> None:
        """Update the estimate of the noise scale in lanes whose steps have, or can be split into, micro-batches."""
        course, window, facts, lanes = self._course(), self.window, self.facts, self.lanes
        job = course.job
        noise = self.noise_scale(window)
        pieces = lanes.steps[np.arange(len(lanes)), plan]
        batch = lanes.batch * np.where(lanes.adaptive, pieces, 1.0)
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

    def _squared_errors(self) -> Floats:
        """Return the squared relative gradient error of each job's plans, shape (jobs, plans)."""
        jobs, size, _ = self.pool.choices.shape
        errors = np.zeros((jobs, size))
        for job in range(jobs):
            own, choices = self.facts.squared_errors[job], self.pool.choices[job]
            errors[job] = np.take_along_axis(own[None], choices[:, :, None], axis=2)[:, :, 0].sum(axis=1)
        return errors

    def _course(self) -> Course:
        if self.course is None:
            raise ValueError("begin a course first")
        return self.course
