"""Register the environments with Gymnasium; importing this file loads neither torch nor a job."""

from __future__ import annotations

from gymnasium.envs.registration import register, registry

from autotune.catalog import catalog

_ENTRY_POINT = "autotune.gym.env:TuningEnv"


def register_environments() -> None:
    """Register ``autotune/Tuning-v0``, one environment per reference job, and ``autotune/Simulated-v0``, once.

    Measured times are part of what is observed on real jobs, so these are declared non-deterministic; simulated runs
    come as a vector of environments only and repeat exactly.
    """
    wanted = {"autotune/Tuning-v0": {}, **{f"autotune/{name}-v0": {"job": name} for name in catalog()}}
    for name, arguments in wanted.items():
        if name not in registry:
            register(name, _ENTRY_POINT, nondeterministic=True, kwargs=arguments)
    if "autotune/Simulated-v0" not in registry:
        register("autotune/Simulated-v0", vector_entry_point="autotune.gym.vec_env:SimulatedVectorEnv")
