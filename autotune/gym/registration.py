"""Registration of the environments with Gymnasium; importing this module does not load Gymnasium, torch or a job."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_ENTRY_POINT = "autotune.gym.job_env:TuningEnv"
_REGISTRY = "gymnasium.envs.registration"


def register_with_gymnasium() -> None:
    """Register the environments now if Gymnasium is already imported, otherwise when it is imported."""
    if _REGISTRY in sys.modules:
        register_environments()
    else:
        # Gymnasium has no entry points for other packages, and importing it here would take longer than the rest of the
        # start of the command line.
        sys.meta_path.insert(0, _Watcher())


def register_environments() -> None:
    """Register ``autotune/Tuning-v0``, one environment per reference job, and ``autotune/Simulated-v0``.

    Environments of real jobs are declared non-deterministic, since observations contain measured times. Simulated runs
    repeat exactly.
    """
    from gymnasium.envs.registration import register, registry

    from autotune.catalog import catalog

    wanted = {"autotune/Tuning-v0": {}, **{f"autotune/{name}-v0": {"job": name} for name in catalog()}}
    for name, arguments in wanted.items():
        if name not in registry:
            register(name, _ENTRY_POINT, nondeterministic=True, kwargs=arguments)
    if "autotune/Simulated-v0" not in registry:
        register(
            "autotune/Simulated-v0",
            "autotune.gym.simulated_env:SimulatedEnv",
            vector_entry_point="autotune.gym.simulated_env:SimulatedVectorEnv",
        )


class _Watcher:
    """An import hook that registers the environments after the import of Gymnasium's registry."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the registry's spec with a loader that also registers the environments; ``None`` for other modules."""
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register_environments()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
