"""State how a learning rate follows time and the effective batch."""

from __future__ import annotations

import math
from typing import Literal

from autotune.job import WarmupCosine


def warmup_cosine(step: float, *, warmup: float, total: float, base: float, minimum: float) -> float:
    """Return the learning rate of linear warm-up and cosine annealing.

    Args:
        step: t, 0 to ``total``.
        warmup: t_warmup.
        total: T.
        base: eta_base.
        minimum: eta_min.

    Source: eq. 10 of the paper.
    """
    schedule = WarmupCosine(warmup_frac=warmup / total, minimum_frac=minimum / base)
    return base * schedule.factor(step / total)


def batch_factor(rule: Literal["linear", "sqrt", "none"], batch: float, base_batch: float) -> float:
    """Return the factor by which the learning rate follows the effective batch.

    Args:
        rule: ``linear`` (eq. 11 of the paper; Goyal et al. 2017), ``sqrt`` (usual for Adam), or ``none``.
        batch: effective batch in samples.
        base_batch: the batch for which the learning rate was chosen, in samples.
    """
    ratio = batch / base_batch
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]
