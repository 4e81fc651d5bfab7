"""Scaling of the learning rate with the effective batch; :class:`autotune.job.WarmupCosine` schedules it over time."""

from __future__ import annotations

import math

from autotune.job import LearningRateRule


def batch_factor(rule: LearningRateRule, batch: float, base_batch: float) -> float:
    """Return the factor on the learning rate at an effective batch.

    Args:
        rule: ``linear`` (eq. 11 of the paper; Goyal et al. 2017), ``sqrt`` (usual for Adam), or ``none``.
        batch: effective batch in samples.
        base_batch: the batch for which the learning rate was chosen, in samples.
    """
    ratio = batch / base_batch
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]
