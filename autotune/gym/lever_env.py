"""A real training job as an environment of levers: a planner makes the plans, and an action adjusts the planner.

Actions and observations are those of the simulator in which the shipped policy was trained. An untrained policy does
not change the planner.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from autotune.cost_model.profile import Profile
from autotune.errors import InputError
from autotune.gym.job_env import TuningEnv
from autotune.gym.levers import SIZES, Features, levers_of
from autotune.gym.planned_run import PlannedRun
from autotune.gym.spaces import lever_spaces
from autotune.simulator.online_planner import Situation
from autotune.simulator.planner_settings import PlannerSettings


class LeverEnv(gymnasium.Env[dict[str, Features], NDArray[np.int64]]):
    """An environment whose actions adjust a planner, window by window, while a job trains.

    An action is ``MultiDiscrete(SIZES)``, see :mod:`autotune.gym.levers`; an observation contains ``run``, shape
    (len(RUN_FEATURES),), and ``units``, shape (units x len(UNIT_FEATURES),). Rewards, ``terminated`` and ``truncated``
    are those of :class:`TuningEnv`.

    Args:
        env: the environment whose actions are plans.
        profile: the profile of the environment's job.
        settings: settings of the planner.

    Raises:
        InputError: if the profile belongs to another job.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own attribute

    def __init__(self, env: TuningEnv, profile: Profile, settings: PlannerSettings | None = None) -> None:
        if profile.units != env.plan_space.units:
            raise InputError("the profile's units are not the job's", where=f"profile of {profile.job}")
        self.env = env
        self.observation_space: Any
        self.observation_space, self.action_space = lever_spaces(len(profile.units))
        self._profile = profile
        self._settings = settings or PlannerSettings()
        self._run: PlannedRun
        self._situation: Situation

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Features], dict[str, Any]]:
        """Restart the job and run one window of the baseline.

        Raises:
            InputError: if the baseline cannot run.
        """
        super().reset(seed=seed)
        _, info = self.env.reset(seed=seed, options=options)
        self._run = PlannedRun(self._profile, self.env.memory_budget_bytes, self._settings)
        return self._observe(), info

    def step(self, action: NDArray[np.int64]) -> tuple[dict[str, Features], float, bool, bool, dict[str, Any]]:
        """Run one window under the planner's plan with these levers.

        Raises:
            InputError: if the action lies outside the action space.
        """
        levers = np.asarray(action)
        if not self.action_space.contains(levers.astype(np.int64)):
            raise InputError(f"action is {action!r}", where="environment", allowed=f"whole numbers below {SIZES}")
        number = self._run.planner.decide(self._situation, levers_of(levers.astype(np.int64)[None]))
        plan = self.env.plan_space.check(self._run.plan_of(number))
        _, reward, terminated, truncated, info = self.env.step(np.array(self.env.plan_space.encode(plan)))
        return self._observe(), reward, terminated, truncated, info

    def close(self) -> None:
        """Close the engine."""
        self.env.close()

    def _observe(self) -> dict[str, Features]:
        assert self.env.observation is not None
        self._run.observe(self.env.observation)
        self._situation = self._run.situation(self.env.observation)
        run, units = self._run.watch.features(self._situation)
        return {"run": run[0], "units": units[0].reshape(-1)}
