"""Find the units that a compiled storage leaves uncompiled, before anything is measured."""

from __future__ import annotations

from autotune.choices import Storage
from autotune.engines.torch_engine import TorchEngine
from autotune.mechanics.compiled_units import SAME, refusal
from autotune.profiling.gradient_error import tried_gradient


def uncompiled(engine: TorchEngine, storage: Storage) -> dict[str, str]:
    """Return the units that run uncompiled under a compiled storage, each with the reason.

    Args:
        engine: the engine; its training state does not change. It runs a few steps with the smallest micro-batches.
        storage: the storage.
    """
    space = engine.space
    lean = space.leanest().changed(precision=space.baseline().precision)
    for _ in range(SAME + 1):
        raised = tried_gradient(engine, lean.changed(storage=dict.fromkeys(space.recomputable, storage)))[1]
        if raised:
            return dict.fromkeys(space.recomputable, f"the step raised {raised}")
    reasons = {name: refusal(engine.model.get_submodule(name), storage.compile_budget) for name in space.recomputable}
    return {name: reason for name, reason in reasons.items() if reason is not None}
