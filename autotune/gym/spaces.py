"""State the environment's spaces: an action is a plan, an observation the named features."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from autotune.gym.observation import GLOBAL_FEATURES, LIMIT, UNIT_FEATURES
from autotune.plan import PlanSpace


def action_space(space: PlanSpace) -> spaces.MultiDiscrete:
    """Return MultiDiscrete([k choices] + [precisions] per unit + [storages] per recomputable unit)."""
    return spaces.MultiDiscrete(np.array(space.sizes, dtype=np.int64))


def observation_space(max_units: int) -> spaces.Dict:
    """Return the bounds of :meth:`Observation.arrays`."""

    def box(size: int) -> spaces.Box:
        return spaces.Box(-LIMIT, LIMIT, shape=(size,), dtype=np.float32)

    return spaces.Dict({"global": box(len(GLOBAL_FEATURES)), "units": box(max_units * len(UNIT_FEATURES))})
