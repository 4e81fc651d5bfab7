"""The environment in which the shipped policy is trained: actions set a planner's levers while conditions vary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.gym.levers import Actions, Features, Watch, levers_of
from autotune.simulator.clairvoyant import run_planner
from autotune.simulator.moving_conditions import Course, MovingRuns, Strengths, draw_course
from autotune.simulator.online_planner import Planner, Seen
from autotune.simulator.planner_settings import PlannerSettings
from autotune.simulator.simulated_job import SimulatedJob

_SCALE = 100.0
# Budgets are drawn between this share of the baseline's peak and the whole peak.
_SMALLEST_SHARE = 0.3


class MovingEnv:
    """Many simulated runs at once, all with the same number of windows.

    Args:
        jobs: the jobs that runs are drawn from.
        strengths: how strongly the conditions vary.
        lanes: number of runs.
        windows: windows per run.
        settings: settings of the planner.
        clones: number of neighbouring lanes that share a course, so that their rewards can be compared.
        seed: random seed for jobs, budgets and courses.

    Attributes:
        lanes: number of runs.
        clones: number of neighbouring lanes that share a course.
        settings: settings of the planner.
        runs: the runs.
        course: the conditions of the runs.
        seen: measurements of the last window.
        planner_seconds: shape (lanes, windows), seconds under the planner alone on the same course.
    """

    def __init__(
        self,
        jobs: Sequence[SimulatedJob],
        strengths: Strengths,
        lanes: int = 256,
        *,
        windows: int = 40,
        settings: PlannerSettings | None = None,
        clones: int = 1,
        seed: int = 0,
    ) -> None:
        self.lanes = lanes
        self.course: Course
        self.seen: Seen
        self._watch: Watch
        self._planner: Planner
        self.clones = clones
        self.runs = MovingRuns(jobs, strengths, windows=windows)
        self.settings = settings or PlannerSettings()
        self._generator = np.random.default_rng(seed)
        pool = self.runs.pool
        self._peaks = pool.peak_of(pool.baseline, np.ones(len(jobs)))
        self.reset()

    @property
    def generator_state(self) -> dict[str, Any]:
        """The state of the generator of courses, as a JSON object."""
        return dict(self._generator.bit_generator.state)

    @generator_state.setter
    def generator_state(self, state: dict[str, Any]) -> None:
        self._generator.bit_generator.state = state

    def reseed(self, seed: int) -> None:
        """Draw all further courses from another seed."""
        self._generator = np.random.default_rng(seed)

    @property
    def ended(self) -> bool:
        """Return whether the runs have ended."""
        return self.runs.window >= self.runs.windows

    def reset(self, course: Course | None = None) -> tuple[Features, Features]:
        """Start new runs and return the first observation; see :meth:`Watch.features`.

        Args:
            course: the conditions; ``None`` draws them.
        """
        drawn = course or self.draw(self.lanes // self.clones)
        # Rewards are relative to the planner alone on the same course, window by window.
        alone = run_planner(self.runs, drawn, self.settings)
        repeats = 1 if course is not None else self.clones
        cloned = np.repeat(np.arange(len(drawn.job)), repeats)
        self.course = drawn.take(cloned) if repeats > 1 else drawn
        self.planner_seconds = alone[cloned]
        self.lanes = len(self.course.job)
        self.runs.begin(self.course)
        self._planner = Planner(self.runs.lanes, self.settings)
        self._watch = Watch(self._planner)
        return self._watch.features(self.runs.situation())

    def draw(self, lanes: int | None = None) -> Course:
        """Return a course of random jobs and budgets.

        Args:
            lanes: number of lanes; ``None`` for the environment's own number.
        """
        n, generator, runs = self.lanes if lanes is None else lanes, self._generator, self.runs
        job = generator.integers(0, len(runs.jobs), n)
        share = np.exp(generator.uniform(np.log(_SMALLEST_SHARE), 0.0, n))
        course = draw_course(generator, runs.strengths, runs.arrays, job, share * self._peaks[job], runs.windows)
        # The leanest plan must fit even the longest batch during an event.
        pool = runs.pool.take(job)
        needed = pool.peak_of(pool.leanest, course.longest.max(axis=1))
        lift = np.maximum(1.02 * needed / course.budget.min(axis=1), 1.0)
        return replace(course, budget=course.budget * lift[:, None], told=course.told * lift[:, None])

    def step(self, actions: Actions) -> tuple[tuple[Features, Features], NDArray[np.float32], bool]:
        """Run a window under the planner's plans with these levers.

        Args:
            actions: shape (lanes, levers); see ``SIZES``.

        Returns:
            The next observation; rewards, shape (lanes,): time saved against the planner alone, in percent of its run;
            and whether the runs have ended; all end together.
        """
        window = self.runs.window
        seen = self.runs.run(self._planner.decide(self._watch.situation, levers_of(actions)))
        situation = self.runs.situation()
        self._watch.observe(seen, situation.noise_scale)
        won = (self.planner_seconds[:, window] - seen.total_s) / self.planner_seconds.sum(axis=1)
        self.seen = seen
        return self._watch.features(situation), (_SCALE * won).astype(np.float32), self.ended


def planner_reserve(env: MovingEnv, reserves: Sequence[float]) -> float:
    """Return the ``reserve`` with which the planner alone is fastest on average, on newly drawn courses."""
    courses, means = env.draw(min(env.lanes, 256)), {}
    for reserve in reserves:
        seconds = run_planner(env.runs, courses, replace(env.settings, reserve=reserve))
        means[reserve] = float(np.mean(seconds.sum(axis=1) / env.runs.baseline_s))
    return min(means, key=means.__getitem__)
