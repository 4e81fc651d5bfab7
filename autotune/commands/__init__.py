"""Functions of the subcommands tune, compare, train, resume and reproduce, which write documents to disk."""

from __future__ import annotations

from autotune.commands.comparing import compare, run_comparison
from autotune.commands.reproducing import reproduce
from autotune.commands.resuming import compare_jobs, resume
from autotune.commands.training import FineTuneRequest, TrainRequest, fine_tune, train
from autotune.commands.tuning import run_tuning, tune, tune_launches, tune_layouts

__all__ = [
    "FineTuneRequest",
    "TrainRequest",
    "compare",
    "compare_jobs",
    "fine_tune",
    "reproduce",
    "resume",
    "run_comparison",
    "run_tuning",
    "train",
    "tune",
    "tune_launches",
    "tune_layouts",
]
