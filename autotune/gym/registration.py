"""Register the environments with Gymnasium; importing this file loads neither torch nor a job."""

from __future__ import annotations

from gymnasium.envs.registration import register, registry

from autotune.catalog import catalog

_ENTRY_POINT = "autotune.gym.env:TuningEnv"


def register_environments() -> None:
    """Register ``autotune/Tuning-v0`` and one environment per reference job, once.

    Measured times are part of what is observed, so they are declared non-deterministic.
    """
    wanted = {"autotune/Tuning-v0": {}, **{f"autotune/{name}-v0": {"job": name} for name in catalog()}}
    for name, arguments in wanted.items():
        if name not in registry:
            register(name, _ENTRY_POINT, nondeterministic=True, kwargs=arguments)
