"""Tune gradient accumulation, per-layer precision and activation checkpoints of a real PyTorch training job.

Importing this package is fast: its modules and their libraries are loaded on first use.
"""

from __future__ import annotations

import importlib
import random as _random
from typing import TYPE_CHECKING, Any

from autotune.gym.registration import register_with_gymnasium

if TYPE_CHECKING:
    from autotune.catalog import load_job
    from autotune.commands import compare, reproduce, resume, tune
    from autotune.engines.deepspeed_engine import DeepSpeedEngine
    from autotune.engines.fsdp2_engine import Fsdp2Engine
    from autotune.engines.isolated_engine import IsolatedEngine
    from autotune.engines.pipeline_engine import PipelineEngine
    from autotune.engines.ray_cluster import ClusterOptions
    from autotune.engines.registry import RankOptions
    from autotune.engines.torch_engine import EngineOptions, TorchEngine
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
    from autotune.job import DataSource, Job, WarmupCosine
    from autotune.live.attach import attach, detach
    from autotune.live.limits import Limits
    from autotune.live.placed_checkpoints import checkpoint
    from autotune.live.settings import Settings
    from autotune.live.tuner import LiveTuner
    from autotune.measurement import Failure, GradientStatistics, Measurement, UnitGradient
    from autotune.mechanics.applying import apply
    from autotune.plan import Launch, Plan, PlanSpace, Precision, Storage
    from autotune.step_parts import StepParts
    from autotune.units import Unit, find_units, name_units

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
    "Fsdp2Engine",
    "GradientStatistics",
    "InputError",
    "IsolatedEngine",
    "Job",
    "JobError",
    "Launch",
    "Limits",
    "LiveTuner",
    "Measurement",
    "PipelineEngine",
    "Plan",
    "PlanError",
    "PlanSpace",
    "PolicyFileError",
    "Precision",
    "RankOptions",
    "RunDirectoryError",
    "Settings",
    "StepParts",
    "Storage",
    "TorchEngine",
    "Unit",
    "UnitGradient",
    "WarmupCosine",
    "__version__",
    "apply",
    "attach",
    "checkpoint",
    "compare",
    "detach",
    "find_units",
    "load_job",
    "name_units",
    "reproduce",
    "resume",
    "tune",
]

register_with_gymnasium()

# The module from which each name is imported on first use.
_LAZY = {
    name: module
    for module, names in {
        "autotune.commands": ("compare", "reproduce", "resume", "tune"),
        "autotune.catalog": ("load_job",),
        "autotune.engines.ray_cluster": ("ClusterOptions",),
        "autotune.engines.deepspeed_engine": ("DeepSpeedEngine",),
        "autotune.engines.fsdp2_engine": ("Fsdp2Engine",),
        "autotune.engines.isolated_engine": ("IsolatedEngine",),
        "autotune.engines.pipeline_engine": ("PipelineEngine",),
        "autotune.engines.registry": ("RankOptions",),
        "autotune.engines.torch_engine": ("EngineOptions", "TorchEngine"),
        "autotune.errors": (
            "AttachError",
            "AutotuneError",
            "BudgetError",
            "EngineError",
            "InputError",
            "JobError",
            "PlanError",
            "PolicyFileError",
            "RunDirectoryError",
        ),
        "autotune.job": ("DataSource", "Job", "WarmupCosine"),
        "autotune.live.attach": ("attach", "detach"),
        "autotune.live.limits": ("Limits",),
        "autotune.live.placed_checkpoints": ("checkpoint",),
        "autotune.live.settings": ("Settings",),
        "autotune.live.tuner": ("LiveTuner",),
        "autotune.measurement": ("Failure", "GradientStatistics", "Measurement", "UnitGradient"),
        "autotune.mechanics.applying": ("apply",),
        "autotune.plan": ("Launch", "Plan", "PlanSpace", "Precision", "Storage"),
        "autotune.step_parts": ("StepParts",),
        "autotune.units": ("Unit", "find_units", "name_units"),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        # Some libraries draw random numbers while they are imported.
        state = _random.getstate()
        try:
            return getattr(importlib.import_module(_LAZY[name]), name)
        finally:
            if _random.getstate() != state:
                _random.setstate(state)
    raise AttributeError(f"module 'autotune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
