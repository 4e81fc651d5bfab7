"""Simulated training runs as Gymnasium environments, in which the shipped policy is trained.

An action sets a planner's levers for one window of a run; observations and rewards are those of
:class:`autotune.gym.moving_env.MovingEnv`. Sequence lengths, memory budgets, noise and the machine's speed change
during a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from autotune.errors import InputError
from autotune.gym.levers import SIZES, Actions, Features
from autotune.gym.moving_env import MovingEnv
from autotune.gym.spaces import lever_spaces
from autotune.simulator.moving_conditions import RECORDED, Strengths
from autotune.simulator.planner_settings import PlannerSettings
from autotune.simulator.random_jobs import draw_job
from autotune.simulator.simulated_job import SimulatedJob

# Number of jobs to draw if none are given, and the range of the number of recomputable units in each.
_JOBS, _DEPTH = 16, (2, 16)


class SimulatedVectorEnv(VectorEnv[dict[str, Features], Actions, Any]):
    """Many simulated runs at once; one ``step`` advances each run by one window.

    All runs have the same number of windows and end together. The step that ends them starts new runs, and its
    ``infos`` contain the last observation as ``final_obs``. They also contain ``seconds``, the duration of each window,
    and ``ran_out``, whether it ran out of memory.

    Args:
        jobs: the jobs that runs are drawn from; ``None`` draws 16 random jobs.
        num_envs: number of runs.
        strengths: how strongly the conditions change during a run.
        windows: number of windows in a run.
        settings: settings of the planner.
        seed: random seed for jobs and runs, until ``reset`` gives a new one for the runs.

    Raises:
        InputError: if ``num_envs``, ``windows`` or the number of jobs is below 1.
    """

    def __init__(
        self,
        jobs: Sequence[SimulatedJob] | None = None,
        num_envs: int = 64,
        *,
        strengths: Strengths = RECORDED,
        windows: int = 40,
        settings: PlannerSettings | None = None,
        seed: int = 0,
    ) -> None:
        self._env = _moving(jobs, strengths, num_envs, windows, settings, seed)
        self.num_envs = num_envs
        self.metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}
        # Typed as Any: Gymnasium's Dict is not typed as a space of dictionaries.
        self.single_observation_space: Any
        self.single_observation_space, self.single_action_space = lever_spaces(self._env.runs.arrays.max_units)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Features], dict[str, Any]]:
        """Start new runs.

        Args:
            seed: random seed for all further runs; ``None`` continues the current random sequence.
            options: not used.

        Raises:
            InputError: if the seed is a list.
        """
        if isinstance(seed, list):
            raise InputError("seed is a list", where="environment", allowed="one number for all runs")
        if seed is not None:
            self._env.reseed(seed)
        return _observation(self._env.reset()), {}

    def step(
        self, actions: Actions
    ) -> tuple[dict[str, Features], NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Advance every run by one window, under the plans that the planner chooses with these levers.

        Args:
            actions: shape (num_envs, len(SIZES)).

        Returns:
            Observations, rewards, whether each run ended at its target, whether it was truncated (never), and
            ``infos``. A reward is the time saved over the planner alone in this window, in percent of the time of the
            planner's whole run.

        Raises:
            InputError: if an action lies outside the action space.
        """
        features, rewards, ended = self._env.step(_levers(actions, self.num_envs))
        observation = _observation(features)
        infos: dict[str, Any] = {"seconds": self._env.seen.total_s, "ran_out": self._env.seen.ran_out}
        if ended:
            infos["final_obs"] = observation
            observation = _observation(self._env.reset())
        return observation, rewards, np.full(self.num_envs, ended), np.zeros(self.num_envs, dtype=bool), infos


class SimulatedEnv(gymnasium.Env[dict[str, Features], NDArray[np.int64]]):
    """One simulated run; see :class:`SimulatedVectorEnv`.

    Args:
        jobs: the jobs that runs are drawn from; ``None`` draws 16 random jobs.
        strengths: how strongly the conditions change during a run.
        windows: number of windows in a run.
        settings: settings of the planner.
        seed: random seed for jobs and runs, until ``reset`` gives a new one for the runs.

    Raises:
        InputError: if ``windows`` or the number of jobs is below 1.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own attribute

    def __init__(
        self,
        jobs: Sequence[SimulatedJob] | None = None,
        *,
        strengths: Strengths = RECORDED,
        windows: int = 40,
        settings: PlannerSettings | None = None,
        seed: int = 0,
    ) -> None:
        self._env = _moving(jobs, strengths, 1, windows, settings, seed)
        self.observation_space: Any
        self.observation_space, self.action_space = lever_spaces(self._env.runs.arrays.max_units)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Features], dict[str, Any]]:
        """Start a new run.

        Args:
            seed: random seed for all further runs; ``None`` continues the current random sequence.
            options: not used.
        """
        super().reset(seed=seed)
        if seed is not None:
            self._env.reseed(seed)
        return _first(_observation(self._env.reset())), {}

    def step(self, action: NDArray[np.int64]) -> tuple[dict[str, Features], float, bool, bool, dict[str, Any]]:
        """Run one window under the plan that the planner chooses with these levers.

        Args:
            action: shape (len(SIZES),).

        Raises:
            InputError: if the action lies outside the action space, or the run has ended.
        """
        if self._env.ended:
            raise InputError("the run has ended", where="environment", allowed="reset() before the next step()")
        features, rewards, ended = self._env.step(_levers(np.asarray(action)[None], 1))
        seen = self._env.seen
        infos = {"seconds": float(seen.total_s[0]), "ran_out": bool(seen.ran_out[0])}
        return _first(_observation(features)), float(rewards[0]), ended, False, infos


def _moving(
    jobs: Sequence[SimulatedJob] | None,
    strengths: Strengths,
    lanes: int,
    windows: int,
    settings: PlannerSettings | None,
    seed: int,
) -> MovingEnv:
    if lanes < 1 or windows < 1 or (jobs is not None and not jobs):
        raise InputError("num_envs, windows or the number of jobs is below 1", where="environment")
    generator = np.random.default_rng(seed)
    drawn = [draw_job(generator, depth=_DEPTH) for _ in range(_JOBS)] if jobs is None else jobs
    return MovingEnv(drawn, strengths, lanes, windows=windows, settings=settings, seed=seed)


def _levers(actions: Any, lanes: int) -> Actions:
    """Return actions as whole numbers.

    Raises:
        InputError: if they are not whole numbers or lie outside the action space.
    """
    levers = np.asarray(actions)
    whole = levers.astype(np.int64)
    if levers.shape != (lanes, len(SIZES)) or not ((whole == levers) & (whole >= 0) & (whole < SIZES)).all():
        allowed = f"{lanes} x {len(SIZES)} whole numbers below {SIZES}"
        raise InputError(f"action is {actions!r}", where="environment", allowed=allowed)
    return whole


def _observation(features: tuple[Features, Features]) -> dict[str, Features]:
    run, units = features
    return {"run": run, "units": units.reshape(len(units), -1)}


def _first(observation: dict[str, Features]) -> dict[str, Features]:
    return {name: rows[0] for name, rows in observation.items()}
