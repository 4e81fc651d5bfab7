"""The functions behind the verbs: tune, compare, train, resume and reproduce, down to the documents on disk."""

from __future__ import annotations

from autotune.commands.comparing import compare
from autotune.commands.reproducing import reproduce
from autotune.commands.resuming import compare_jobs, resume
from autotune.commands.training import fine_tune, search_recipe, train
from autotune.commands.tuning import tune, tune_stages

__all__ = [
    "compare",
    "compare_jobs",
    "fine_tune",
    "reproduce",
    "resume",
    "search_recipe",
    "train",
    "tune",
    "tune_stages",
]
