"""Decide a planner's levers window by window while conditions move: the environment that the shipped policy learns in.

The planner makes the plans. An action only leans on it: how much memory to keep in reserve, how sticky to be, how to
value a larger k and 16-bit formats. With every lever in the middle the planner is what it is, so that an untrained
policy is the planner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.physics.cost_arrays import Floats, Plans
from autotune.physics.moving import Course, MovingRuns, Outcome, Strengths, draw_course
from autotune.physics.planning import Levers, Planner, PlannerSettings, run_planner
from autotune.physics.price_solver import PriceSolver
from autotune.physics.simulated_job import SimulatedJob

LEVER_VERSION = 1
# What each number of an action stands for; the neutral one is 0, 0, 0 and 1.
RESERVES = (-0.15, -0.08, -0.04, 0.0, 0.05, 0.12, 0.25)
K_BIASES = (-0.6, -0.3, 0.0, 0.3, 0.6)
PRICES_16_BIT = (-0.15, 0.0, 0.15)
STICKINESS = (0.25, 0.5, 1.0, 2.0, 4.0)
SIZES = (len(RESERVES), len(K_BIASES), len(PRICES_16_BIT), len(STICKINESS))
NEUTRAL = (RESERVES.index(0.0), K_BIASES.index(0.0), PRICES_16_BIT.index(0.0), STICKINESS.index(1.0))
_SCALE = 100.0


def levers_of(actions: NDArray[np.int64]) -> Levers:
    """Return the levers that actions, shape (n, 4), stand for."""
    return Levers(
        reserve=np.array(RESERVES)[actions[:, 0]],
        k_bias=np.array(K_BIASES)[actions[:, 1]],
        price_16_bit=np.array(PRICES_16_BIT)[actions[:, 2]],
        stickiness=np.array(STICKINESS)[actions[:, 3]],
    )


@dataclass(slots=True)
class Memory:
    """Hold what a policy remembers of a run, per lane: moving averages with a short memory."""

    length: Floats
    change: Floats
    jump: Floats
    overflow: Floats
    ran_out: Floats
    noise: Floats
    noise_change: Floats
    surprise: Floats

    @classmethod
    def of(cls, lanes: int) -> Memory:
        """Return an empty memory."""
        return cls(*(np.zeros(lanes) for _ in range(8)))


class MovingEnv:
    """Run lanes of moving courses, all for the same number of windows.

    Args:
        jobs: the jobs that lanes draw from.
        strengths: how strongly things move.
        lanes: runs at once.
        windows: of a run.
        settings: how the planner plans where no lever is moved.
        seed: of jobs, budgets and courses.

    Attributes:
        lanes: runs at once.
        runs: the runs.
        planner: makes the plans.
        course: what happens.
        memory: what a policy remembers.
        ran_out: shape (lanes,), whether the last window ran out of memory.
        baseline_peak: shape (lanes,), bytes of the baseline plan.
    """

    def __init__(
        self,
        jobs: Sequence[SimulatedJob],
        strengths: Strengths,
        lanes: int = 256,
        *,
        windows: int = 40,
        settings: PlannerSettings | None = None,
        seed: int = 0,
    ) -> None:
        self.lanes = lanes
        self.course: Course
        self.planner: Planner
        self.memory: Memory
        self.runs = MovingRuns(jobs, strengths, windows=windows)
        self.settings = settings or PlannerSettings()
        self._solver = PriceSolver(self.runs.arrays)
        self._generator = np.random.default_rng(seed)
        self._peaks, self._least = self._bounds()
        self.reset()

    @property
    def window(self) -> int:
        """Return the next window, or the last one at the end."""
        return min(self.runs.window, self.runs.windows - 1)

    def reset(self, course: Course | None = None) -> NDArray[np.float32]:
        """Begin other runs and return the first observation, shape (lanes, features).

        Args:
            course: what shall happen; ``None`` draws it.
        """
        self.course = course or self.draw()
        self.lanes = len(self.course.job)
        # What the planner alone comes to on the same course: rewards are measured against it, window by window.
        self.planner_seconds = self._planner_alone()
        self.runs.begin(self.course)
        self.planner = Planner(self.runs, self.settings, self._solver)
        self.memory, self.ran_out = Memory.of(self.lanes), np.zeros(self.lanes, dtype=bool)
        self.baseline_peak = self._peaks[self.course.job]
        return self.observe()

    def draw(self, lanes: int | None = None) -> Course:
        """Return courses of jobs and budgets drawn at random."""
        n = self.lanes if lanes is None else lanes
        job = self._generator.integers(0, len(self.runs.jobs), n)
        share = np.exp(self._generator.uniform(np.log(0.3), 0.0, n))
        strengths = self.runs.strengths
        # Even a long window, in an event, must leave room for the leanest plan.
        needed = 1.15 * self._least[job] * np.exp(2 * strengths.length + strengths.curriculum / 2 + strengths.jitter)
        budget = np.maximum(share * self._peaks[job], needed / strengths.event_share)
        return draw_course(self._generator, strengths, self.runs.arrays, job, budget, self.runs.windows)

    def step(self, actions: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32], bool]:
        """Run a window under the planner's plans with these levers.

        Args:
            actions: shape (lanes, 4); see ``SIZES``.

        Returns:
            The next observation; rewards, shape (lanes,): time won over the planner alone, in percent of its run; and
            whether the runs have ended, all at once.
        """
        window = self.runs.window
        outcome = self.runs.run(*self.planner.decide(levers_of(actions)))
        self.planner.observe(outcome)
        self._remember(outcome, window)
        won = (self.planner_seconds[:, window] - outcome.seconds) / self.planner_seconds.sum(axis=1)
        return self.observe(), (_SCALE * won).astype(np.float32), self.runs.window >= self.runs.windows

    def observe(self) -> NDArray[np.float32]:
        """Return the features, shape (lanes, features), each within -5 and 5."""
        columns = [np.nan_to_num(read(self)) for read in FEATURES.values()]
        return np.clip(np.stack(columns, axis=1), -5, 5).astype(np.float32)

    def budget_now(self) -> Floats:
        """Return the budget of the next window."""
        return np.asarray(self.course.budget[:, self.window])

    def pressure(self) -> Floats:
        """Return the running plan's peak at the length last seen, over the next window's budget."""
        plans = Plans(self.course.job, self.runs.k, self.runs.choices)
        return self.runs.arrays.peak_bytes(plans, self.planner.length) / self.budget_now()

    def event_soon(self) -> Floats:
        """Return 1 over the windows until the next announced event; 0 where none is in sight."""
        ahead = self.course.event[:, self.window : self.window + 8]
        first = np.where(ahead.any(axis=1), ahead.argmax(axis=1) + 1.0, np.inf)
        return 1.0 / first

    def share(self, flags: NDArray[np.bool_]) -> Floats:
        """Return the share of each lane's units that a flag holds for."""
        return np.asarray(flags.sum(axis=1) / self.runs.arrays.num_units[self.course.job])

    def _planner_alone(self) -> Floats:
        self.runs.begin(self.course)
        planner = Planner(self.runs, self.settings, self._solver)
        seconds = []
        for _ in range(self.runs.windows):
            outcome = self.runs.run(*planner.decide())
            planner.observe(outcome)
            seconds.append(outcome.seconds)
        return np.stack(seconds, axis=1)

    def _remember(self, outcome: Outcome, window: int) -> None:
        course, memory, weight = self.course, self.memory, 0.3
        length = np.log(course.length[:, window])
        before = np.log(course.length[:, window - 1]) if window else length
        noise = np.nan_to_num(np.log(outcome.noise_scale / self.runs.facts.batch[course.job]))
        believed = np.log(np.maximum(self.planner.believed_step_seconds(), 1e-12))

        def mix(old: Floats, new: Floats) -> Floats:
            return old + weight * (new - old)

        memory.length = mix(memory.length, length)
        memory.change = mix(memory.change, length - before)
        memory.jump = mix(memory.jump, np.abs(length - before))
        memory.overflow = mix(memory.overflow, np.log(course.longest[:, window]) - length)
        memory.ran_out = mix(memory.ran_out, outcome.ran_out.astype(float))
        memory.noise_change = mix(memory.noise_change, noise - memory.noise)
        memory.noise = noise
        memory.surprise = mix(memory.surprise, np.log(outcome.step_s) - believed)
        self.ran_out = outcome.ran_out

    def _bounds(self) -> tuple[Floats, Floats]:
        """Return the peak of each job's baseline and of its leanest plan."""
        arrays, jobs = self.runs.arrays, np.arange(len(self.runs.jobs))
        none = np.zeros((len(jobs), arrays.max_units), dtype=np.int64)
        baseline = arrays.peak_bytes(Plans(jobs, np.zeros(len(jobs), dtype=np.int64), none))
        leanest, _ = self._solver.solve(jobs, np.zeros(len(jobs)))
        return baseline, arrays.peak_bytes(leanest)


# What a policy is shown, by name; everything else that it could know follows from these.
FEATURES: dict[str, Callable[[MovingEnv], Floats]] = {
    "progress": lambda e: np.full(e.lanes, e.runs.window / e.runs.windows),
    "length": lambda e: np.log(e.planner.length),
    "length_mean": lambda e: e.memory.length,
    "length_change": lambda e: 10 * e.memory.change,
    "length_jump": lambda e: 10 * e.memory.jump,
    "longest_over_length": lambda e: 10 * e.memory.overflow,
    "ran_out": lambda e: e.memory.ran_out,
    "ran_out_now": lambda e: e.ran_out.astype(float),
    "pressure": lambda e: e.pressure(),
    "budget": lambda e: np.log(e.budget_now() / e.baseline_peak),
    "event_now": lambda e: e.course.event[:, e.window].astype(float),
    "event_next": lambda e: e.course.event[:, min(e.window + 1, e.runs.windows - 1)].astype(float),
    "event_soon": lambda e: e.event_soon(),
    "switch_cost": lambda e: np.full(e.lanes, e.runs.strengths.switch_windows),
    "noise_known": lambda e: (~np.isnan(e.runs.known_noise_scale())).astype(float),
    "noise": lambda e: e.memory.noise,
    "noise_change": lambda e: 5 * e.memory.noise_change,
    "adaptive": lambda e: e.runs.facts.adaptive[e.course.job].astype(float),
    "k": lambda e: np.log2(e.runs.arrays.accumulation_steps[e.course.job, e.runs.k]),
    "cost_surprise": lambda e: 5 * e.memory.surprise,
    "recomputed": lambda e: e.share(e.runs.choices % 2 == 1),
    "lowered": lambda e: e.share(e.runs.choices // 2 > 0),
    "depth": lambda e: np.log2(1 + e.runs.arrays.num_units[e.course.job]) / 4,
}


def neutral_actions(lanes: int) -> NDArray[np.int64]:
    """Return the actions that leave the planner alone, shape (lanes, 4)."""
    return np.tile(np.array(NEUTRAL, dtype=np.int64), (lanes, 1))


def planner_reserve(env: MovingEnv, reserves: Sequence[float] = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4)) -> float:
    """Return the one reserve with which the planner alone is fastest on average, on courses of its own."""
    courses = env.draw(min(env.lanes, 128))
    means = {}
    for reserve in reserves:
        settings = PlannerSettings(reserve=reserve, horizon=env.settings.horizon, correction=env.settings.correction)
        seconds, _ = run_planner(env.runs, courses, settings)
        means[reserve] = float(np.mean(seconds / env.runs.unit_of_time))
    return min(means, key=means.__getitem__)
