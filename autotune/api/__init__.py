"""Offer whole commands as functions: tune a job, or find arms and compare them, down to the documents on disk."""

from __future__ import annotations

from autotune.api.campaigns import compare_jobs, resume
from autotune.api.comparing import compare
from autotune.api.reproducing import reproduce
from autotune.api.session import Session, fastest_fitting_plan, predicted
from autotune.api.training import fine_tune, search_recipe, train
from autotune.api.tuning import tune, tune_stages

__all__ = [
    "Session",
    "compare",
    "compare_jobs",
    "fastest_fitting_plan",
    "fine_tune",
    "predicted",
    "reproduce",
    "resume",
    "search_recipe",
    "train",
    "tune",
    "tune_stages",
]
