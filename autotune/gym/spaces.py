"""Observation and action spaces of the environments: an action is a plan, or the levers of a planner."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from autotune.gym.levers import RUN_FEATURES, SIZES
from autotune.gym.levers import UNIT_FEATURES as LEVER_UNIT_FEATURES
from autotune.gym.observation import GLOBAL_FEATURES, LIMIT, UNIT_FEATURES
from autotune.plan import PlanSpace


def action_space(space: PlanSpace) -> spaces.MultiDiscrete:
    """Return MultiDiscrete([k choices] + [precisions] per unit + [storages] per recomputable unit)."""
    return spaces.MultiDiscrete(np.array(space.sizes, dtype=np.int64))


def observation_space(max_units: int) -> spaces.Dict:
    """Return the space of :meth:`Observation.arrays`."""
    return spaces.Dict({"global": _box(len(GLOBAL_FEATURES)), "units": _box(max_units * len(UNIT_FEATURES))})


def lever_spaces(units: int) -> tuple[Any, spaces.MultiDiscrete]:
    """Return the observation space and the action space of one run whose actions are levers.

    An observation contains ``run``, shape (len(RUN_FEATURES),), and ``units``, shape (units x len(UNIT_FEATURES),),
    zeros for missing units. An action is ``MultiDiscrete(SIZES)``; see :mod:`autotune.gym.levers`.

    Args:
        units: number of units of the deepest job.
    """
    seen = spaces.Dict({"run": _box(len(RUN_FEATURES)), "units": _box(units * len(LEVER_UNIT_FEATURES))})
    return seen, spaces.MultiDiscrete(np.array(SIZES, dtype=np.int64))


def _box(size: int) -> spaces.Space[Any]:
    return spaces.Box(-LIMIT, LIMIT, shape=(size,), dtype=np.float32)
