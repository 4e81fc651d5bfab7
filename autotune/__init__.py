"""Tune gradient accumulation, per-layer precision and activation checkpoints of a real PyTorch training job.

Importing this package is fast: torch, mlflow, optuna and stable-baselines3 are loaded where they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autotune.catalog import load_job
from autotune.errors import (
    AttachError,
    AutotuneError,
    BudgetError,
    EngineError,
    InputError,
    JobError,
    PlanError,
    PolicyFileError,
    RunDirectoryError,
)
from autotune.gym.registration import register_environments
from autotune.job import DataSource, Job, WarmupCosine
from autotune.measurement import Failure, GradientStatistics, Measurement, UnitGradient
from autotune.plan import Launch, Plan, PlanSpace, Precision, Storage
from autotune.units import Unit, find_units, name_units

if TYPE_CHECKING:
    from autotune.api import compare, reproduce, resume, tune
    from autotune.cluster import ClusterOptions
    from autotune.engines.deepspeed_engine import DeepSpeedEngine
    from autotune.engines.isolated_engine import IsolatedEngine, RankOptions
    from autotune.engines.torch_engine import EngineOptions, TorchEngine
    from autotune.live.attach import attach
    from autotune.live.limits import Limits
    from autotune.live.tuner import LiveTuner

__version__ = "0.1.0"

__all__ = [
    "AttachError",
    "AutotuneError",
    "BudgetError",
    "ClusterOptions",
    "DataSource",
    "DeepSpeedEngine",
    "EngineError",
    "EngineOptions",
    "Failure",
    "GradientStatistics",
    "InputError",
    "IsolatedEngine",
    "Job",
    "JobError",
    "Launch",
    "Limits",
    "LiveTuner",
    "Measurement",
    "Plan",
    "PlanError",
    "PlanSpace",
    "PolicyFileError",
    "Precision",
    "RankOptions",
    "RunDirectoryError",
    "Storage",
    "TorchEngine",
    "Unit",
    "UnitGradient",
    "WarmupCosine",
    "__version__",
    "attach",
    "compare",
    "find_units",
    "load_job",
    "name_units",
    "reproduce",
    "resume",
    "tune",
]

register_environments()

# Names that need torch: loaded when first used.
_LAZY = {
    "Limits": "autotune.live.limits",
    "LiveTuner": "autotune.live.tuner",
    "attach": "autotune.live.attach",
    "DeepSpeedEngine": "autotune.engines.deepspeed_engine",
    "IsolatedEngine": "autotune.engines.isolated_engine",
    "RankOptions": "autotune.engines.isolated_engine",
    "ClusterOptions": "autotune.cluster",
    "EngineOptions": "autotune.engines.torch_engine",
    "TorchEngine": "autotune.engines.torch_engine",
    "compare": "autotune.api",
    "reproduce": "autotune.api",
    "resume": "autotune.api",
    "tune": "autotune.api",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'autotune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
